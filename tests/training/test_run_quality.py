"""What every stored episode of a run must hold: the contract, token parity, files of known formats; with images under
the default rules, and with boards as text under slime's.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from geo_sokoban_pipeline.envs.sokoban import Board
from geo_sokoban_pipeline.evaluation.audit import audit_files, check_token_parity
from geo_sokoban_pipeline.policies.policy import load_policy
from geo_sokoban_pipeline.runs.storage import read_json
from geo_sokoban_pipeline.trajectories.parquet import read_trajectories
from geo_sokoban_pipeline.trajectories.schema import validate_trajectories
from geo_sokoban_pipeline.trajectories.types import Trajectory, table_to_trajectories
from runs import TRAJECTORY_KINDS, Project

pytestmark = pytest.mark.slow

# The original's limits would take minutes with a policy that babbles; its rules are what is tested.
SLIME_EXACT = (
    "train_sokoban.rollout.preset=slime_exact,train_sokoban.env.args.after_think=false,"
    "train_sokoban.rollout.sampling.top_p=0.9"
)


GRID = re.compile(r"(?:^[#_O√XPS]{3,}\n?)+", re.MULTILINE)
SETTINGS = {"default": "", "slime_exact": f"{SLIME_EXACT},sokoban.observation=text"}


@pytest.fixture(scope="module", params=list(SETTINGS))
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    root = tmp_path_factory.mktemp(request.param)
    chosen = SETTINGS[request.param]
    Project(root).succeed("--pipelines=train_sokoban", *([f"--params={chosen}"] if chosen else []))
    return request.param, root


def stored_episodes(root: Path) -> list[Trajectory]:
    outputs = root / "07_model_output/train_sokoban/default"
    files = [path for kind in TRAJECTORY_KINDS for path in sorted((outputs / kind).rglob("*.parquet"))]
    assert files
    episodes: list[Trajectory] = []
    for path in files:
        table = read_trajectories(path)
        validate_trajectories(table)
        episodes += table_to_trajectories(table)
    return episodes


def test_tokens_equal_the_chat_template(run: tuple[str, Path]) -> None:
    rules, root = run
    codec = load_policy(root / "06_models/train_sokoban/default/final_policy").codec
    episodes = stored_episodes(root)
    assert check_token_parity(episodes, codec, turn_separator=rules != "slime_exact") == []
    # The check notices the one newline by which the two rule sets differ, wherever an episode has a second turn.
    several = [episode for episode in episodes if len(episode.turns) > 2]
    assert several
    wrong = check_token_parity(several, codec, turn_separator=rules == "slime_exact")
    assert {trajectory_id for trajectory_id, _ in wrong} == {episode.trajectory_id for episode in several}


def test_boards_are_shown_as_asked(run: tuple[str, Path]) -> None:
    """As an image or as text, in the prompt and after each turn; without images there is none to leave blank."""
    rules, root = run
    for episode in stored_episodes(root):
        observations = [turn for turn in episode.turns if turn.role == "user"]
        if rules == "default":
            assert all(turn.image_indices for turn in observations)
            continue
        assert episode.images == [] and not any(turn.image_indices for turn in observations)
        boards = [Board.from_text(grid) for turn in observations for grid in GRID.findall(turn.text)]
        assert len(boards) == len(observations)
        assert boards[0].to_grid() == GRID.findall(observations[0].text)[0].strip("\n")
    rows = read_json(root / "08_reporting/train_sokoban/default/eval_summary.json")["rows"]
    assert any(row["policy"] == "final_blank" for row in rows) == (rules == "default")


def test_times_of_parts_fit_into_the_whole(run: tuple[str, Path]) -> None:
    rows = [
        read_json(path) for path in sorted((run[1] / "07_model_output/train_sokoban/default/metrics").glob("*.json"))
    ]
    assert len(rows) > 1
    for row in rows:
        # Two processes play side by side: their seconds are means, not sums.
        assert 0 < row["perf/engine_time"] + row["perf/env_time"] <= row["perf/rollout_time"]
        assert row["perf/rollout_time"] + row["perf/update_time"] <= row["perf/step_time"]
        assert 0.1 < row["perf/memory_gb"] < 100
        assert row["perf/write_time"] <= row["perf/save_time"]
    # The first row cannot know what its own saving takes; every other one has that of the row before.
    assert rows[0]["perf/save_time"] == 0
    assert all(row["perf/write_time"] > 0 and row["perf/write_cpu_time"] > 0 for row in rows[1:])


def test_every_file_has_a_known_format(run: tuple[str, Path]) -> None:
    assert audit_files(run[1]) == []
