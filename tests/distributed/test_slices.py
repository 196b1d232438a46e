"""State of ranks on disk, rank by rank in this process: what any layout has written, any other reads."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest
import torch

from geo_sokoban_pipeline.distributed.group import Group, Part
from geo_sokoban_pipeline.distributed.slices import Slice, StoredTensors, split_rows, write_parts, write_places
from geo_sokoban_pipeline.policies.weights import TensorSpec
from geo_sokoban_pipeline.runs.storage import Files, describe_files, file_digest

TENSORS = {
    "matrix": torch.arange(42.0).view(7, 6),
    "norm": torch.arange(5.0) - 2,
    "experts": torch.arange(24, dtype=torch.bfloat16).view(2, 4, 3),
    "one": torch.tensor([3.5]),
}


@pytest.mark.parametrize("count", range(8))
@pytest.mark.parametrize("parts", range(1, 5))
def test_rows_are_split_as_torch_splits_them(count: int, parts: int) -> None:
    chunks = torch.arange(count).chunk(parts) if count else ()
    found = [list(rows) for rows in split_rows(count, parts)]
    assert found == [chunk.tolist() for chunk in chunks] + [[]] * (parts - len(chunks))


@pytest.mark.parametrize("by_columns", [False, True])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_any_part_is_read_from_the_slices_of_any_layout(tmp_path: Path, size: int, by_columns: bool) -> None:
    places = {name: dict(enumerate(map(Slice, split_rows(len(one), size)))) for name, one in TENSORS.items()}
    if by_columns:
        columns = split_rows(6, size)
        places["matrix"] = {rank: Slice(range(7), columns[rank]) for rank in range(size)}
    written: Files = {}
    for rank in range(size):
        own = {name: place[rank].of(TENSORS[name]) for name, place in places.items()}
        written |= write_places(tmp_path, "moments", places, own.__getitem__, Group(rank, size, None, "cpu"))
    assert written == {
        path.name: {"bytes": path.stat().st_size, "blake2b": file_digest(path)}
        for path in tmp_path.glob("*.safetensors")
    }
    stored = StoredTensors(tmp_path, "moments")
    assert sorted(stored.names) == sorted(TENSORS)
    for name, tensor in TENSORS.items():
        for first in range(len(tensor)):
            for last in range(first + 1, len(tensor) + 1):
                wanted = [Slice(range(first, last))]
                if name == "matrix":
                    wanted += [Slice(range(first, last), range(begin, begin + 2)) for begin in range(5)]
                for part in wanted:
                    found = stored.read(name, part)
                    assert torch.equal(found, part.of(tensor)) and found.dtype == tensor.dtype, (name, part)


@pytest.mark.parametrize("by_columns", [False, True])
@pytest.mark.parametrize("largest", [1, 100, 10_000])
def test_ranks_write_the_files_of_one_process(tmp_path: Path, largest: int, by_columns: bool) -> None:
    """Each its rows, or its columns of a matrix, into files that another one may have made."""
    specs = {name: TensorSpec.of(tensor) for name, tensor in TENSORS.items()}
    found = []
    for size in (1, 2, 3, 5):
        folder = tmp_path / str(size)
        folder.mkdir()
        meeting = threading.Barrier(size, timeout=60)
        groups = [ThreadGroup(rank, size, meeting) for rank in range(size)]
        with ThreadPoolExecutor(size) as threads:
            reads = [partial(part_of, rank=rank, size=size, by_columns=by_columns) for rank in range(size)]
            parts = list(threads.map(partial(write_parts, folder, specs, largest=largest), reads, groups))
        known = {name: record for part in parts for name, record in part.items()}
        assert len(known) == sum(map(len, parts)), "each file has one digest"
        assert known == {name: record for name, record in describe_files(folder).items() if name in known}
        found.append({path.name: path.read_bytes() for path in folder.iterdir()})
        stored = StoredTensors(folder, "model")
        for name, tensor in TENSORS.items():
            stored.check_shape(name, tuple(tensor.shape))
            assert torch.equal(stored.read(name, Slice(range(len(tensor)))), tensor)
    assert all(files == found[0] for files in found)
    assert len([name for name in found[0] if name.endswith(".safetensors")]) == {1: 4, 100: 2, 10_000: 1}[largest]


class ThreadGroup(Group):
    """A group whose ranks are threads."""

    def __init__(self, rank: int, size: int, meeting: threading.Barrier) -> None:
        super().__init__(rank, size, None, "cpu")
        self._meeting = meeting

    def barrier(self) -> None:
        self._meeting.wait()


def part_of(name: str, owner: int, *, rank: int, size: int, by_columns: bool) -> Part:
    """A rank's part of one of the tensors."""

    def of(whole: torch.Tensor, rank: int) -> torch.Tensor:
        if name == "matrix" and by_columns:
            return Slice(range(7), split_rows(6, size)[rank]).of(whole)
        return Slice(split_rows(len(whole), size)[rank]).of(whole)

    return Part(of(TENSORS[name], rank), TENSORS[name].shape, range(size), of)
