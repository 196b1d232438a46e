"""One rank's part of a training backend, and of a reference policy."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from torch.distributed.device_mesh import DeviceMesh

from geo_sokoban_pipeline.config.grpo import MegatronOptions, OptimizerOptions
from geo_sokoban_pipeline.config.policy import PolicyOptions
from geo_sokoban_pipeline.distributed.fsdp import device_of_mesh, move_shards, shard_policy
from geo_sokoban_pipeline.distributed.group import Group
from geo_sokoban_pipeline.policies.policy import Policy, load_as, load_empty, store_in_compute_type
from geo_sokoban_pipeline.training.backends.torch import GradientPass, PassSetting, TorchBackend
from geo_sokoban_pipeline.training.batch import TrainSample
from geo_sokoban_pipeline.training.runtime import PART_THRESHOLD, limit_heap


def build_rank(
    policy: Policy,
    options: OptimizerOptions,
    temperature: float,
    group: Group | None,
    sharding: str = "none",
    replicas: int = 1,
    megatron: MegatronOptions | None = None,
) -> TorchBackend:
    """The backend of a rank; a policy without weights is read from its folder.

    Args:
        options: optimizer and micro-batches.
        temperature: sampling temperature of the rollouts.
        group: the ranks. None: this process alone.
        sharding, replicas: see `TrainOptions`.
        megatron: layout of Megatron's ranks; None: PyTorch.
    """
    if megatron is not None:
        from geo_sokoban_pipeline.training.backends.megatron.backend import MegatronBackend

        assert group is not None
        limit_heap(PART_THRESHOLD)
        return MegatronBackend(policy, options, temperature, group, megatron)
    if (mesh := _mesh_of(group, sharding, replicas)) is not None:
        limit_heap(PART_THRESHOLD)
    return TorchBackend(policy, options, temperature, group, mesh)


class ReferenceScorer:
    """A policy that is not trained, or a rank's part of it. Between calls it waits in the memory of the CPU.

    Args:
        passes: over the policy, which lies on the device that computes.

    Attributes:
        policy: whole, or this rank's part.
    """

    def __init__(self, passes: GradientPass) -> None:
        self._pass, self.policy, self._device = passes, passes.policy, passes.policy.model.device
        move_shards(self.policy, "cpu")

    def log_probs(self, samples: Sequence[TrainSample]) -> list[np.ndarray]:
        """(M,) float32 log-probs of each sample's trained tokens."""
        move_shards(self.policy, self._device)
        try:
            return self._pass.log_probs(samples)
        finally:
            move_shards(self.policy, "cpu")


def build_rank_scorer(
    folder: Path,
    chosen: PolicyOptions,
    options: OptimizerOptions,
    temperature: float,
    group: Group | None = None,
    sharding: str = "none",
    replicas: int = 1,
    megatron: MegatronOptions | None = None,
) -> ReferenceScorer:
    """The reference policy of a rank: its part where the ranks share the weights, else a whole one.

    Args:
        folder: of the policy.
        chosen: how it is loaded.
        options, temperature, group, sharding, replicas, megatron: see `build_rank`.
    """
    if megatron is not None:
        from geo_sokoban_pipeline.training.backends.megatron.backend import build_parallel_pass

        assert group is not None
        passes = build_parallel_pass(load_empty(chosen, folder), options, temperature, group, megatron)
        return ReferenceScorer(passes)
    setting = PassSetting.of(options, temperature)
    if (mesh := _mesh_of(group, sharding, replicas)) is not None:
        held = shard_policy(load_empty(chosen, folder), mesh, is_trained=False)
        return ReferenceScorer(GradientPass(held, setting, group, device_of_mesh(mesh)))
    policy = load_as(chosen, folder)
    store_in_compute_type(policy)
    return ReferenceScorer(GradientPass(policy, setting))


def _mesh_of(group: Group | None, sharding: str, replicas: int) -> DeviceMesh | None:
    """The mesh over which the weights are sharded; None: every rank has a copy, or is the only one."""
    return None if group is None or sharding == "none" or group.size == 1 else group.mesh(replicas)
