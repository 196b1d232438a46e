"""How ranks divide a policy: which part of each Hugging Face weight a rank holds, in which of Megatron's parameters.

`tensor` neighbouring ranks split each matrix, and `data` such groups split the samples: rank r is number r % tensor of
group r // tensor. Ranks of equal number share what they hold by FSDP2.

Megatron fuses what one product computes: query, key and value rows of each group of heads lie behind each other, gate
and up rows too. Row-parallel matrices are split by columns. Of what a rank of a tensor-parallel group has, the ranks of
equal number hold a range of rows each. All of that is a table of rows, made once from the configuration. Tensors
that leave the ranks, for disk, engines and optimizers, have Hugging Face's names and shapes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from geo_sokoban_pipeline.config.grpo import MegatronOptions
from geo_sokoban_pipeline.distributed.group import Group, Part
from geo_sokoban_pipeline.distributed.slices import Slice, StoredTensors, own_part, split_rows
from geo_sokoban_pipeline.policies.weights import TensorSpec

_GPT = "language.gpt."
_LANGUAGE = "model.language_model."
# Of a layer: Megatron's name, and Hugging Face's names of what it holds.
_REPLICATED = {
    "input_layernorm.weight": "input_layernorm.weight",
    "self_attention.q_layernorm.weight": "self_attn.q_norm.weight",
    "self_attention.k_layernorm.weight": "self_attn.k_norm.weight",
    "pre_mlp_layernorm.weight": "post_attention_layernorm.weight",
}
_BY_COLUMNS = {
    "self_attention.linear_proj.weight": "self_attn.o_proj.weight",
    "mlp.linear_fc2.weight": "mlp.down_proj.weight",
}
_QUERIES_AND_KEYS = ".self_attention.q_layernorm.weight", ".self_attention.k_layernorm.weight"


@dataclass(frozen=True)
class Rows:
    """Consecutive rows of a Hugging Face weight in what a rank of a tensor-parallel group has of a parameter.

    Attributes:
        first: in the weight.
        own: first in the parameter.
    """

    first: int
    own: int
    count: int


@dataclass(frozen=True)
class Piece:
    """A rank's part of a Hugging Face weight.

    Attributes:
        place: in the weight.
        own: where it lies in the rank's shard of the parameter, by rows, in the order of the weight.
    """

    place: Slice
    own: Sequence[slice]

    def read(self, shard: Tensor) -> Tensor:
        """The piece, out of a shard."""
        parts = [shard[rows] for rows in self.own]
        return parts[0] if len(parts) == 1 else torch.cat(parts) if parts else shard[:0]

    def write(self, shard: Tensor, piece: Tensor) -> None:
        """Put the piece into a shard."""
        for rows, part in self.split(piece):
            shard[rows].copy_(part)

    def split(self, piece: Tensor) -> Iterator[tuple[slice, Tensor]]:
        """Rows of a shard, and the part of the piece that belongs there."""
        sizes = [rows.stop - rows.start for rows in self.own]
        yield from zip(self.own, piece.split(sizes) if sizes else [], strict=True)


@dataclass(frozen=True)
class Weight:
    """A Hugging Face weight.

    Attributes:
        name: Hugging Face's.
        spec: of the whole weight.
        parameter: that holds it.
        rows: of the parameter, by the number of a rank in a tensor-parallel group.
        count: rows of the parameter on each such rank.
        split: whether these ranks hold different rows, different columns, or all the whole weight.
    """

    name: str
    spec: TensorSpec
    parameter: str
    rows: Sequence[Sequence[Rows]]
    count: int
    split: Literal["rows", "columns"] | None

    def piece(self, layout: MegatronLayout, data: int, tensor: int) -> Piece:
        """The part of the rank at this place of the layout."""
        held = split_rows(self.count, layout.data)[data]
        found: list[range] = []
        own: list[slice] = []
        for rows in self.rows[tensor]:
            first, last = max(rows.own, held.start), min(rows.own + rows.count, held.stop)
            if first < last:
                start = rows.first + first - rows.own
                assert not found or found[-1].stop == start  # a piece is one range of rows
                found.append(range(start, start + last - first))
                own.append(slice(first - held.start, last - held.start))
        columns: range | None = None
        if self.split == "columns":
            width = self.spec.shape[1] // layout.tensor
            columns = range(tensor * width, (tensor + 1) * width)
        return Piece(Slice(range(found[0].start, found[-1].stop) if found else range(0), columns), own)


class WeightTable:
    """All weights of a policy under a layout.

    Args:
        config: of the whole model.
        specs: of its weights by Hugging Face name, in the order of the model.
        names: of Megatron's parameters.

    Attributes:
        parameters: of this rank by name, once they are sharded.
        weights: by Hugging Face name.
        of_parameter: weights that a parameter holds.
        partial: names of the parameters whose gradients each rank of a tensor-parallel group has a summand of.
    """

    def __init__(
        self,
        config: Any,
        specs: Mapping[str, TensorSpec],
        names: Sequence[str],
        layout: MegatronLayout,
        group: Group,
    ) -> None:
        self._layout, self._group = layout, group
        self.parameters: Mapping[str, Tensor] = {}
        found = {weight.name: weight for weight in _language_weights(config.text_config, specs, layout)}
        self.weights = {
            name: found.get(name) or _replicated(name, specs, name.removeprefix("model."), layout) for name in specs
        }
        self.of_parameter: dict[str, list[Weight]] = {name: [] for name in names}
        for weight in self.weights.values():
            self.of_parameter[weight.parameter].append(weight)
        self.partial = {
            name
            for name, held in self.of_parameter.items()
            if name.endswith(_QUERIES_AND_KEYS)
            or (layout.sequence_parallel and name.startswith(_GPT) and held[0].split is None)
        }

    def is_split(self, parameter: str) -> bool:
        """Whether the ranks of a tensor-parallel group hold different parts of a parameter."""
        return self.of_parameter[parameter][0].split is not None

    def own(self, weight: Weight) -> Piece:
        """This rank's part."""
        return weight.piece(self._layout, *self._layout.place)

    def piece(self, weight: Weight, rank: int) -> Piece:
        """A rank's part."""
        return weight.piece(self._layout, *self._layout.place_of(rank))

    def holders(self, weight: Weight, owner: int) -> list[int]:
        """Ranks whose pieces make a whole weight; of what groups have copies of, those of the owner's number."""
        ranks = range(self._group.size)
        if weight.split is not None:
            return list(ranks)
        number = self._layout.place_of(owner)[1]
        return [rank for rank in ranks if self._layout.place_of(rank)[1] == number]

    def read(self, weight: Weight, tensors: Mapping[str, Tensor] | None = None) -> Tensor:
        """This rank's piece of a weight, or of what lies like its parameter in other tensors."""
        return self.own(weight).read(own_part((self.parameters if tensors is None else tensors)[weight.parameter]))

    @torch.no_grad()
    def load(self, folder: Path) -> None:
        """Overwrite the parameters with the weights of a checkpoint, of which this rank reads its pieces alone.

        Raises:
            ValueError: the checkpoint lacks a weight, or has it in another shape.
        """
        stored = StoredTensors(folder, "model")
        for name, weight in self.weights.items():
            stored.check_shape(name, weight.spec.shape)
            piece = self.own(weight)
            if piece.own:
                piece.write(own_part(self.parameters[weight.parameter]), stored.read(name, piece.place))

    @torch.no_grad()
    def copy(self, whole: Mapping[str, Tensor]) -> None:
        """Overwrite the parameters with their pieces of whole weights."""
        for name, weight in self.weights.items():
            piece = self.own(weight)
            if piece.own:
                piece.write(own_part(self.parameters[weight.parameter]), piece.place.of(whole[name].detach()))

    def part(self, name: str, owner: int) -> Part:
        """The part that this rank holds of a whole weight that a rank gets."""
        weight = self.weights[name]
        ranks = self.holders(weight, owner)
        return Part(
            self.read(weight), weight.spec.shape, ranks, lambda whole, rank: self.piece(weight, rank).place.of(whole)
        )

    @torch.no_grad()
    def gather(self, name: str, dtype: torch.dtype, tensors: Mapping[str, Tensor] | None = None) -> Tensor:
        """A whole weight in a type, or what lies like it in other tensors, on every rank; a collective."""
        weight = self.weights[name]
        own = self.read(weight, tensors).to(self._layout.mesh.device_type, dtype).flatten()
        places = [self.piece(weight, rank).place for rank in range(self._group.size)]
        whole = own.new_empty(weight.spec.shape)
        shapes = [place.of(whole).shape for place in places]
        flat = own.new_zeros(max(shape.numel() for shape in shapes))
        flat[: own.numel()] = own
        found = own.new_empty(self._group.size, len(flat))
        dist.all_gather_single(found.view(-1), flat)
        for place, shape, row in zip(places, shapes, found, strict=True):
            place.of(whole).copy_(row[: shape.numel()].view(shape))
        return whole


