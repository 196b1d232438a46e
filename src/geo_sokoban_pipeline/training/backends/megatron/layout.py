"""How ranks divide a policy: `tensor` neighbouring ranks split each matrix, and `data` such groups split the samples.

Rank r is number r % tensor of group r // tensor. Ranks of equal number share what they hold by FSDP2.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

from torch.distributed.device_mesh import DeviceMesh

from geo_sokoban_pipeline.config.grpo import MegatronOptions
from geo_sokoban_pipeline.distributed.group import Group


@dataclass(frozen=True)
class Layout:
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
    def of(cls, options: MegatronOptions, group: Group) -> Layout:
        """Of a group's ranks; a collective."""
        data = group.size // options.tensor_parallel
        mesh = group.grid({"data": data, "tensor": options.tensor_parallel, "alone": 1})
        return cls(options.tensor_parallel, data, options.sequence_parallel, mesh)

    @property
    def tensor_group(self) -> Any:
        """The process group that splits matrices with this rank."""
        return self.mesh.get_group("tensor")

    @property
    def data_mesh(self) -> DeviceMesh:
        """The ranks that hold the same part of each matrix as this one."""
        return self.mesh["data"]

    @property
    def place(self) -> tuple[int, int]:
        """Number of this rank's group, and its number within the group."""
        return self.mesh.get_local_rank("data"), self.mesh.get_local_rank("tensor")

    def place_of(self, rank: int) -> tuple[int, int]:
        """`place` of another rank."""
        return divmod(rank, self.tensor)


def find_obstacles(config: Any, options: MegatronOptions, processes: int) -> list[str]:
    """Why Megatron-Core cannot train a model in this layout, each with the numbers and what to take instead.

    Args:
        config: Hugging Face's, of the whole model.
        processes: number of ranks.
    """
    text, ranks = config.text_config, options.tensor_parallel
    found = []
    if find_spec("megatron") is None or find_spec("megatron.core") is None:
        found.append(
            "backend=megatron needs Megatron-Core: pip install 'geo-sokoban-pipeline[megatron]', or set backend=fsdp"
        )
    if getattr(text, "num_experts", 0):
        found.append(
            f"backend=megatron with a mixture of {text.num_experts} experts: Megatron-Core trains them with "
            "Transformer Engine alone; set backend=fsdp"
        )
    if processes % ranks:
        found.append(f"megatron.tensor_parallel={ranks} does not divide processes={processes}; change one of them")
    for what, count in (
        ("query heads", text.num_attention_heads),
        ("key and value heads", text.num_key_value_heads),
        ("rows of the vocabulary", text.vocab_size),
        ("numbers of an MLP", text.intermediate_size),
    ):
        if count % ranks:
            fitting = [size for size in range(1, ranks) if count % size == 0]
            found.append(
                f"megatron.tensor_parallel={ranks} does not divide the model's {count} {what}; take {fitting[-1]}"
            )
    if getattr(text, "attention_bias", False):
        found.append("backend=megatron with biases of attention (attention_bias): set backend=fsdp")
    if text.hidden_act != "silu":
        found.append(f"backend=megatron with hidden_act={text.hidden_act}: it has silu alone; set backend=fsdp")
    kind = text.rope_parameters["rope_type"]
    if kind != "default":
        found.append(f"backend=megatron with rope_type={kind}: it has the default alone; set backend=fsdp")
    return found


def check_layout(config: Any, options: MegatronOptions, processes: int) -> None:
    """See that Megatron-Core can train a model in a layout; arguments are those of `find_obstacles`.

    Raises:
        ValueError: it cannot.
    """
    obstacles = find_obstacles(config, options, processes)
    if obstacles:
        raise ValueError(". ".join([*obstacles, ""]).strip())
