"""A run that is killed anywhere and started again gives what an uninterrupted run gives, bit for bit."""

from __future__ import annotations

import random
import signal
import time
from pathlib import Path

import pytest

from geo_sokoban_pipeline.events import Event
from kill_hook import kill_at
from runs import Project, assert_same_run, finish, kedro_command, read_run

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("resumed")]

# Fewer checkpoints are kept than there are iterations, so what is deleted must not depend on interruptions either.
COMMAND = ("--pipelines=train_sokoban", "--params=train_sokoban.loop.iterations=4,train_sokoban.loop.keep_last=2")
# One run is killed at all of these, one after the other: (point, arrival in that process).
POINTS = (
    ("after_save:sokoban.prompts", 1),
    (f"{Event.SFT_STEP}:*", 2),
    ("before_save:train_sokoban.policy", 1),
    (f"{Event.COLLECT}:*", 1),
    (f"{Event.UPDATE}:*", 2),
    (f"{Event.VALIDATE}:*", 1),
    # Saved first is the order to rewind, then an iteration's episodes, then its metrics and checkpoint.
    ("after_save:train_sokoban.trajectories", 2),
    ("after_save:train_sokoban.metrics", 3),
    ("before_save:train_sokoban.checkpoints", 3),
    (f"{Event.CHECKPOINT}:*", 2),
    ("after_save:train_sokoban.checkpoints", 3),
    ("before_node:*.evaluate_policies", 1),
)
SHOTS = 3


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict, float]:
    """Result of a run that nobody disturbs, and the seconds it took."""
    root = tmp_path_factory.mktemp("uninterrupted")
    began = time.monotonic()
    finish(kedro_command(*COMMAND, data_root=root))
    return read_run(root), time.monotonic() - began


def test_killed_at_named_points(uninterrupted: tuple[dict, float], tmp_path: Path) -> None:
    for point, arrival in POINTS:
        process = kedro_command(*COMMAND, data_root=tmp_path, **kill_at(point, arrival))
        output, _ = process.communicate(timeout=300)
        assert process.returncode == -signal.SIGKILL, f"{point} was not reached:\n{output[-3000:]}"
    Project(tmp_path).succeed(*COMMAND)
    assert_same_run(uninterrupted[0], read_run(tmp_path))


@pytest.mark.parametrize("shot", range(SHOTS))
def test_killed_at_a_seeded_time(uninterrupted: tuple[dict, float], tmp_path: Path, shot: int) -> None:
    expected, seconds = uninterrupted
    # Imports take the first third of so short a run; nothing could be lost there.
    share = random.Random(shot).uniform((shot + 1) / (SHOTS + 1), (shot + 2) / (SHOTS + 1))
    for attempt in range(1, 5):
        root = tmp_path / str(attempt)
        process = kedro_command(*COMMAND, data_root=root)
        time.sleep(share * seconds / attempt)
        process.kill()
        process.communicate()
        if process.returncode == -signal.SIGKILL:
            break  # else the machine was quicker this time, and the run was over
    assert process.returncode == -signal.SIGKILL
    Project(root).succeed(*COMMAND)
    assert_same_run(expected, read_run(root))
