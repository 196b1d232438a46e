"""Partitions by iteration: whole or absent, disk errors that say what to do, and rows of metrics."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from kedro.io import DatasetError

from geo_sokoban_pipeline.datasets import IterationPartitions, MetricsDataset, StorageError
from geo_sokoban_pipeline.runs import storage
from geo_sokoban_pipeline.runs.storage import Rewind, explain_storage_errors


class Notes(IterationPartitions):
    """One text per iteration."""

    suffix = ".txt"

    def _write(self, path: Path, value: Any) -> None:
        storage.write_atomic(path, lambda temporary: temporary.write_text(value))

    def _read(self, path: Path) -> str:
        return path.read_text()

    def _bytes_needed(self, value: Any) -> int:
        return len(value)


class PartedNotes(Notes):
    """Several texts per iteration."""

    parted = True


@pytest.fixture
def notes(tmp_path: Path) -> Notes:
    return Notes(str(tmp_path / "notes"))


def contents(dataset: IterationPartitions) -> dict[str, str]:
    return {name: read() for name, read in dataset.load().items()}


def test_partitions_are_ordered_by_iteration_and_other_files_are_none(notes: Notes, tmp_path: Path) -> None:
    notes.save({})
    assert not (tmp_path / "notes").exists()
    (tmp_path / "notes").mkdir()
    assert notes.load() == {} and not notes.exists()
    for iteration in (100000, 2, 99999, 10):
        notes.save({f"iter={iteration:05d}": str(iteration)})
    for name in (".iter=00001.txt.ab.tmp", "iter=00001.txt.tmp", "iter=xyz.txt", "readme.txt"):
        (tmp_path / "notes" / name).write_text("y")
    assert list(contents(notes)) == ["iter=00002", "iter=00010", "iter=99999", "iter=100000"]
    assert notes.exists()
    with pytest.raises(DatasetError, match="not a list"):
        notes.save([1])


@pytest.mark.parametrize(
    "name", ["00012", "iter=12", "iter=00012/part-000", "../iter=00012", "iter=00012/../x", "iter=", "", "prune"]
)
def test_other_ids_are_refused_before_anything_happens(name: str, notes: Notes) -> None:
    notes.save({"iter=00000": "kept", "iter=00001": "kept"})
    with pytest.raises(DatasetError, match="form"):
        notes.save({"iter=00002": "x", name: "y"})
    assert list(contents(notes)) == ["iter=00000", "iter=00001"]


@pytest.mark.parametrize(
    ("after", "left"),
    [(-1, []), (0, [0]), (2, [0, 1, 2]), (9, [0, 1, 2, 3])],
)
def test_rewind_drops_later_iterations(after: int, left: list[int], notes: Notes) -> None:
    notes.save({f"iter={iteration:05d}": "x" for iteration in range(4)})
    notes.save(Rewind(after))
    assert list(contents(notes)) == [f"iter={iteration:05d}" for iteration in left]


def test_parts_lie_in_a_folder_per_iteration_and_rewind_takes_all_and_leftovers(tmp_path: Path) -> None:
    parted = PartedNotes(str(tmp_path))
    parted.save({f"iter=0000{i}/part-00{p}": f"{i}{p}" for i in range(3) for p in (1, 0)})
    unfinished = tmp_path / "iter=00000" / ".part-000.txt.0123abcd.tmp"
    unfinished.write_text("half")
    parted.save(Rewind(0))
    assert list(contents(parted).items()) == [("iter=00000/part-000", "00"), ("iter=00000/part-001", "01")]
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["iter=00000", "part-000.txt", "part-001.txt"]
    with pytest.raises(DatasetError, match="iter=00012/part-000"):
        parted.save({"iter=00012": "x"})


@pytest.mark.parametrize(
    ("number", "word"),
    [(errno.ENOSPC, "disk full"), (errno.EDQUOT, "disk full"), (errno.EACCES, "right"), (errno.EROFS, "right")],
)
def test_storage_errors_say_path_bytes_and_way_out(
    number: int, word: str, notes: Notes, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    notes.save({"iter=00000": "committed"})

    def fail(*_: object) -> None:
        raise OSError(number, os.strerror(number), str(tmp_path / "notes" / "x.tmp"))

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_text", fail)
        with pytest.raises(DatasetError, match=word) as caught:
            notes.save({"iter=00001": "y" * 12345})
    assert isinstance(caught.value.__cause__, StorageError)
    assert caught.value.__cause__.errno == number
    for text in ("iter=00001.txt", "data_root", "stays readable"):
        assert text in str(caught.value)
    # Space is a matter of bytes, rights are not; and the number of the error stands there once.
    assert ("about 12,345 bytes" in str(caught.value)) == (word == "disk full")
    assert str(caught.value).count("Errno") == 1
    assert contents(notes) == {"iter=00000": "committed"}
    assert [path.name for path in (tmp_path / "notes").iterdir()] == ["iter=00000.txt"]


def test_a_full_device_is_recognised(tmp_path: Path) -> None:
    expected = pytest.raises(StorageError, match="disk full, about 7 bytes needed, .* free")
    with expected, explain_storage_errors(tmp_path, lambda: 7), open("/dev/full", "w") as handle:
        handle.write("x")


def test_errors_of_other_libraries_are_recognised(tmp_path: Path) -> None:
    text = 'IoError(Os { code: 28, kind: StorageFull, message: "No space left on device" })'
    with pytest.raises(StorageError, match=r"disk full, [\d,]+ free"), explain_storage_errors(tmp_path):
        raise RuntimeError(text)


@pytest.mark.parametrize(
    "error",
    [
        KeyError("x"),
        PermissionError(errno.EACCES, "Permission denied", "/dev/shm/torch_1"),  # memory that processes share
        PermissionError(errno.EPERM, "Operation not permitted"),  # a signal, a socket
        PermissionError(errno.EACCES, "Permission denied", "/home/other/policy/config.json"),  # what is read
        OSError(errno.ENOSPC, "No space left on device", "/dev/shm/torch_1"),
    ],
)
def test_errors_about_other_places_pass(error: Exception, tmp_path: Path) -> None:
    with pytest.raises(type(error)) as caught, explain_storage_errors(tmp_path / "made" / "iter=00001"):
        raise error
    assert caught.value is error


@pytest.mark.parametrize(
    "make",
    [
        lambda folder: PermissionError(errno.EACCES, "Permission denied", f"{folder}/.iter=00001.ab.tmp/x.json"),
        lambda folder: PermissionError(errno.EACCES, "Permission denied", str(folder.parent)),  # it was to be made
        lambda folder: PermissionError(errno.EACCES, f"Failed to open local file '{folder}/x'"),  # as Arrow says it
        lambda folder: OSError(errno.EROFS, "Read-only file system"),
        lambda folder: OSError(errno.ENOSPC, "No space left on device"),
    ],
)
def test_errors_about_the_written_folder_are_explained(make: Callable[[Path], OSError], tmp_path: Path) -> None:
    error, place = make(tmp_path / "made"), tmp_path / "made" / "iter=00001"
    with pytest.raises(StorageError, match=f"{place}: (no right|disk full)"), explain_storage_errors(place):
        raise error


# Metrics: one JSON row per iteration, loaded as rows.


@pytest.fixture
def metrics(tmp_path: Path) -> MetricsDataset:
    return MetricsDataset(str(tmp_path / "metrics"))


def test_rows_come_in_order(metrics: MetricsDataset) -> None:
    assert metrics.load() == []
    metrics.save({"iter=00010": {"iteration": 10, "train/loss": 0.1 + 0.2}})
    metrics.save({"iter=00002": {"iteration": 2, "train/loss": None}})
    rows = [{"iteration": 2, "train/loss": None}, {"iteration": 10, "train/loss": 0.1 + 0.2}]
    assert metrics.load() == rows
    metrics.save({})
    metrics.save(Rewind(2))
    assert metrics.load() == rows[:1]


@pytest.mark.parametrize(
    ("value", "stored"),
    [
        (np.float32(0.5), 0.5),
        (np.int64(3), 3),
        (1e-300, 1e-300),
        (float("nan"), None),
        (float("inf"), None),
        (True, True),
    ],
)
def test_values_become_plain_json(value: object, stored: object, metrics: MetricsDataset, tmp_path: Path) -> None:
    metrics.save({"iter=00000": {"x": value}})
    assert metrics.load() == [{"x": stored}]
    assert json.loads((tmp_path / "metrics" / "iter=00000.json").read_text()) == {"x": stored}


@pytest.mark.parametrize("row", [{"x": "text"}, {"x": [1]}, [1], "row"])
def test_other_values_are_refused(row: object, metrics: MetricsDataset) -> None:
    with pytest.raises(DatasetError, match=r"iter=00000\.json"):
        metrics.save({"iter=00000": row})
    assert metrics.load() == []


def test_damaged_row_is_named(metrics: MetricsDataset, tmp_path: Path) -> None:
    metrics.save({"iter=00000": {"x": 1}})
    (tmp_path / "metrics" / "iter=00000.json").write_text('{"x":')
    with pytest.raises(DatasetError, match=r"iter=00000\.json is not readable JSON"):
        metrics.load()


def test_preview_shows_curves(metrics: MetricsDataset) -> None:
    assert metrics.preview() is None
    reward = "rollout/raw_reward"
    metrics.save(
        {f"iter=0000{i}": {"iteration": i, reward: i / 2, **({"eval": 1.0} if i == 1 else {})} for i in range(2)}
    )
    shown = metrics.preview()
    assert [(curve["name"], curve["x"], curve["y"], curve["visible"]) for curve in shown["data"]] == [
        (reward, [0, 1], [0.0, 0.5], True),
        ("eval", [0, 1], [None, 1.0], False),
    ]
    (menu,) = shown["layout"]["updatemenus"]
    assert [(choice["label"], choice["args"]) for choice in menu["buttons"]] == [
        (reward, [{"visible": [True, False]}]),
        ("eval", [{"visible": [False, True]}]),
    ]
    assert json.loads(json.dumps(shown)) == shown
