"""Low-rank adapters (LoRA, arXiv 2106.09685) of linear layers, and their files, which are those of peft.

An adapted layer computes x·Wᵀ + x·Aᵀ·Bᵀ·alpha/rank. W keeps its name and is never changed: whoever needs the weights of
the sum computes them one at a time (`merge`). B begins with zeros, so a fresh adapter changes nothing.

A folder of an adapter has `adapter_config.json`, which names the folder of the policy that it belongs to, and
`adapter_model.safetensors`, with the matrices as `base_model.model.<layer>.lora_A.weight`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn

from geo_sokoban_pipeline.config.policy import AdapterOptions
from geo_sokoban_pipeline.policies.weights import (
    WEIGHT_METADATA,
    SharedBytes,
    TensorSpec,
    WeightSource,
    cut,
    is_adapter,
    write_checkpoint,
    write_tensors,
)
from geo_sokoban_pipeline.runs.policy_folder import ADAPTER_CONFIG, FolderWriter, find_base, link_policy
from geo_sokoban_pipeline.runs.storage import Files, Filled, read_json, write_json
from geo_sokoban_pipeline.seeding import derive_seed

ADAPTER_WEIGHTS = "adapter_model.safetensors"
MERGED_APART = "adapter"  # folder of the adapter in that of the merged policy
_PREFIX = "base_model.model."
_HEAD = "lm_head"  # log-probs are computed with its weight, chunk by chunk
# Settings of peft under which an adapter computes something else.
_FOREIGN = ("use_dora", "use_rslora", "fan_in_fan_out", "modules_to_save", "rank_pattern", "alpha_pattern",
            "layers_to_transform", "exclude_modules")  # fmt: skip


@dataclass(frozen=True)
class Adapter:
    """The shape of an adapter, and where it comes from.

    Attributes:
        rank: of the matrices A and B.
        alpha: the product is multiplied by alpha/rank.
        targets: see `AdapterOptions`.
        base: folder of the policy whose weights it is added to.
        seed: of the first values of A.
    """

    rank: int
    alpha: float
    targets: tuple[str, ...]
    base: Path
    seed: int = 0

    @classmethod
    def fresh(cls, options: AdapterOptions | None, base: Path, seed: int) -> Adapter | None:
        """A new adapter of a policy; None without options."""
        return None if options is None else cls(options.rank, options.alpha, options.targets, base, seed)

    @classmethod
    def stored(cls, folder: Path) -> Adapter | None:
        """The adapter of a folder; None: it has none.

        Raises:
            FileNotFoundError: the policy that it belongs to is gone.
            ValueError: an adapter of another kind.
        """
        if (base := find_base(folder)) is None:
            return None
        config = read_json(folder / ADAPTER_CONFIG)
        others = [name for name in _FOREIGN if config.get(name)]
        if config.get("peft_type") != "LORA" or others or config.get("bias", "none") != "none":
            kind = ", ".join([f"peft_type={config.get('peft_type')}", f"bias={config.get('bias')}", *others])
            raise ValueError(
                f"{folder / ADAPTER_CONFIG}: {kind}; only plain LoRA without biases is supported. Merge the adapter "
                "with peft, and take the merged policy."
            )
        targets = config["target_modules"]
        return cls(config["r"], config["lora_alpha"], (targets,) if isinstance(targets, str) else tuple(targets), base)

    @property
    def scale(self) -> float:
        """Factor of the product."""
        return self.alpha / self.rank

    def config(self, names: Iterable[str]) -> dict[str, Any]:
        """Its `adapter_config.json`.

        Args:
            names: of its matrices.
        """
        return {
            "peft_type": "LORA",
            "task_type": None,
            "base_model_name_or_path": str(self.base.resolve()),
            "r": self.rank,
            "lora_alpha": self.alpha,
            "lora_dropout": 0.0,
            "bias": "none",
            "target_modules": sorted({name.rpartition(".lora_")[0] for name in names}),
            "inference_mode": True,
        }

    def first_value(self, name: str, like: Tensor) -> Tensor:
        """First value of a matrix: B is 0, A uniform within ±1/√width, as peft's; it depends on seed and name."""
        if name.endswith("lora_B.weight"):
            return torch.zeros(like.shape, dtype=like.dtype)
        generator = torch.Generator().manual_seed(derive_seed(self.seed, "adapter", name))
        drawn = torch.rand(like.shape, generator=generator, dtype=torch.float32)
        return ((2 * drawn - 1) / math.sqrt(like.shape[1])).to(like.dtype)


