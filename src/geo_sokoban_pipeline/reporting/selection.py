"""Which stored episodes a report shows. The choice is a rule that the page states, the same for the same files.

Only columns without images are looked at to choose; the chosen rows alone are turned into episodes.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import pyarrow as pa

from geo_sokoban_pipeline.reporting.formats import is_number
from geo_sokoban_pipeline.trajectories import Trajectory, table_to_trajectories

Parts = Mapping[str, Callable[..., pa.Table]]
GALLERY = 12
EXTREMES = 3
_FAMILY = "family_"  # prefix of the metric that names a problem's family


@dataclass(frozen=True)
class LevelPair:
    """One held-out prompt: its kind, and how the last and the first policy played it.

    Attributes:
        length: fewest moves of a level, or the family of a problem; None: unknown.
    """

    length: int | str | None
    after: Trajectory
    before: Trajectory | None


@dataclass(frozen=True)
class Extremes:
    """Training episodes of one iteration that did best and worst beside the others of their group.

    Attributes:
        means: mean reward of the group of each, by trajectory id.
    """

    iteration: int
    best: list[Trajectory]
    worst: list[Trajectory]
    image_pad_id: int | None
    means: dict[str, float]


def choose_gallery(played: Parts, policies: int, limit: int = GALLERY) -> list[LevelPair]:
    """Held-out prompts to show, by kind: levels by optimal length, problems by family.

    For every kind the first solved episode, then, from the last kind to the first, the first unsolved one, until there
    are `limit`; the kinds are thinned out evenly where there are more of them than that.

    Args:
        played: parts `iter=<number of the policy>/…`.
        policies: how many policies were evaluated; the last one is shown, the first one beside it.
    """
    after = _sampled_rows(played, policies - 1)
    before = {row.level: row for row in reversed(_sampled_rows(played, 0))} if policies > 1 else {}
    pairs = [(row, before.get(row.level)) for row in _spread(after, limit)]
    return [LevelPair(row.length, row.load(), other.load() if other else None) for row, other in pairs]


def choose_extremes(trained: Parts, amount: int = EXTREMES) -> Extremes | None:
    """Best and worst episodes of the newest iteration that has graded ones; trained ones where there are any.

    An episode is as good as its reward is above its group's mean, which is what GRPO compares: by the reward alone
    the best ones would be those of easy prompts. At most two parts are read. Episodes of one group are shown once, so
    that the examples differ.
    """
    for name in list(trained)[-1:-3:-1]:
        table = trained[name]()
        rows = table.select(["iteration", "group_index", "reward", "trained"]).to_pylist()
        graded = [(at, row) for at, row in enumerate(rows) if is_number(row["reward"])]
        graded = [item for item in graded if item[1]["trained"]] or graded
        if graded:
            means = _group_means([row for _, row in graded])
            ranked = sorted(graded, key=lambda item: (means[item[1]["group_index"]] - item[1]["reward"], item[0]))
            best = _one_per_group(ranked, amount)
            worst = [at for at in _one_per_group(list(reversed(ranked)), amount) if at not in best]
            pad = (table.schema.metadata or {}).get(b"image_pad_id")
            chosen = _load(table, best), _load(table, worst)
            shown = {one.trajectory_id: means[one.group_index] for one in (*chosen[0], *chosen[1])}
            return Extremes(int(rows[0]["iteration"]), *chosen, int(pad) if pad else None, shown)
    return None


@dataclass(frozen=True)
class _Row:
    """A stored episode before it is loaded."""

    table: pa.Table
    at: int
    level: tuple[int, int]
    length: int | str | None
    solved: bool

    def load(self) -> Trajectory:
        return _load(self.table, [self.at])[0]


def _sampled_rows(played: Parts, policy: int) -> list[_Row]:
    """First sampled episode of each level of a policy; greedy ones where nothing was sampled."""
    rows: list[tuple[bool, _Row]] = []
    for name, read in played.items():
        if int(name.split("/")[0].removeprefix("iter=")) != policy:
            continue
        table = read()
        columns = table.select(["group_index", "sample_index", "sampling", "metrics"]).to_pylist()
        for at, column in enumerate(columns):
            metrics = {item["name"]: item["value"] for item in column["metrics"]}
            level = (column["group_index"], column["sample_index"])
            solved = metrics.get("success", 0.0) >= 0.5
            row = _Row(table, at, level, _kind(metrics), solved)
            rows.append((_is_greedy(column["sampling"]), row))
    greedy_only = all(greedy for greedy, _ in rows)
    return [row for greedy, row in rows if (greedy_only or not greedy) and row.level[1] == 0]


def _kind(metrics: Mapping[str, float]) -> int | str | None:
    length = metrics.get("optimal_steps")
    if length is not None:
        return int(length)
    return next((name.removeprefix(_FAMILY) for name in sorted(metrics) if name.startswith(_FAMILY)), None)


def _is_greedy(sampling: str) -> bool:
    values: dict[str, Any] = json.loads(sampling or "{}")
    return bool(values.get("greedy"))


def _spread(rows: Sequence[_Row], limit: int) -> list[_Row]:
    lengths = sorted({row.length for row in rows}, key=lambda length: (length is None, length or 0))
    if len(lengths) > limit:
        lengths = [lengths[at * len(lengths) // limit] for at in range(limit)]
    first: dict[tuple[int | str | None, bool], _Row] = {}
    for row in rows:
        first.setdefault((row.length, row.solved), row)
    wanted = [(length, True) for length in lengths] + [(length, False) for length in reversed(lengths)]
    chosen = [first[key] for key in wanted if key in first][:limit]
    # Tasks without lengths offer two rows by this rule; the next ones in order fill up.
    if len(lengths) == 1:
        chosen += [row for row in rows if row not in chosen][: limit - len(chosen)]
    return sorted(chosen, key=lambda row: (row.length is None, row.length or 0, not row.solved, row.level))


def _group_means(rows: Sequence[Mapping[str, Any]]) -> dict[int, float]:
    rewards: dict[int, list[float]] = {}
    for row in rows:
        rewards.setdefault(row["group_index"], []).append(row["reward"])
    return {group: fmean(values) for group, values in rewards.items()}


def _one_per_group(ranked: Sequence[tuple[int, Mapping[str, Any]]], amount: int) -> list[int]:
    chosen: dict[int, int] = {}
    for at, row in ranked:
        chosen.setdefault(row["group_index"], at)
    return list(chosen.values())[:amount]


def _load(table: pa.Table, places: Sequence[int]) -> list[Trajectory]:
    return [table_to_trajectories(table.slice(at, 1))[0] for at in places]


def read_outcomes(played: Parts, policy: int) -> dict[str, list[bool]]:
    """Success of each sampled episode of a policy, by the content hash of its prompt.

    Args:
        played: parts `iter=<number of the policy>/…`; each is called with `columns`.
    """
    outcomes: dict[str, list[bool]] = {}
    for name, read in played.items():
        if int(name.split("/")[0].removeprefix("iter=")) == policy:
            for row in read(columns=["task_id", "sampling", "success"]).to_pylist():
                if not _is_greedy(row["sampling"]):
                    # As in the summary, an episode that failed counts as not solved.
                    outcomes.setdefault(row["task_id"], []).append(bool(row["success"]))
    return outcomes
