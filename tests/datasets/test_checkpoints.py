"""Checkpoints: sealed or absent, retained or removed, verified before a run continues from one."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from kedro.io import DatasetError

from geo_sokoban_pipeline.datasets import CheckpointsDataset, ResumableDataset, StorageError
from geo_sokoban_pipeline.runs.storage import Complete, CorruptFolderError, NewCheckpoint, Rewind


def writer(text: str, keep: list[int] | None = None) -> NewCheckpoint:
    def write(folder: Path) -> dict[str, Any]:
        (folder / "state").mkdir()
        (folder / "state" / "weights.safetensors").write_text(text)
        (folder / "config.json").write_text("{}")
        return {"policy_version": int(text) + 1}

    return NewCheckpoint(write, keep)


def state_of(path: Path | str) -> ResumableDataset:
    return ResumableDataset({"type": "geo_sokoban_pipeline.datasets.CheckpointsDataset", "path": str(path)})


@pytest.fixture
def checkpoints(tmp_path: Path) -> CheckpointsDataset:
    dataset = CheckpointsDataset(str(tmp_path / "checkpoints"))
    dataset.save({f"iter={iteration:05d}": writer(str(iteration)) for iteration in (0, 1, 2)})
    return dataset


@pytest.fixture
def resume(checkpoints: CheckpointsDataset, tmp_path: Path) -> ResumableDataset:
    return state_of(tmp_path / "checkpoints")


def weights(tmp_path: Path, iteration: int) -> Path:
    return tmp_path / "checkpoints" / f"iter={iteration:05d}" / "state" / "weights.safetensors"


DAMAGES: dict[str, Callable[[Path], Any]] = {
    "truncated": lambda path: path.write_text(""),
    "altered": lambda path: path.write_text("x" * path.stat().st_size),
    "removed": Path.unlink,
    "manifest": lambda path: (path.parents[1] / "manifest.json").write_text('{"files": {'),
}


def test_all_checkpoints_and_the_newest_one(checkpoints: CheckpointsDataset, resume: ResumableDataset) -> None:
    loaded = checkpoints.load()
    assert [entry["iteration"] for entry in loaded.values()] == [0, 1, 2]
    entry = loaded["iter=00001"]
    assert (entry["dir"] / "state" / "weights.safetensors").read_text() == "1"
    assert entry["manifest"]["policy_version"] == 2
    assert sorted(entry["manifest"]["files"]) == ["config.json", "state/weights.safetensors"]
    state = resume.load()
    assert (state["iteration"], state["complete"], state["dir"].name) == (2, None, "iter=00002")
    assert state["manifest"]["policy_version"] == 3


def test_a_run_that_has_not_begun(tmp_path: Path) -> None:
    path = str(tmp_path / "none")
    assert CheckpointsDataset(path).load() == {}
    empty = {"folder": Path(path), "iteration": -1, "dir": None, "manifest": None, "complete": None, "stored": []}
    assert state_of(path).load() == empty
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize("later", [{"iter=00003": writer("3")}, Rewind(1), Rewind(5)])
def test_a_run_is_there_when_it_is_complete_and_not_when_it_is_taken_up_again(
    later: Any, checkpoints: CheckpointsDataset, resume: ResumableDataset, tmp_path: Path
) -> None:
    assert not checkpoints.exists()
    checkpoints.save(Complete(3))
    assert checkpoints.exists()
    assert resume.load()["complete"] == {"iterations": 3}
    assert json.loads((tmp_path / "checkpoints" / "COMPLETE.json").read_text())["iterations"] == 3
    checkpoints.save(later)
    assert not checkpoints.exists()


def test_a_new_checkpoint_says_which_ones_stay(checkpoints: CheckpointsDataset, tmp_path: Path) -> None:
    checkpoints.save({"iter=00003": writer("3", keep=[0, 2, 3, 77])})
    left = ["iter=00000", "iter=00002", "iter=00003"]
    assert list(checkpoints.load()) == left
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == left


def test_rewind_goes_back_and_unsealed_folders_do_not_exist(
    checkpoints: CheckpointsDataset, resume: ResumableDataset, tmp_path: Path
) -> None:
    (tmp_path / "checkpoints" / "iter=00002" / "manifest.json").unlink()
    assert list(checkpoints.load()) == ["iter=00000", "iter=00001"]
    assert resume.load()["iteration"] == 1
    (tmp_path / "checkpoints" / ".iter=00003.0123abcd.tmp").mkdir()
    checkpoints.save(Rewind(0))
    assert resume.load()["iteration"] == 0
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["iter=00000"]


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_named_with_the_way_out(
    damage: str, checkpoints: CheckpointsDataset, resume: ResumableDataset, tmp_path: Path
) -> None:
    DAMAGES[damage](weights(tmp_path, 2))
    with pytest.raises(DatasetError, match=r"delete .*iter=00002 to continue from iteration 00001") as caught:
        resume.load()
    assert isinstance(caught.value.__cause__, CorruptFolderError)
    named = "manifest.json" if damage == "manifest" else "state/weights.safetensors"
    assert f"iter=00002/{named}" in str(caught.value)
    if damage != "altered":  # a list of all reads no file as a whole
        with pytest.raises(DatasetError, match="iter=00002"):
            checkpoints.load()


@pytest.mark.usefixtures("checkpoints")
def test_the_newest_intact_one_is_found(resume: ResumableDataset, tmp_path: Path) -> None:
    DAMAGES["truncated"](weights(tmp_path, 2))
    DAMAGES["altered"](weights(tmp_path, 1))
    with pytest.raises(DatasetError, match=r"iter=00002 and .*iter=00001 to continue from iteration 00000"):
        resume.load()
    DAMAGES["truncated"](weights(tmp_path, 0))
    with pytest.raises(DatasetError, match="No intact checkpoint is left"):
        resume.load()


def fail(error: Exception) -> NewCheckpoint:
    def write(folder: Path) -> dict[str, Any]:
        (folder / "half").write_text("x")
        raise error

    return NewCheckpoint(write, keep=[3])


@pytest.mark.parametrize(
    ("checkpoint", "message", "cause"),
    [
        (fail(ValueError("NaN in the weights")), "NaN in the weights", ValueError),
        (fail(OSError(28, "No space left")), "iter=00003: disk full, about 3 bytes needed", StorageError),  # as before
        ({"a": 1}, "NewCheckpoint, not as a dict", None),
    ],
)
def test_a_checkpoint_that_fails_leaves_nothing_and_takes_no_other_away(
    checkpoint: Any, message: str, cause: Any, checkpoints: CheckpointsDataset, tmp_path: Path
) -> None:
    with pytest.raises(DatasetError, match=message) as caught:
        checkpoints.save({"iter=00003": checkpoint})
    assert isinstance(caught.value.__cause__, cause or object)
    assert list(checkpoints.load()) == ["iter=00000", "iter=00001", "iter=00002"]
    assert len(list((tmp_path / "checkpoints").iterdir())) == 3
