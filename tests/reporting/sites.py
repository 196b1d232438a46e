"""Stored episodes of all three tasks for tests of the browser, and its scripts read back."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from builders import CONTEXT
from geo_sokoban_pipeline.trajectories.parquet import name_parts, write_trajectories
from geo_sokoban_pipeline.trajectories.types import Trajectory
from reporting.material import make_levels, play
from reporting.problem_material import answer, make_data

HOSTILE = (
    "</script><script>document.title='broken'</script><img src=x onerror=\"document.title='broken'\">"
    " '\\ \u2028 ${1}{{ 7*7 }}"
)


def store(root: Path, episodes: Sequence[Trajectory], run: str, run_id: str, kind: str = "trajectories") -> Path:
    """Write episodes as those of a run; returns the folder of its outputs."""
    outputs = root / "07_model_output" / run / run_id
    for iteration in sorted({episode.iteration for episode in episodes}):
        own = [episode for episode in episodes if episode.iteration == iteration]
        for name, table in name_parts(iteration, own, CONTEXT).items():
            write_trajectories(outputs / kind / f"{name}.parquet", table)
    return outputs


def play_groups(skill: float, iteration: int = 0, groups: int = 3, size: int = 4) -> list[Trajectory]:
    """Training episodes on boards, in groups, with advantages and the trainer's log-probs."""
    episodes = []
    for group in range(groups):
        level = make_levels(48)[4 + group]
        members = [
            play(level, skill, f"train_sokoban/i{iteration:05d}", group, sample, iteration=iteration)
            for sample in range(size)
        ]
        mean = sum(one.reward or 0.0 for one in members) / size
        for one in members:
            one.advantage, one.trained = (one.reward or 0.0) - mean, True
            one.old_log_probs = one.rollout_log_probs.copy()
        episodes += members
    return episodes


def answer_groups(task: str, groups: int = 2, size: int = 3) -> list[Trajectory]:
    """Training episodes on problems, in groups, without advantages."""
    rows, _ = make_data(task)
    return [
        answer(task, rows[group], 0.5, f"train_{task}/i00000", group, sample)
        for group in range(groups)
        for sample in range(size)
    ]


def make_hostile(episode: Trajectory) -> Trajectory:
    """The same episode with markup and script wherever a text comes from a policy, a prompt or an environment."""
    for turn in episode.turns:
        turn.text, turn.info = f"{turn.text} {HOSTILE}", {HOSTILE: HOSTILE}
        turn.action = turn.action and HOSTILE
    episode.label = episode.error = episode.response = episode.difficulty = HOSTILE
    return episode


def rows_of_scores(episode: Trajectory, run: str = "train_sokoban", **values: Any) -> list[dict[str, Any]]:
    """Rows of `token_scores` of an episode of a run's `default`; values are of all its tokens, or one each."""
    sampled = np.flatnonzero(episode.loss_mask).tolist()
    whose = {"run": run, "run_id": "default", "trajectory_id": episode.trajectory_id, "scored_by": "x"}
    common = {
        "scored_version": 0,
        "log_prob": -0.5,
        "entropy": 1.0,
        "ratio": 1.0,
        "top_tokens": [],
        "top_log_probs": [],
    }
    given = {name: value if isinstance(value, list) else [value] * len(sampled) for name, value in values.items()}
    return [
        {**whose, **common, "position": at, **{name: value[number] for name, value in given.items()}}
        for number, at in enumerate(sampled)
    ]


def store_scores(root: Path, name: str, rows: list[dict[str, Any]], schema: pa.Schema) -> None:
    """Write rows as the `token_scores` or the `occlusion` of a command."""
    path = root / f"07_model_output/score_sokoban/default/{name}/iter=00000/part-000.parquet"
    path.parent.mkdir(parents=True)
    pq.write_table(pa.Table.from_pylist(rows, schema=schema), path)


def read_script(path: Path) -> Any:
    """The value that a script of a site hands to the page; also checks that it is plain ASCII where that matters."""
    text = path.read_text(encoding="utf-8")
    assert not set(text) & set("<\u2028\u2029")
    found = re.fullmatch(r"put\('([^']*)','(.*)'\);\n", text, flags=re.DOTALL)
    assert found is not None and path.as_posix().endswith(f"data/{found[1]}.js")
    # JavaScript's escapes in a string: \\, \' and \uXXXX.
    plain = re.sub(r"\\(u[0-9a-f]{4}|.)", lambda one: chr(int(one[1][1:], 16)) if len(one[1]) > 1 else one[1], found[2])
    return json.loads(plain)


def read_columns(site: Path) -> list[dict[str, Any]]:
    """Rows of the list."""
    rows: list[dict[str, Any]] = []
    for number in range(read_script(site / "data" / "site.js")["chunks"]):
        part = read_script(site / "data" / "list" / f"{number}.js")
        columns = {name: _expand(column, part["rows"]) for name, column in part["columns"].items()}
        rows += [dict(zip(columns, cells, strict=True)) for cells in zip(*columns.values(), strict=True)]
    return rows


def _expand(column: dict[str, Any], rows: int) -> list[Any]:
    if "same" in column:
        return [column["same"]] * rows
    return column["values"] if "values" in column else [column["words"][place] for place in column["at"]]