class AdaptedLinear(nn.Linear):
    """A linear layer with an adapter, in place of one without.

    Attributes:
        weight, bias: of that layer.
        is_on: whether the adapter is added.
    """

    def __init__(self, base: nn.Linear, adapter: Adapter) -> None:
        nn.Module.__init__(self)  # not that of the linear layer, which would draw weights
        self.in_features, self.out_features = base.in_features, base.out_features
        self.weight, self.bias = base.weight, base.bias
        self.lora_A = _matrix(base.in_features, adapter.rank, base.weight)
        self.lora_B = _matrix(adapter.rank, base.out_features, base.weight)
        self.scale, self.is_on = adapter.scale, True

    def forward(self, hidden: Tensor) -> Tensor:
        """(..., output) of (..., input)."""
        own = F.linear(hidden, self.weight, self.bias)
        return own + self.lora_B(self.lora_A(hidden)) * self.scale if self.is_on else own

    def merged(self) -> Tensor:
        """The weight of the layer without an adapter that computes the same."""
        return merge(self.weight, self.lora_A.weight, self.lora_B.weight, self.scale)


def _matrix(inputs: int, outputs: int, like: Tensor) -> nn.Linear:
    """A layer without values, on the device of a weight; none are drawn."""
    made = nn.Linear(inputs, outputs, bias=False, device="meta")
    made.weight = nn.Parameter(like.new_empty(outputs, inputs))
    return made


