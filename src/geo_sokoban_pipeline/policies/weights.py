"""The weights of a policy: where they are read from, the buckets in which they travel, and the files that hold them.

They have Hugging Face's names and the layout of published checkpoints, whatever layout trains them. Engines, rollout
workers and exports read a `WeightSource`. `FileLayout` decides where a tensor lies in a safetensors file. A file equals
the one that the safetensors library writes, byte for byte (tested). A writer never needs more than one of its tensors
in memory, and ranks that hold parts of them write no more than these (`distributed/slices.py`).

Checkpoints of Qwen3-VL-MoE hold the experts of a layer as one tensor, input dimension before output dimension:
`mlp.experts.gate_up_proj` (experts, hidden, 2 · inner) and `mlp.experts.down_proj` (experts, inner, hidden). In memory
transformers holds the transposed tensors: it transposes them at loading, but not back at saving. SGLang expects the
published layout.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from geo_sokoban_pipeline.events import Event, emit
from geo_sokoban_pipeline.progress import note_progress
from geo_sokoban_pipeline.runs.storage import Files

if TYPE_CHECKING:
    from torch import Tensor


ADAPTER_MATRICES = (".lora_A.weight", ".lora_B.weight")
EXPERT_WEIGHTS = (".mlp.experts.gate_up_proj", ".mlp.experts.down_proj")
SHARD_BYTES = 2_000_000_000  # at most, unless a single tensor is larger
WEIGHT_METADATA = {"format": "pt"}
# safetensors' names and bytes of torch's types, in the order in which a file holds them.
_TYPES = {"float64": ("F64", 8), "float32": ("F32", 4), "bfloat16": ("BF16", 2), "float16": ("F16", 2)}

# Whether processes of this machine can map memory of each other (Linux).
CAN_SHARE = hasattr(os, "memfd_create")


@dataclass(frozen=True)
class TensorSpec:
    """Type, by torch's name, and shape of a tensor."""

    dtype: str
    shape: tuple[int, ...]

    @classmethod
    def of(cls, tensor: Tensor) -> TensorSpec:
        """Of a tensor."""
        return cls(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))

    @property
    def bytes(self) -> int:
        """Size in a file."""
        return math.prod(self.shape) * _TYPES[self.dtype][1]


class SharedBytes:
    """Memory of the CPU that other processes of this machine map; it is freed with its last user.

    It is pickled as the path at which it is mapped, so a process that is sent one shares it.

    Attributes:
        tensor: (size,) uint8.
    """

    def __init__(self, size: int, path: str | None = None) -> None:
        import torch

        self._size, self._path, self._file = size, path, -1
        if path is None:
            self._file = os.memfd_create("weights")
            os.ftruncate(self._file, max(size, 1))
            self._path = f"/proc/{os.getpid()}/fd/{self._file}"
        self.tensor = torch.from_file(self._path, shared=True, size=size, dtype=torch.uint8)

    def __reduce__(self) -> tuple[Any, ...]:
        return SharedBytes, (self._size, self._path)

    def __del__(self) -> None:
        if self._file >= 0:
            os.close(self._file)


def published_spec(name: str, parameter: Any) -> TensorSpec:
    """Type and published shape of a parameter, which may be sharded."""
    spec = TensorSpec.of(parameter)
    if not name.endswith(EXPERT_WEIGHTS):
        return spec
    experts, output, given = spec.shape
    return TensorSpec(spec.dtype, (experts, given, output))


def is_adapter(name: str) -> bool:
    """Whether a parameter is a matrix of an adapter, which is published as a part of another weight."""
    return name.endswith(ADAPTER_MATRICES)


def published_specs(model: Any) -> dict[str, TensorSpec]:
    """Types and published shapes of a model's parameters, by Hugging Face name.

    Under an adapter all have its type: frozen weights may be held in one that would round the sums.
    """
    specs = {name: published_spec(name, parameter) for name, parameter in model.named_parameters()}
    kind = next((spec.dtype for name, spec in specs.items() if is_adapter(name)), None)
    if kind is None:
        return specs
    return {name: replace(spec, dtype=kind) for name, spec in specs.items() if not is_adapter(name)}


