"""State of ranks on disk: every rank reads and writes its part, and any layout reads what any other has written.

A slice is a range of rows of a tensor, the part of its first dimension that one rank holds. Files of weights hold whole
tensors in the published layout; one rank writes each file and receives the rows that it lacks, one tensor at a time.
Other tensors, such as moments, are written as slices, one file a rank, and an index lists where the rows of each lie.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor
from torch.distributed.tensor import DTensor

from geo_sokoban_pipeline.distributed.group import Group
from geo_sokoban_pipeline.policies.experts import published_spec, transpose_experts
from geo_sokoban_pipeline.runs.storage import Files, find_json, write_json
from geo_sokoban_pipeline.runs.tensor_files import (
    SHARD_BYTES,
    WEIGHT_METADATA,
    TensorFile,
    TensorSpec,
    order_tensors,
    plan_weight_files,
    write_tensors,
    write_weight_index,
)


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
    """What this rank holds of a tensor, sharing its memory."""
    return tensor.detach().to_local() if isinstance(tensor, DTensor) else tensor.detach()


def with_part(part: Tensor, like: Tensor) -> Tensor:
    """The tensor of which this rank holds a part, sharded as another one of the same shape."""
    if not isinstance(like, DTensor):
        return part
    return DTensor.from_local(
        part, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )


def copies_of(tensor: Tensor) -> list[list[int]]:
    """Ranks that hold the shards of each copy of a tensor, in the order of its rows; a whole tensor is on rank 0."""
    if not isinstance(tensor, DTensor):
        return [[0]]
    mesh = tensor.device_mesh
    copies: list[list[int]] = mesh.mesh.reshape(-1, mesh.size(-1)).tolist()
    return copies


@torch.no_grad()
def collect_weight(
    name: str,
    parameter: Tensor,
    owner: int,
    group: Group,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
) -> Tensor | None:
    """A whole weight in the published layout, on one rank; None on the others, which all call this too.

    Args:
        owner: the rank that gets it.
        dtype: in which it is sent; None: its own.
        device: on which it is sent: by gloo between CPUs, by nccl between GPUs.
    """
    own = transpose_experts(name, own_part(parameter)).to(device, dtype).contiguous()
    copy = next((ranks for ranks in copies_of(parameter) if owner in ranks), [owner])
    if group.rank not in copy:
        return None
    if len(copy) == 1:
        return own
    if group.rank != owner:
        if len(own):
            group.send(own, owner)
        return None
    whole = torch.empty(published_spec(name, parameter).shape, dtype=own.dtype, device=own.device)
    for rank, rows in zip(copy, split_rows(len(whole), len(copy)), strict=True):
        part = whole[rows.start : rows.stop]
        if rank == owner:
            part.copy_(own)
        elif rows:
            group.receive(part, rank)
    return whole


def write_weights(folder: Path, parameters: Mapping[str, Tensor], group: Group, largest: int = SHARD_BYTES) -> Files:
    """Write sharded weights as a Hugging Face checkpoint; every rank calls this, and writes each `group.size`-th file.

    The files do not depend on the number of ranks.

    Args:
        parameters: by name, in the order of the model.
        largest: bytes of a file, unless one tensor is larger.

    Returns:
        Sizes and digests of the files that this rank has written.
    """
    specs = {name: published_spec(name, parameter) for name, parameter in parameters.items()}
    files = plan_weight_files(specs, largest)
    if group.rank == 0:
        write_weight_index(folder, files, specs)
    written: Files = {}
    names = list(files)
    for first in range(0, len(names), group.size):
        # As many files as there are ranks are written side by side.
        written |= _write_side_by_side(folder, names[first : first + group.size], files, parameters, specs, group)
    return written


def _write_side_by_side(
    folder: Path,
    chosen: Sequence[str],
    files: Mapping[str, Sequence[str]],
    parameters: Mapping[str, Tensor],
    specs: Mapping[str, TensorSpec],
    group: Group,
) -> Files:
    """Write files of weights, the first one on rank 0, and so on."""
    orders = [order_tensors({name: specs[name] for name in files[file]}) for file in chosen]

    def collect(names: Sequence[str | None]) -> Tensor | None:
        """The next tensor of this rank's file; None: it is complete, or there is none."""
        ready = None
        for owner, name in enumerate(names):
            whole = None if name is None else collect_weight(name, parameters[name], owner, group)
            ready = ready if whole is None else whole
        return ready

    steps = list(zip_longest(*orders))
    if group.rank >= len(chosen):
        for names in steps:
            collect(names)
        return {}
    path = folder / chosen[group.rank]
    with TensorFile(path, {name: specs[name] for name in files[path.name]}, WEIGHT_METADATA) as file:
        for names in steps:
            # All ranks have sent what the others need before anyone turns to the disk.
            tensor = collect(names)
            if tensor is not None:
                file.write(names[group.rank], tensor)
    return {path.name: file.record}


