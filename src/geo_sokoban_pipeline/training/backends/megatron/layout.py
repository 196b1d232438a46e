"""How ranks divide a policy: `tensor` neighbouring ranks split each matrix, and `data` such groups split the samples.

Rank r is number r % tensor of group r // tensor. Ranks of equal number share what they hold by FSDP2.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch.distributed.device_mesh import DeviceMesh

from geo_sokoban_pipeline.config.grpo import MegatronOptions
from geo_sokoban_pipeline.distributed.group import Group


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