def transpose_experts(name: str, tensor: Any) -> Any:
    """Convert a weight of experts between the two layouts; any other weight is returned unchanged."""
    return tensor.detach().transpose(1, 2).contiguous() if name.endswith(EXPERT_WEIGHTS) else tensor


def check_orientation(config: Any) -> None:
    """Check that shapes identify the layout of a mixture of experts, because transformers goes by shapes alone.

    Args:
        config: of the model; one without experts always passes.

    Raises:
        ValueError: a weight of the experts is square.
    """
    text = config.text_config
    inner, hidden = getattr(text, "moe_intermediate_size", None), text.hidden_size
    if inner is not None and hidden in (inner, 2 * inner):
        raise ValueError(
            f"hidden_size={hidden} with moe_intermediate_size={inner}: weights of the experts are square, so their "
            "shapes do not show the layout of a checkpoint. Take a model with other sizes."
        )


@dataclass(frozen=True)
class WeightSource:
    """Weights that can be read again, as for a server that was restarted.

    Attributes:
        specs: by Hugging Face name; each weight is delivered in its type.
        collect: a bucket: (bytes,) uint8 of the weights of some specs, one behind the other (`cut`), on their device.
            Other processes send what they alone hold. It may be put into the memory that is given, as far as that goes.
        state: of the weights; another value after every change.
        folder: of the policy that they are read from; None: they are in memory.
        sender: makes the `Sender` (`rollout/engines/sglang/sender.py`) of processes from which servers get weights past
            this one, given the rank on whose GPU each address lies. None: this process collects and sends.
    """

    specs: Mapping[str, TensorSpec]
    collect: Callable[[Mapping[str, TensorSpec], SharedBytes | None], Tensor]
    state: Callable[[], Hashable]
    folder: Path | None = None
    sender: Callable[[Mapping[str, int]], Any] | None = None

    @classmethod
    def of_model(cls, model: Any, device: Any = None) -> WeightSource:
        """The weights that a model has.

        Args:
            device: of the buckets; None: that of the model.

        Raises:
            ValueError: it has none, see `load_empty`.
        """
        if model.device.type == "meta":
            raise ValueError("this process holds a part of the policy, so an engine needs the weights of the backend.")

        def collect(specs: Mapping[str, TensorSpec], memory: SharedBytes | None) -> Tensor:
            own = dict(model.named_parameters())
            flat = empty_bucket(specs, memory, model.device if device is None else device)
            for name, place in cut(flat, specs):
                # Moved before it is rounded: else it would be rounded, and copied once more, by the CPU.
                place.copy_(transpose_experts(name, whole(name, own[name])).detach().to(flat.device))
            return flat

        def whole(name: str, weight: Tensor) -> Tensor:
            """A weight with the adapter that its layer may have."""
            place, _, attribute = name.rpartition(".")
            layer = model.get_submodule(place)
            return layer.merged() if attribute == "weight" and hasattr(layer, "merged") else weight

        def state() -> Hashable:  # counts the changes in place
            return tuple(parameter._version for parameter in model.parameters())

        return cls(published_specs(model), collect, state)

    @classmethod
    def of_folder(cls, folder: Path) -> WeightSource:
        """The weights of a policy folder, which never change."""
        from safetensors import safe_open

        types = {kind: dtype for dtype, (kind, _) in _TYPES.items()}
        specs: dict[str, TensorSpec] = {}
        paths: dict[str, Path] = {}
        for path in sorted(folder.glob("model*.safetensors")):
            with safe_open(path, "pt") as file:
                for name in file.keys():  # noqa: SIM118 - the file is no mapping
                    part = file.get_slice(name)
                    specs[name] = TensorSpec(types[part.get_dtype()], tuple(part.get_shape()))
                    paths[name] = path

        def collect(specs: Mapping[str, TensorSpec], memory: SharedBytes | None) -> Tensor:
            flat = empty_bucket(specs, memory)
            for name, place in cut(flat, specs):
                note_progress()
                # Opened anew for each tensor: pages read of an open file count in this process's memory.
                with safe_open(paths[name], "pt") as file:
                    place.copy_(file.get_tensor(name))
            return flat

        return cls(specs, collect, lambda: str(folder), folder)

    def cast(self, types: Mapping[str, str]) -> WeightSource:
        """The same weights in other torch dtypes, each given by its name."""
        return replace(self, specs={name: replace(spec, dtype=types[name]) for name, spec in self.specs.items()})

    def read(self) -> Iterator[tuple[str, Any]]:
        """The weights, one at a time."""
        for name in self.specs:
            yield name, self.read_one(name)

    def read_one(self, name: str) -> Tensor:
        """One of the weights."""
        specs = {name: self.specs[name]}
        return next(cut(self.collect(specs, None), specs))[1]

    def write(self, folder: Path, bucket_bytes: int) -> None:
        """Write the weights into a new folder, for other processes to read: one file for each bucket."""
        folder.mkdir(parents=True)
        for number, specs in enumerate(plan_buckets(self.specs, bucket_bytes)):
            held = dict(cut(self.collect(specs, None), specs))
            write_tensors(folder / f"model-{number:05d}.safetensors", specs, held.__getitem__)