@torch.no_grad()
def read_weights(parameters: Mapping[str, Tensor], folder: Path) -> None:
    """Overwrite what this rank holds of the parameters with the weights of a Hugging Face checkpoint.

    One tensor is in memory at a time, and of it the rows of this rank alone.

    Raises:
        ValueError: the checkpoint lacks a parameter, or has it in another shape.
    """
    stored = StoredTensors(folder, "model")
    for name, parameter in parameters.items():
        wanted = published_spec(name, parameter).shape
        if name not in stored.shapes or stored.shapes[name] != wanted:
            found = stored.shapes.get(name, "missing")
            raise ValueError(f"{folder}: {name} is {found}, but the model of its config.json has {wanted}.")
        rows = own_rows(parameter)
        if rows:
            own_part(parameter).copy_(transpose_experts(name, stored.read(name, rows)))


@torch.no_grad()
def copy_weights(parameters: Mapping[str, Tensor], whole: Mapping[str, Tensor]) -> None:
    """Overwrite what this rank holds of the parameters with its rows of whole ones."""
    for name, parameter in parameters.items():
        rows = own_rows(parameter)
        own_part(parameter).copy_(whole[name].detach()[rows.start : rows.stop])


def write_slices(folder: Path, stem: str, tensors: Mapping[str, Tensor], group: Group) -> Files:
    """Write sharded tensors as slices; every rank calls this, and nothing is sent. Copies share the work.

    Args:
        stem: of the files' names.

    Returns:
        Sizes and digests of the files that this rank has written.
    """
    index: dict[str, list[dict[str, object]]] = {}
    own: dict[str, Tensor] = {}
    for number, (name, tensor) in enumerate(sorted(tensors.items())):
        copies = copies_of(tensor)
        ranks = copies[number % len(copies)]
        index[name] = []
        for rank, rows in zip(ranks, split_rows(tensor.shape[0], len(ranks)), strict=True):
            if rows:
                index[name].append({"file": _slice_file(stem, rank, group.size), "rows": [rows.start, rows.stop]})
                if rank == group.rank:
                    own[name] = own_part(tensor)
    if group.rank == 0:
        write_json(_slice_index(folder, stem), {"slices": index})
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
    """Rows of a tensor in a file; `rows` counts in the whole tensor."""

    path: Path
    rows: range


class StoredTensors:
    """Tensors of a folder: whole in one file or several, or in slices. Any of their rows can be read.

    Args:
        stem: of the files' names, such as `model`.

    Attributes:
        shapes: of the tensors that are whole.
    """

    def __init__(self, folder: Path, stem: str) -> None:
        self._pieces: dict[str, list[_Piece]] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        index = find_json(_slice_index(folder, stem)) or {}
        if "slices" in index:
            for name, slices in index["slices"].items():
                self._pieces[name] = [_Piece(folder / piece["file"], range(*piece["rows"])) for piece in slices]
            return
        for path in sorted(folder.glob(f"{stem}*.safetensors")):
            with safe_open(path, "pt") as file:
                for name in file.keys():  # noqa: SIM118 - the file is no mapping
                    self.shapes[name] = tuple(file.get_slice(name).get_shape())
                    self._pieces[name] = [_Piece(path, range(self.shapes[name][0]))]

    @property
    def names(self) -> list[str]:
        """Names of all tensors."""
        return list(self._pieces)

    def read(self, name: str, rows: range) -> Tensor:
        """Rows of a tensor, at least one, in memory of their own.

        Raises:
            KeyError: there is no such tensor.
        """
        parts = []
        for piece in self._pieces[name]:
            first, last = max(rows.start, piece.rows.start), min(rows.stop, piece.rows.stop)
            if first < last:
                # Opened anew for each tensor: what was read of an open file counts in this process's memory.
                with safe_open(piece.path, "pt") as file:
                    stored = file.get_slice(name)[first - piece.rows.start : last - piece.rows.start]
                    parts.append(stored.clone())
                    del stored
        return parts[0] if len(parts) == 1 else torch.cat(parts)
