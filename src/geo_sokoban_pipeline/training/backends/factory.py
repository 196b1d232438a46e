"""The one place that builds training backends."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from geo_sokoban_pipeline.config.grpo import MegatronOptions, OptimizerOptions, TrainOptions
from geo_sokoban_pipeline.distributed.group import Group
from geo_sokoban_pipeline.policies.policy import Policy, load_empty
from geo_sokoban_pipeline.runs.policy_folder import PolicyFolder
from geo_sokoban_pipeline.training.backends.base import TrainBackend
from geo_sokoban_pipeline.training.backends.ranks import BuildBackend, BuildScorer, RankedBackend, RankedScorer
from geo_sokoban_pipeline.training.backends.torch import TorchBackend
from geo_sokoban_pipeline.training.batch import TrainSample
from geo_sokoban_pipeline.training.worker_group import WorkerGroup


def build_backend(
    policy: Policy,
    options: OptimizerOptions,
    temperature: float = 1.0,
    workers: WorkerGroup | None = None,
    megatron: MegatronOptions | None = None,
) -> TrainBackend:
    """The training backend over a policy's model, which it trains in place.

    Args:
        options: optimizer and micro-batches.
        temperature: sampling temperature of the rollouts; 1 for SFT.
        workers: worker group whose ranks take every step together, by the backend of its options; None: this process
            alone.
        megatron: layout of Megatron's ranks, of this process alone; None: PyTorch.
    """
    if workers is not None:
        return RankedBackend(policy, options, temperature, workers)
    if megatron is not None:
        group = Group.alone(policy.device)
        return BuildBackend(options, temperature, megatron=megatron).build(policy, group)
    return TorchBackend(policy, options, temperature)


def build_scorer(
    folder: PolicyFolder, options: TrainOptions, workers: WorkerGroup | None = None
) -> Callable[[Sequence[TrainSample]], list[np.ndarray]]:
    """Log-probs of a policy that is not trained, for the KL term.

    Between calls it waits in the memory of the CPU.

    Args:
        workers: whose ranks hold a part of it each, where they do of the trained policy. None: this process alone.
    """
    temperature = options.rollout.sampling.temperature
    if workers is not None and (options.shares_weights or not workers.drives_a_rank):
        return RankedScorer(load_empty(options.policy, folder.path), options.optimizer, temperature, workers)
    return BuildScorer(folder.path, options.optimizer, temperature).build(options.policy).log_probs
