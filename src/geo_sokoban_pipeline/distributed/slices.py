"""State of ranks on disk: every rank reads and writes its part, and any layout reads what any other has written.

A slice is the part of a tensor that one rank holds: a range of its rows, or of the columns of these rows. Files of
weights hold whole tensors in the published layout (`policies/weights.py`): ranks that share a folder write their parts
into the same files, which are those that one process writes. Other tensors, such as moments, are written as slices, one
file a rank, and an index lists where each lies. Nothing is sent.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor
from torch.distributed.tensor import DTensor

from geo_sokoban_pipeline.distributed.group import Group, Part
from geo_sokoban_pipeline.events import Event, emit
from geo_sokoban_pipeline.policies.weights import (
    SHARD_BYTES,
    WEIGHT_METADATA,
    FileLayout,
    TensorSpec,
    bytes_of,
    is_adapter,
    plan_files,
    published_spec,
    transpose_experts,
    write_checkpoint,
    write_index,
    write_tensors,
)
from geo_sokoban_pipeline.progress import note_progress
from geo_sokoban_pipeline.runs.storage import Files, file_digest, find_json, write_json


@dataclass(frozen=True)
class Slice:
    """A part of a tensor.

    Attributes:
        columns: of its matrix; None: whole rows.
    """

    rows: range
    columns: range | None = None

    def of(self, tensor: Tensor) -> Tensor:
        """This part of a tensor, sharing its memory."""
        part = tensor[self.rows.start : self.rows.stop]
        return part if self.columns is None else part[:, self.columns.start : self.columns.stop]

    @property
    def entry(self) -> dict[str, list[int]]:
        """First number and end of its rows, and of its columns if it has some, for an index."""
        ranges = {"rows": self.rows, "columns": self.columns}
        return {name: [part.start, part.stop] for name, part in ranges.items() if part is not None}


def split_rows(count: int, parts: int) -> list[range]:
    """Rows of a tensor by shard, as FSDP2 splits them: equally many, the last shards fewer or none."""
    size = -(-count // parts)
    return [range(min(part * size, count), min((part + 1) * size, count)) for part in range(parts)]


def own_rows(tensor: Tensor) -> range:
    """Rows of the whole tensor that this rank holds."""
    if not isinstance(tensor, DTensor):
        return range(tensor.shape[0])
    place = tensor.device_mesh.get_coordinate()
    assert place is not None  # every rank is in the mesh
    return split_rows(tensor.shape[0], tensor.device_mesh.size(-1))[place[-1]]


def own_part(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor, sharing its memory."""
    return tensor.detach().to_local() if isinstance(tensor, DTensor) else tensor.detach()


def with_part(part: Tensor, like: Tensor) -> Tensor:
    """The tensor of which this rank holds a part, sharded as another one of the same shape."""
    if not isinstance(like, DTensor):
        return part
    if part.device.type != like.device_mesh.device_type:  # `from_local` would copy it to the device of the mesh
        return DTensor(part, like._spec, requires_grad=False)
    return DTensor.from_local(
        part, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )


def copies_of(tensor: Tensor) -> list[list[int]]:
    """Ranks that hold the shards of each copy of a tensor, in the order of its rows; a whole tensor is on rank 0."""
    if not isinstance(tensor, DTensor):
        return [[0]]
    mesh = tensor.device_mesh
    return mesh.mesh.reshape(-1, mesh.size(-1)).tolist()


@torch.no_grad()
def read_weights(parameters: Mapping[str, Tensor], folder: Path) -> None:
    """Overwrite what this rank holds of the parameters, but for an adapter's, with the weights of a Hugging Face
    checkpoint.

    One tensor is in memory at a time, and of it the rows of this rank alone.

    Raises:
        ValueError: the checkpoint lacks a parameter, or has it in another shape.
    """
    stored = StoredTensors(folder, "model")
    for name, parameter in parameters.items():
        if is_adapter(name):
            continue
        note_progress()
        stored.check_shape(name, published_spec(name, parameter).shape)
        if rows := own_rows(parameter):
            own_part(parameter).copy_(transpose_experts(name, stored.read(name, Slice(rows))))


@torch.no_grad()
def copy_weights(parameters: Mapping[str, Tensor], whole: Mapping[str, Tensor]) -> None:
    """Overwrite what this rank holds of the parameters with its rows of whole ones."""
    for name, parameter in parameters.items():
        rows = own_rows(parameter)
        own_part(parameter).copy_(whole[name].detach()[rows.start : rows.stop])


