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
from runs import assert_same_run, read_run

pytestmark = pytest.mark.slow

MODELS, OUTPUTS = "06_models/train_sokoban/default", "07_model_output/train_sokoban/default"
DISK = 64 << 20
Disk = Callable[[Path, int], AbstractContextManager[Path]]


def rewind(root: Path) -> None:
    """Take a finished run back to the end of iteration 0."""
    models, outputs = root / MODELS, root / OUTPUTS
    for k in (1, 2):
        shutil.rmtree(models / "checkpoints" / f"iter={k:05d}")
        shutil.rmtree(outputs / "trajectories" / f"iter={k:05d}")
        shutil.rmtree(outputs / "eval_trajectories" / f"iter={k + 1:05d}")
        (outputs / "metrics" / f"iter={k:05d}.json").unlink()
    (models / "checkpoints" / "COMPLETE.json").unlink()
    shutil.rmtree(models / "final_policy")
    shutil.rmtree(outputs / "held_out_trajectories")
    shutil.rmtree(root / "08_reporting" / "train_sokoban")


@pytest.fixture
def disks() -> Iterator[ExitStack]:
    """Small disks that are unmounted at the end."""
    with ExitStack() as stack:
        yield stack


def put_on_disk(disks: ExitStack, folder: Path, kind: Disk = small_disk) -> Path:
    """Move a folder's content onto a small disk of its own, or into a folder that can be closed."""
    aside = folder.with_name(f"{folder.name}_aside")
    folder.rename(aside)
    disks.enter_context(kind(folder, DISK))
    shutil.copytree(aside, folder, dirs_exist_ok=True)
    shutil.rmtree(aside)
    return folder


@pytest.mark.parametrize(
    ("name", "free", "said"),
    [
        (f"{OUTPUTS}/trajectories", 4096, "iter=00001/part-000.parquet: disk full, about"),
        (f"{OUTPUTS}/eval_trajectories", 4096, "iter=00002/part-000.parquet: disk full, about"),
        (f"{OUTPUTS}/metrics", 0, "iter=00001.json: disk full, about"),
        (f"{MODELS}/checkpoints", 1 << 20, "iter=00001: disk full, about"),
    ],
)
def test_a_full_disk(finished_run, clone, disks, name, free, said):
    rewind(clone.root)
    folder = put_on_disk(disks, clone.root / name)
    ballast = leave_free(folder, free)
    with pytest.raises(DatasetError) as error:
        clone.run()
    for part in (f"{folder}/{said}", "free", "the same command continues from it"):
        assert part in str(error.value)
    # What was committed is readable, and nothing half-written is taken for more.
    state = clone.load("train_sokoban.resume_state")
    assert (state["iteration"], state["complete"]) == (0, None)
    assert clone.load("train_sokoban.trajectories")["iter=00000/part-000"]().num_rows == 16
    assert not list(clone.root.rglob(".*.tmp"))
    ballast.unlink()
    clone.run()
    assert_same_run(read_run(finished_run.root), read_run(clone.root))


@pytest.mark.parametrize(
    ("name", "place"),
    # The loop takes old checkpoints back before it begins, so there the folder itself is named.
    [(f"{OUTPUTS}/trajectories", "/iter=00001"), (f"{MODELS}/checkpoints", "")],
)
def test_a_read_only_folder(finished_run, clone, disks, name, place):
    rewind(clone.root)
    folder = put_on_disk(disks, clone.root / name, closable_folder)
    set_read_only(folder, True)
    with pytest.raises(DatasetError) as error:
        clone.run()
    for part in (f"{folder}{place}", "no right to write (", "the same command continues from it"):
        assert part in str(error.value)
    assert clone.load("train_sokoban.resume_state")["iteration"] == 0
    set_read_only(folder, False)
    clone.run()
    assert_same_run(read_run(finished_run.root), read_run(clone.root))


def test_a_read_only_data_root_stops_before_any_work(project, disks):
    disks.enter_context(closable_folder(project.root, DISK))
    set_read_only(project.root, True)
    result = project.command("--pipelines=train_sokoban")
    assert result.exit_code == 1
    (line,) = [line for line in result.output.splitlines() if line.startswith("Error: ")]
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