def plan_buckets(specs: Mapping[str, TensorSpec], limit: int) -> Iterator[dict[str, TensorSpec]]:
    """Specs of consecutive weights that are collected and sent together: at most `limit` bytes, or one weight.

    Within a bucket those of larger types come first, so that each begins at a multiple of its type's size.
    """

    def aligned() -> dict[str, TensorSpec]:
        return dict(sorted(bucket.items(), key=lambda item: -_TYPES[item[1].dtype][1]))

    bucket: dict[str, TensorSpec] = {}
    held = 0
    for name, spec in specs.items():
        if bucket and held + spec.bytes > limit:
            yield aligned()
            bucket, held = {}, 0
        bucket[name] = spec
        held += spec.bytes
    if bucket:
        yield aligned()


def empty_bucket(specs: Mapping[str, TensorSpec], memory: SharedBytes | None, device: Any = "cpu") -> Tensor:
    """(bytes,) uint8 with room for the weights of some specs.

    Args:
        memory: to be used where `device` is the CPU.
    """
    import torch

    size = sum(spec.bytes for spec in specs.values())
    if memory is not None and torch.device(device).type == "cpu":
        return memory.tensor[:size]
    return torch.empty(size, dtype=torch.uint8, device=device)


def cut(flat: Tensor, specs: Mapping[str, TensorSpec]) -> Iterator[tuple[str, Tensor]]:
    """The weights of a bucket by name, sharing its memory."""
    import torch

    first = 0
    for name, spec in specs.items():
        end = first + spec.bytes
        yield name, flat[first:end].view(getattr(torch, spec.dtype)).view(spec.shape)
        first = end


def bytes_of(tensor: Tensor) -> memoryview:
    """The values of a tensor; those in the memory of the CPU are not copied."""
    import torch

    return memoryview(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy())


def order_tensors(specs: Mapping[str, TensorSpec]) -> list[str]:
    """Names of tensors in the order in which a file holds them."""
    kinds = list(_TYPES)
    return sorted(specs, key=lambda name: (kinds.index(specs[name].dtype), name))


@dataclass(frozen=True)
class FileLayout:
    """Places of the tensors in a safetensors file.

    Attributes:
        header: its first bytes.
        starts: first byte of each tensor, in the order in which the file holds them.
        size: of the file in bytes.
    """

    header: bytes
    starts: Mapping[str, int]
    size: int

    @classmethod
    def of(cls, specs: Mapping[str, TensorSpec], metadata: Mapping[str, str] | None = None) -> FileLayout:
        """Of a file with these tensors."""
        entries: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
        firsts, end = dict[str, int](), 0
        for name in order_tensors(specs):
            firsts[name], end = end, end + specs[name].bytes
            kind, shape = _TYPES[specs[name].dtype][0], list(specs[name].shape)
            entries[name] = {"dtype": kind, "shape": shape, "data_offsets": [firsts[name], end]}
        text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
        text += b" " * (-len(text) % 8)
        header = len(text).to_bytes(8, "little") + text
        return cls(header, {name: len(header) + first for name, first in firsts.items()}, len(header) + end)