def _language_weights(text: Any, specs: Mapping[str, TensorSpec], layout: MegatronLayout) -> Iterator[Weight]:
    ranks = range(layout.tensor)

    def by_rows(name: str, parameter: str, tables: Sequence[Sequence[Rows]], count: int) -> Weight:
        return Weight(name, specs[name], _GPT + parameter, tables, count, "rows")

    vocabulary = text.vocab_size // layout.tensor
    for name, place in (
        (f"{_LANGUAGE}embed_tokens.weight", "embedding.word_embeddings.weight"),
        ("lm_head.weight", "output_layer.weight"),
    ):
        if name in specs:  # a tied head has no weight of its own
            yield by_rows(name, place, [[Rows(rank * vocabulary, 0, vocabulary)] for rank in ranks], vocabulary)
    yield _replicated(f"{_LANGUAGE}norm.weight", specs, f"{_GPT}decoder.final_layernorm.weight", layout)
    groups, heads = text.num_key_value_heads // layout.tensor, text.num_attention_heads // text.num_key_value_heads
    # Rows of one group of heads: its queries, its key, its value.
    sizes = {"q": heads * text.head_dim, "k": text.head_dim, "v": text.head_dim}
    width, inner = sum(sizes.values()), text.intermediate_size // layout.tensor
    for layer in range(text.num_hidden_layers):
        prefix, own = f"{_LANGUAGE}layers.{layer}.", f"decoder.layers.{layer}."
        for place, name in _REPLICATED.items():
            yield _replicated(prefix + name, specs, _GPT + own + place, layout)
        for place, name in _BY_COLUMNS.items():
            count = text.hidden_size
            yield Weight(
                prefix + name,
                specs[prefix + name],
                _GPT + own + place,
                [[Rows(0, 0, count)]] * len(ranks),
                count,
                "columns",
            )
        first = 0
        for letter, size in sizes.items():
            tables = [
                [Rows((rank * groups + group) * size, group * width + first, size) for group in range(groups)]
                for rank in ranks
            ]
            first += size
            parameter = f"{own}self_attention.linear_qkv.weight"
            yield by_rows(f"{prefix}self_attn.{letter}_proj.weight", parameter, tables, groups * width)
        for number, part in enumerate(("gate", "up")):
            tables = [[Rows(rank * inner, number * inner, inner)] for rank in ranks]
            yield by_rows(f"{prefix}mlp.{part}_proj.weight", f"{own}mlp.linear_fc1.weight", tables, 2 * inner)


