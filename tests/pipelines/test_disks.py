"""Real full and read-only disks in mid-run: path and space are named, and what was committed continues."""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path

import pytest
from kedro.io import DatasetError

from mounts import closable_folder, leave_free, set_read_only, small_disk
from pipelines.conftest import LONGER
from runs import Project, assert_same_run, read_run

pytestmark = pytest.mark.slow

MODELS, OUTPUTS = "06_models/train_sokoban/default", "07_model_output/train_sokoban/default"
DISK = 64 << 20
Disk = Callable[[Path, int], AbstractContextManager[Path]]


@pytest.fixture
def disks() -> Iterator[ExitStack]:
    """Small disks that are unmounted at the end."""
    with ExitStack() as stack:
        yield stack


def put_on_disk(disks: ExitStack, folder: Path, kind: Disk) -> Path:
    """Move a folder's content onto a small disk of its own, or into a folder that can be closed."""
    aside = folder.with_name(f"{folder.name}_aside")
    folder.rename(aside)
    disks.enter_context(kind(folder, DISK))
    shutil.copytree(aside, folder, dirs_exist_ok=True)
    shutil.rmtree(aside)
    return folder


def fail_and_go_on(project: Project, *said: str) -> None:
    """The command ends with an error that says so much; what was committed is readable, and nothing half-written."""
    with pytest.raises(DatasetError) as error:
        project.run(params=LONGER)
    for part in (*said, "the same command continues from it"):
        assert part in str(error.value)
    assert project.load("train_sokoban.resume_state")["iteration"] == 2
    assert project.load("train_sokoban.trajectories")["iter=00002/part-000"]().num_rows == 16
    assert not list(project.root.rglob(".*.tmp"))


def test_full_disks(longer_run, clone, disks):
    """One after the other in the next iteration: its episodes, its validation, its metrics, its checkpoint."""
    full = (
        (f"{OUTPUTS}/trajectories", 4096, "iter=00003/part-000.parquet: disk full, about"),
        (f"{OUTPUTS}/eval_trajectories", 4096, "iter=00004/part-000.parquet: disk full, about"),
        (f"{OUTPUTS}/metrics", 0, "iter=00003.json: disk full, about"),
        (f"{MODELS}/checkpoints", 1 << 20, "iter=00003: disk full, about"),
    )
    for name, free, said in full:
        folder = put_on_disk(disks, clone.root / name, small_disk)
        ballast = leave_free(folder, free)
        fail_and_go_on(clone, f"{folder}/{said}", "free")
        ballast.unlink()
    clone.run(params=LONGER)
    assert_same_run(read_run(longer_run.root), read_run(clone.root))


def test_read_only_folders(longer_run, clone, disks):
    # The loop takes old checkpoints back before it begins, so there the folder itself is named.
    for name, place in ((f"{OUTPUTS}/trajectories", "/iter=00003"), (f"{MODELS}/checkpoints", "")):
        folder = put_on_disk(disks, clone.root / name, closable_folder)
        set_read_only(folder, True)
        fail_and_go_on(clone, f"{folder}{place}", "no right to write (")
        set_read_only(folder, False)
    clone.run(params=LONGER, to_nodes=["train_sokoban.train_grpo"])
    for name in ("model.safetensors", "optimizer.safetensors"):
        one, other = (run.root / MODELS / "checkpoints/iter=00003" / name for run in (longer_run, clone))
        assert one.read_bytes() == other.read_bytes()


def test_a_read_only_data_root_stops_before_any_work(project, disks):
    disks.enter_context(closable_folder(project.root, DISK))
    set_read_only(project.root, True)
    line = project.refused("--pipelines=train_sokoban")
    assert f"{project.root}/{MODELS}/run.lock: no right to write" in line
    assert "move data_root" in line


LIMITED = """
import resource, sys
from pathlib import Path
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[2]), resource.RLIM_INFINITY))
from geo_sokoban_pipeline.datasets import CheckpointsDataset
from geo_sokoban_pipeline.runs.storage import NewCheckpoint
def write(folder):
    (folder / "model.safetensors").write_bytes(bytes(1 << 20))
    return {}
CheckpointsDataset(sys.argv[1]).save({"iter=00001": NewCheckpoint(write)})
"""


@pytest.mark.parametrize(("limit", "code"), [(1 << 16, 1), (resource.RLIM_INFINITY, 0)])
def test_a_limit_on_the_size_of_files(tmp_path, limit, code):
    """Needs no rights, unlike a mount."""
    words = [sys.executable, "-c", LIMITED, str(tmp_path / "checkpoints"), str(limit)]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2] / "src")}
    done = subprocess.run(words, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == code, done.stderr
    if code:
        assert "iter=00001: no file may be so large here" in done.stderr
        assert "ulimit -f" in done.stderr
        assert not list((tmp_path / "checkpoints").iterdir())