class TensorFile:
    """A safetensors file that is being written; a context manager.

    Args:
        specs: of all its tensors.
        metadata: of the file.

    Attributes:
        names: of the tensors, in the order in which they are to be written.
        record: size and digest of the written file, for a manifest; set when the file closes.
    """

    def __init__(self, path: Path, specs: Mapping[str, TensorSpec], metadata: Mapping[str, str] | None = None) -> None:
        layout = FileLayout.of(specs, metadata)
        self.names = list(layout.starts)
        self.record: dict[str, Any] = {}
        self._specs, self._waiting = specs, list(reversed(self.names))
        self._digest = hashlib.blake2b(digest_size=16)
        self._file = path.open("wb")
        self._put(layout.header)

    def write(self, name: str, tensor: Tensor) -> None:
        """Write the next tensor.

        Raises:
            ValueError: it is another one than the next of `names`, or has another type or shape than announced.
        """
        found, expected = TensorSpec.of(tensor), self._waiting[-1] if self._waiting else None
        if name != expected or found != self._specs[name]:
            wanted = "nothing more" if expected is None else f"{expected}, {self._specs[expected]}"
            raise ValueError(f"{self._file.name} takes {wanted}, not {name}, {found}.")
        note_progress()
        self._waiting.pop()
        self._put(bytes_of(tensor))
        emit(Event.TENSOR, Path(self._file.name).name)

    def __enter__(self) -> TensorFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is None:
                if self._waiting:
                    raise ValueError(f"{self._file.name}: {self._waiting[-1]} was not written.")
                self.record = {"bytes": self._file.tell(), "blake2b": self._digest.hexdigest()}
        finally:
            self._file.close()

    def _put(self, data: bytes | memoryview) -> None:
        self._file.write(data)
        self._digest.update(data)


def write_tensors(
    path: Path,
    specs: Mapping[str, TensorSpec],
    read: Callable[[str], Tensor],
    metadata: Mapping[str, str] | None = None,
) -> Files:
    """Write a file of tensors, each of which is read by its name when its turn comes; returns its record."""
    with TensorFile(path, specs, metadata) as file:
        for name in file.names:
            file.write(name, read(name))
    return {path.name: file.record}


def write_checkpoint(
    folder: Path, specs: Mapping[str, TensorSpec], read: Callable[[str], Tensor], largest: int = SHARD_BYTES
) -> Files:
    """Write weights as a Hugging Face checkpoint, each of which is read by its name when its turn comes.

    Args:
        specs: of the published weights, in the order of the model.
        largest: bytes of a file, unless one tensor is larger.

    Returns:
        Sizes and digests of the files of weights.
    """
    files = plan_files(specs, largest)
    write_index(folder, files, specs)
    written: Files = {}
    for file, names in files.items():
        written |= write_tensors(folder / file, {name: specs[name] for name in names}, read, WEIGHT_METADATA)
    return written


def plan_files(specs: Mapping[str, TensorSpec], largest: int) -> dict[str, list[str]]:
    """Tensors by file, in the layout of Hugging Face checkpoints: one file where they fit."""
    from huggingface_hub import split_state_dict_into_shards_factory

    plan = split_state_dict_into_shards_factory(
        dict(specs),
        get_storage_size=lambda spec: spec.bytes,
        filename_pattern="model{suffix}.safetensors",
        max_shard_size=largest,
    )
    return plan.filename_to_tensors


def write_index(folder: Path, files: Mapping[str, list[str]], specs: Mapping[str, TensorSpec]) -> None:
    """Write which file has which weight; a single file needs no index."""
    if len(files) == 1:
        return
    index = {
        "metadata": {
            "total_parameters": sum(math.prod(spec.shape) for spec in specs.values()),
            "total_size": sum(spec.bytes for spec in specs.values()),
        },
        "weight_map": {name: file for file, names in files.items() for name in names},
    }
    text = json.dumps(index, indent=2, sort_keys=True) + "\n"
    (folder / "model.safetensors.index.json").write_text(text, encoding="utf-8")