@torch.no_grad()
def write_parts(
    folder: Path,
    specs: Mapping[str, TensorSpec],
    read: Callable[[str, int], Part],
    group: Group,
    largest: int = SHARD_BYTES,
) -> Files:
    """`write_checkpoint` of weights of which every rank holds a part; all ranks call this, with the same folder.

    Each file is made by one rank, in its full length, and read by it once more for its digest when all have written.

    Args:
        specs: of the published weights, in the order of the model.
        read: the part of a weight that this rank holds; of several copies, those with a part on the given rank write.

    Returns:
        Sizes and digests of the files that this rank has made.
    """
    rank, size = group.rank, group.size
    if size == 1:  # parts are whole, and digests are taken while they are written
        return write_checkpoint(
            folder, specs, lambda name: read(name, 0).own.to(getattr(torch, specs[name].dtype)), largest
        )
    files = plan_files(specs, largest)
    plans = {
        file: FileLayout.of({name: specs[name] for name in names}, WEIGHT_METADATA) for file, names in files.items()
    }
    if rank == 0:
        write_index(folder, files, specs)
    made = list(plans)[rank::size]
    for file in made:
        with (folder / file).open("wb") as whole:
            whole.truncate(plans[file].size)
    group.barrier()
    owners = {name: number % size for number, name in enumerate(specs)}
    first = rank * len(plans) // size  # file systems let one rank write into a file at a time
    for file in [*plans][first:] + [*plans][:first]:
        # Not for reading too: network file systems then fill up pages of which other ranks write the rest.
        handle = os.open(folder / file, os.O_WRONLY)
        try:
            for name, start in plans[file].starts.items():
                note_progress()
                part = read(name, owners[name])
                if rank in part.ranks:
                    _write_at(handle, start, part, rank, specs[name])
                emit(Event.TENSOR, file)
            os.fsync(handle)
        finally:
            os.close(handle)
    group.barrier()
    for file in made:  # last: a file that lacks a part has none, and no page of it is written by two ranks at once
        with (folder / file).open("r+b") as whole:
            whole.write(plans[file].header)
    return {file: {"bytes": plans[file].size, "blake2b": file_digest(folder / file)} for file in made}


def _write_at(handle: int, first: int, part: Part, rank: int, spec: TensorSpec) -> None:
    """Write a rank's part of a tensor that begins at a byte of a file."""
    kind = getattr(torch, spec.dtype)
    place = part.of(torch.empty(spec.shape, dtype=kind, device="meta"), rank)
    own = part.own.to("cpu", kind)
    if own.shape != place.shape:
        raise ValueError(f"a rank's part has the shape {tuple(own.shape)}, its place {tuple(place.shape)}.")
    pairs = [(place, own)] if place.is_contiguous() else zip(place, own, strict=True)
    for there, values in pairs:
        data, start = bytes_of(values), first + there.storage_offset() * there.element_size()
        while data:  # the system writes 2 GB at a time
            written = os.pwrite(handle, data, start)
            data, start = data[written:], start + written


def write_slices(folder: Path, stem: str, tensors: Mapping[str, Tensor], group: Group) -> Files:
    """Write sharded tensors as slices; every rank calls this, and nothing is sent. Copies share the work.

    Args:
        stem: of the files' names.

    Returns:
        Sizes and digests of the files that this rank has written.
    """
    places: dict[str, dict[int, Slice]] = {}
    for number, (name, tensor) in enumerate(sorted(tensors.items())):
        copies = copies_of(tensor)
        ranks = copies[number % len(copies)]
        places[name] = dict(zip(ranks, map(Slice, split_rows(tensor.shape[0], len(ranks))), strict=True))
    return write_places(folder, stem, places, lambda name: own_part(tensors[name]), group)


def write_places(
    folder: Path, stem: str, places: Mapping[str, Mapping[int, Slice]], read: Callable[[str], Tensor], group: Group
) -> Files:
    """Write tensors as slices; every rank calls this, and nothing is sent.

    Args:
        stem: of the files' names.
        places: slices by the rank that writes them, of each tensor; a slice without rows is left out.
        read: this rank's slice of a tensor.

    Returns:
        Sizes and digests of the files that this rank has written.
    """
    held = {name: {rank: place for rank, place in ranks.items() if place.rows} for name, ranks in places.items()}
    if group.rank == 0:
        index = {
            name: [{"file": _slice_file(stem, rank, group.size), **place.entry} for rank, place in ranks.items()]
            for name, ranks in held.items()
        }
        write_json(_slice_index(folder, stem), {"slices": index})
    own = {name: read(name) for name, ranks in held.items() if group.rank in ranks}
    if not own:
        return {}
    specs = {name: TensorSpec.of(part) for name, part in own.items()}
    return write_tensors(folder / _slice_file(stem, group.rank, group.size), specs, own.__getitem__)