def _replicated(name: str, specs: Mapping[str, TensorSpec], parameter: str, layout: MegatronLayout) -> Weight:
    """A weight that every rank of a tensor-parallel group has."""
    count = specs[name].shape[0]
    return Weight(name, specs[name], parameter, [[Rows(0, 0, count)]] * layout.tensor, count, None)


@dataclass(frozen=True)
class MegatronLayout:
    """The layout, seen from one rank.

    Attributes:
        tensor: ranks that split each matrix.
        data: groups of them.
        sequence_parallel: whether ranks split what lies between the matrices by tokens.
        mesh: of all ranks; its dimensions are `data`, `tensor` and, each rank by itself, `alone`.
    """

    tensor: int
    data: int
    sequence_parallel: bool
    mesh: DeviceMesh

    @classmethod
    def of(cls, options: MegatronOptions, group: Group) -> MegatronLayout:
        """Of a group's ranks; a collective."""
        data = group.size // options.tensor_parallel
        mesh = group.grid({"data": data, "tensor": options.tensor_parallel, "alone": 1})
        return cls(options.tensor_parallel, data, options.sequence_parallel, mesh)

    @property
    def tensor_group(self) -> Any:
        """The process group that splits matrices with this rank."""
        return self.mesh.get_group("tensor")

    @property
    def place(self) -> tuple[int, int]:
        """Number of this rank's group, and its number within the group."""
        return self.mesh.get_local_rank("data"), self.mesh.get_local_rank("tensor")

    def place_of(self, rank: int) -> tuple[int, int]:
        """`place` of another rank."""
        return divmod(rank, self.tensor)