@torch.no_grad()
def merge(weight: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:
    """A weight, or some of its rows, plus the product of an adapter's matrices, in float32 or better.

    Args:
        a: whole.
        b: the same rows as those of the weight.
    """
    kind = torch.promote_types(a.dtype, torch.float32)
    return weight.to(kind) + (b.to(weight.device, kind) @ a.to(weight.device, kind)) * scale


def adapted_layers(model: nn.Module) -> dict[str, AdaptedLinear]:
    """The adapted layers of a model, by the names of their weights."""
    return {f"{name}.weight": module for name, module in model.named_modules() if isinstance(module, AdaptedLinear)}


def matrices_of(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """The matrices of an adapter among parameters by name."""
    return {name: parameter for name, parameter in parameters.items() if is_adapter(name)}


@contextmanager
def switched_off(model: nn.Module) -> Iterator[None]:
    """The model without its adapter, for the `with` block; only for passes without gradients."""
    layers = adapted_layers(model)
    for layer in layers.values():
        layer.is_on = False
    try:
        yield
    finally:
        for layer in layers.values():
            layer.is_on = True


def find_targets(model: nn.Module, patterns: Sequence[str]) -> list[str]:
    """Names of the layers that an adapter is added to, in the order of the model.

    Raises:
        ValueError: a pattern matches no linear layer, or one whose weight the forward pass uses without its layer.
    """
    modules = {name: module for name, module in model.named_modules() if name}
    linear = [name for name, module in modules.items() if type(module) is nn.Linear and name != _HEAD]
    found: set[str] = set()
    for pattern in patterns:
        whole = re.compile(rf"(?:.*\.)?(?:{pattern})")
        matched = [name for name in modules if whole.fullmatch(name)]
        raw = [name for name in matched if name not in linear and any(True for _ in modules[name].parameters(False))]
        if raw:
            raise ValueError(
                f"policy.adapter.targets: {pattern} matches {raw[0]}, whose weight is used without a linear layer of "
                "its own: an adapter would be trained and ignored. Write a pattern that leaves it out."
            )
        if not (own := set(matched).intersection(linear)):
            known = dict.fromkeys(".".join(name.rsplit(".", 2)[-2:]) for name in linear)
            raise ValueError(
                f"policy.adapter.targets: {pattern} matches no linear layer. There are layers whose names end in "
                f"{', '.join(name for name in known if not name[0].isdigit())}."
            )
        found |= own
    return [name for name in linear if name in found]


def read_adapter(folder: Path, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The matrices of a stored adapter, by name, on the CPU.

    Args:
        parameters: of the model that has such an adapter, perhaps sharded.

    Raises:
        ValueError: the folder has none, others, or others shapes.
    """
    if not (folder / ADAPTER_WEIGHTS).is_file():
        raise ValueError(f"{folder} holds no adapter, but policy.adapter is set; leave it out, or give it an adapter.")
    stored = _read_matrices(folder)
    wanted = matrices_of(parameters)
    for name in sorted({*wanted, *stored}):
        shapes = [tuple(held[name].shape) if name in held else "missing" for held in (stored, wanted)]
        if shapes[0] != shapes[1]:
            raise ValueError(f"{folder / ADAPTER_WEIGHTS}: {name} is {shapes[0]}, but the model's is {shapes[1]}.")
    return stored


def _read_matrices(folder: Path) -> dict[str, Tensor]:
    return {name.removeprefix(_PREFIX): tensor for name, tensor in load_file(folder / ADAPTER_WEIGHTS).items()}


def write_adapter(
    adapter: Adapter, specs: Mapping[str, TensorSpec], read: Callable[[str], Tensor], folder: Path
) -> Files:
    """Write an adapter into a folder.

    Args:
        specs: of its matrices.
        read: a whole matrix, by its name.

    Returns:
        Size and digest of the file of matrices.
    """
    write_json(folder / ADAPTER_CONFIG, adapter.config(specs))
    stored = {f"{_PREFIX}{name}": spec for name, spec in specs.items()}
    path = folder / ADAPTER_WEIGHTS
    return write_tensors(path, stored, lambda name: read(name.removeprefix(_PREFIX)), WEIGHT_METADATA)


def open_weights(folder: Path) -> WeightSource:
    """The weights of a policy folder, which never change; an adapter's are the sums."""
    if (adapter := Adapter.stored(folder)) is None:
        return WeightSource.of_folder(folder)
    base, matrices = WeightSource.of_folder(adapter.base), _read_matrices(folder)
    kind = TensorSpec.of(next(iter(matrices.values()))).dtype
    sums = base.cast(dict.fromkeys(base.specs, kind))

    def collect(specs: Mapping[str, TensorSpec], memory: SharedBytes | None) -> Tensor:
        flat = base.collect(specs, memory)
        for name, weight in cut(flat, specs):
            layer = name.removesuffix(".weight")
            if (a := matrices.get(f"{layer}.lora_A.weight")) is not None:
                weight.copy_(merge(weight, a, matrices[f"{layer}.lora_B.weight"], adapter.scale))
        return flat

    return replace(sums, collect=collect, state=lambda: str(folder), folder=None)


def share_policy(folder: Path, entries: Mapping[str, Any]) -> FolderWriter:
    """Writer of a folder with the policy of another one, as `link_policy`.

    That of an adapter gets the sums of the weights, and the adapter by itself in `adapter/`.
    """
    if find_base(folder) is None:
        return link_policy(folder, entries)
    source, apart = open_weights(folder), (ADAPTER_CONFIG, ADAPTER_WEIGHTS)

    def write(target: Path) -> Filled:
        link_policy(folder, {})(target)
        (target / MERGED_APART).mkdir()
        for name in apart:
            (target / name).rename(target / MERGED_APART / name)
        files = write_checkpoint(target, source.specs, source.read_one)
        return Filled(dict(entries), files)

    return write