def _slice_file(stem: str, rank: int, size: int) -> str:
    return f"{stem}-{rank + 1:05d}-of-{size:05d}.safetensors"


def _slice_index(folder: Path, stem: str) -> Path:
    return folder / f"{stem}.safetensors.index.json"


@dataclass(frozen=True)
class _Piece:
    """A slice of a tensor in a file; `place` counts in the whole tensor."""

    path: Path
    place: Slice


class StoredTensors:
    """Tensors of a folder: whole in one file or several, or in slices. Any part of them can be read.

    Args:
        stem: of the files' names, such as `model`.

    Attributes:
        shapes: of the tensors that are whole.
    """

    def __init__(self, folder: Path, stem: str) -> None:
        self._folder = folder
        self._pieces: dict[str, list[_Piece]] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        index = find_json(_slice_index(folder, stem)) or {}
        if "slices" in index:
            for name, slices in index["slices"].items():
                self._pieces[name] = [
                    _Piece(
                        folder / entry["file"],
                        Slice(range(*entry["rows"]), range(*entry["columns"]) if "columns" in entry else None),
                    )
                    for entry in slices
                ]
            return
        for path in sorted(folder.glob(f"{stem}*.safetensors")):
            with safe_open(path, "pt") as file:
                for name in file.keys():  # noqa: SIM118 - the file is no mapping
                    self.shapes[name] = tuple(file.get_slice(name).get_shape())
                    self._pieces[name] = [_Piece(path, Slice(range(self.shapes[name][0])))]

    @property
    def names(self) -> list[str]:
        """Names of all tensors."""
        return list(self._pieces)

    def check_shape(self, name: str, wanted: tuple[int, ...]) -> None:
        """See that a whole weight has the shape of the model's.

        Raises:
            ValueError: it has another one, or is missing.
        """
        found = self.shapes.get(name, "missing")
        if found != wanted:
            raise ValueError(f"{self._folder}: {name} is {found}, but the model of its config.json has {wanted}.")

    def read(self, name: str, wanted: Slice) -> Tensor:
        """A part of a tensor, at least one row, in memory of its own; nothing else of it is read.

        Raises:
            KeyError: there is no such tensor.
        """
        whole: Tensor | None = None
        for piece in self._pieces[name]:
            rows = _overlap(piece.place.rows, wanted.rows)
            columns = wanted.columns if piece.place.columns is None else piece.place.columns
            if columns is not None and wanted.columns is not None:
                columns = _overlap(columns, wanted.columns)
            if not rows or (columns is not None and not columns):
                continue
            found = _read_file(piece, name, Slice(rows, columns))
            if rows == wanted.rows and columns == wanted.columns:
                return found
            if whole is None:
                shape = [len(wanted.rows), *found.shape[1:]]
                if columns is not None:
                    held = (piece.place.columns for piece in self._pieces[name])
                    # Rows of any piece are whole where none has columns of its own, and then some are wanted.
                    shape[1] = (
                        max(part.stop for part in held if part) if wanted.columns is None else len(wanted.columns)
                    )
                whole = torch.empty(shape, dtype=found.dtype)
            there = None if columns is None else _shifted(columns, wanted.columns)
            Slice(_shifted(rows, wanted.rows), there).of(whole).copy_(found)
        assert whole is not None  # the pieces cover the tensor
        return whole


def _read_file(piece: _Piece, name: str, wanted: Slice) -> Tensor:
    """A part of a tensor that a file has."""
    rows = _shifted(wanted.rows, piece.place.rows)
    # Opened anew for each tensor: pages read of an open file count in this process's memory.
    with safe_open(piece.path, "pt") as file:
        stored = file.get_slice(name)
        if wanted.columns is None or wanted.columns == piece.place.columns:
            part = stored[rows.start : rows.stop]
        else:
            columns = _shifted(wanted.columns, piece.place.columns)
            part = stored[rows.start : rows.stop, columns.start : columns.stop]
        found: Tensor = part.clone()
        del stored, part
    return found


def _overlap(one: range, other: range) -> range:
    first, last = max(one.start, other.start), min(one.stop, other.stop)
    return range(first, max(first, last))


def _shifted(part: range, whole: range | None) -> range:
    """A range counted from the first number of another one."""
    first = 0 if whole is None else whole.start
    return range(part.start - first, part.stop - first)
