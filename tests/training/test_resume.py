"""A run that is killed anywhere and started again gives what an uninterrupted run gives, bit for bit.

The uninterrupted one hashes strings differently, so that no order of a set or of a dictionary decides over a result.
"""

from __future__ import annotations

import random
import signal
import time
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from geo_sokoban_pipeline.events import Event
from kill_hook import kill_at
from runs import Project, assert_same_run, finish, kedro_command, read_run

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("resumed")]

# Fewer checkpoints are kept than there are iterations, so what is deleted must not depend on interruptions either.
COMMAND = ("--pipelines=train_sokoban", "--params=train_sokoban.loop.iterations=3,train_sokoban.loop.keep_last=2")
# One run is killed at all of these, one after the other: (point, arrival in that process).
POINTS = (
    ("after_save:sokoban.prompts", 1),
    (f"{Event.SFT_STEP}:*", 2),
    (f"{Event.UPDATE}:*", 2),
    # Saved first is the order to rewind, then an iteration's episodes, then its metrics and checkpoint.
    ("after_save:train_sokoban.trajectories", 2),
    ("after_save:train_sokoban.metrics", 3),
    (f"{Event.CHECKPOINT}:*", 2),
    ("after_save:train_sokoban.checkpoints", 3),
    ("before_node:*.evaluate_policies", 1),
)
LEVEL_FILES = ("01_raw/sokoban/*/raw_levels.parquet", "05_model_input/sokoban/*/prompts.parquet")


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, float]:
    """Data root of a run that nobody disturbs, and the seconds it took."""
    root = tmp_path_factory.mktemp("uninterrupted")
    began = time.monotonic()
    finish(kedro_command(*COMMAND, data_root=root, PYTHONHASHSEED="1"))
    return root, time.monotonic() - began


def test_killed_at_named_points(uninterrupted: tuple[Path, float], tmp_path: Path) -> None:
    for point, arrival in POINTS:
        finish(kedro_command(*COMMAND, data_root=tmp_path, **kill_at(point, arrival)), -signal.SIGKILL)
    Project(tmp_path).succeed(*COMMAND)
    root, _ = uninterrupted
    for name in LEVEL_FILES:
        (one,), (other,) = (place.glob(name) for place in (root, tmp_path))
        assert one.relative_to(root) == other.relative_to(tmp_path)
        assert pq.ParquetFile(one).read().equals(pq.ParquetFile(other).read()), name
    assert_same_run(read_run(root), read_run(tmp_path))


def test_killed_at_a_seeded_time(uninterrupted: tuple[Path, float], tmp_path: Path) -> None:
    whole, seconds = uninterrupted
    # Imports take the first third of so short a run; nothing could be lost there.
    share = random.Random(1).uniform(0.4, 0.9)
    for attempt in range(1, 5):
        root = tmp_path / str(attempt)
        process = kedro_command(*COMMAND, data_root=root, PYTHONHASHSEED="2")
        time.sleep(share * seconds / attempt)
        process.kill()
        process.communicate()
        if process.returncode == -signal.SIGKILL:
            break  # else the machine was quicker this time, and the run was over
    assert process.returncode == -signal.SIGKILL
    Project(root).succeed(*COMMAND)
    assert_same_run(read_run(whole), read_run(root))
