"""A sharded run whose driver or other rank is killed at any point, and the same command: the undisturbed files."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from geo_sokoban_pipeline.events import Event
from kill_hook import kill_at
from runs import assert_same_run, beside, finish, kedro_command, read_run

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("ranks")]

COMMAND = (
    "--pipelines=train_sokoban",
    "--params=train_sokoban.processes=2,train_sokoban.sharding=full,train_sokoban.loop.iterations=4,"
    "train_sokoban.loop.keep_last=2,train_sokoban.warm_start.steps=6",
)
# One run is disturbed at all of these, one after the other: (point, arrival in that process, who is killed).
POINTS = (
    (f"{Event.SFT_STEP}:*", 2, "rank"),
    # Inside the save of the warm start's policy, then of its moments: each rank writes its part.
    (f"{Event.TENSOR}:model.safetensors", 7, "rank"),
    (f"{Event.TENSOR}:optimizer-00001-of-00002.safetensors", 9, "driver"),
    (f"{Event.UPDATE}:*", 2, "driver"),
    # Inside the save of a checkpoint.
    (f"{Event.TENSOR}:model.safetensors", 5, "driver"),
    (f"{Event.TENSOR}:optimizer-00001-of-00002.safetensors", 20, "rank"),
    ("after_save:train_sokoban.checkpoints", 2, "rank"),
)


def test_killed_at_named_points(tmp_path: Path) -> None:
    root = tmp_path / "disturbed"
    with beside(kedro_command(*COMMAND, data_root=tmp_path / "undisturbed")):
        for point, arrival, whom in POINTS:
            process = kedro_command(*COMMAND, data_root=root, **kill_at(point, arrival, whom=whom))
            output = finish(process, -signal.SIGKILL if whom == "driver" else 1)
            if whom == "rank":
                assert "ended with exit code -9 (SIGKILL). The same command continues" in " ".join(output.split())
        finish(kedro_command(*COMMAND, data_root=root))
    expected, found = read_run(tmp_path / "undisturbed"), read_run(root)
    assert any("optimizer-00002-of-00002" in name for name in expected["weights"]), "the state was sharded"
    assert_same_run(expected, found)
