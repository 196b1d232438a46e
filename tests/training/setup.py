"""What the tests of training share: a small policy, its episodes, options at a small size, vectors of weights."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from safetensors.torch import load_file
from torch import Tensor

from geo_sokoban_pipeline.datasets import CheckpointsDataset, MetricsDataset, TrajectoriesDataset
from geo_sokoban_pipeline.policies.lora import Adapter, matrices_of
from geo_sokoban_pipeline.policies.policy import Policy, attach_adapter
from geo_sokoban_pipeline.runs.policy_folder import PolicyFolder
from geo_sokoban_pipeline.studies.plan import merge
from geo_sokoban_pipeline.training.batch import TrainSample
from geo_sokoban_pipeline.training.demonstrations import Demonstrator
from geo_sokoban_pipeline.training.grpo_loop import RunInputs, run_grpo
from geo_sokoban_pipeline.trajectories.types import Trajectory
from option_fields import set_values
from task_options import TrainOptions

SIZES = {
    "layers": 1,
    "hidden": 32,
    "heads": 2,
    "kv_heads": 1,
    "mlp": 64,
    "vision_hidden": 32,
    "vision_heads": 2,
    "vision_mlp": 32,
    "vision_grid": 8,
}
# Two ranks can split it, and each has two groups of heads, so that queries, keys and values lie in turns.
SPLITTABLE = {**SIZES, "layers": 3, "heads": 8, "kv_heads": 4, "head_dim": 8, "vision_layers": 2, "deepstack": (0, 1)}
NOTHING_STORED: dict[str, Any] = {"iteration": -1, "dir": None, "manifest": None, "complete": None, "stored": []}
# A run of two ranks of Megatron, by dotted name; the driver and the ranks need a reference policy.
MEGATRON: dict[str, Any] = {
    "processes": 2,
    "threads": 1,
    "backend": "megatron",
    "megatron.tensor_parallel": 2,
    "warm_start.steps": 6,
    "loop.iterations": 2,
    "loop.eval_interval": 0,
    "grpo.kl_coefficient": 0.01,
    "grpo.old_log_probs": "recompute",
    "evaluation.prompts": 2,
    "evaluation.blank_images": "false",
}
SMALL: dict[str, Any] = {
    "policy": {"tiny": SIZES},
    "warm_start": {
        "steps": 30,
        "episodes_per_step": 8,
        "validation_episodes": 4,
        "learning_rate": 0.004,
        "warmup_steps": 0,
        "play_every": 0,
    },
    "rollout": {"max_turns": 3},
    "grpo": {"groups": 4, "group_size": 3, "groups_per_step": None, "filter": "none"},
    # A larger epsilon: moments near 0 would turn the rounding of two sums into steps of full size.
    "optimizer": {"learning_rate": 0.003, "eps": 1e-5, "warmup_iterations": 4, "schedule_iterations": 20},
    "loop": {"iterations": 1, "eval_interval": 0},
}


@dataclass(frozen=True, repr=False)
class Setup:
    """A policy, the episodes that it played, and another policy near it that is to be trained on them.

    Attributes:
        policy: after a short warm start.
        trained: the same with noise on all weights, so that ratios, importance weights and the KL differ from 1 and 0.
        folder: of `policy`.
        episodes: of 4 groups of 3, played by `policy`, without advantages.
    """

    policy: Policy
    trained: Policy
    folder: PolicyFolder
    rows: list[dict[str, Any]]
    options: TrainOptions
    episodes: list[Trajectory]


@dataclass(frozen=True, repr=False)
class StoredRun:
    """A run on disk.

    Attributes:
        root: data root.
        found: what `read_run` gives.
    """

    root: Path
    found: dict[str, Any]


@dataclass(frozen=True)
class LoopFolder:
    """A run of the loop, stored as the pipeline stores it."""

    root: Path

    def checkpoint(self, iteration: int) -> Path:
        return self.root / "checkpoints" / f"iter={iteration:05d}"

    def tables(self, kind: str = "trajectories") -> dict[str, pa.Table]:
        """Episodes by partition."""
        return {name: read() for name, read in TrajectoriesDataset(str(self.root / kind)).load().items()}

    def metrics(self) -> list[dict[str, Any]]:
        return MetricsDataset(str(self.root / "metrics")).load()

    def go_on(self, setup: Setup, options: TrainOptions) -> Iterator[int]:
        """Continue the run; yields the number of each committed iteration."""
        episodes = [TrajectoriesDataset(str(self.root / kind)) for kind in ("trajectories", "eval_trajectories")]
        checkpoints = CheckpointsDataset(str(self.root / "checkpoints"))
        places = [*episodes, MetricsDataset(str(self.root / "metrics")), checkpoints]
        for chunk in run_loop(setup, options, checkpoints.resume_state()):
            for place, parts in zip(places, chunk, strict=True):
                place.save(parts)
            if isinstance(chunk[3], dict) and chunk[3]:
                yield checkpoints.resume_state()["iteration"]

    def assert_same(self, other: LoopFolder) -> None:
        """All episodes but their times, and the newest weights, are those of another run."""
        for kind in ("trajectories", "eval_trajectories"):
            own, theirs = self.tables(kind), other.tables(kind)
            assert list(own) == list(theirs)
            for name, table in own.items():
                assert table.drop_columns("timings").equals(theirs[name].drop_columns("timings")), name
        newest = len(self.metrics()) - 1
        one, two = (load_file(run.checkpoint(newest) / "model.safetensors") for run in (self, other))
        assert all(torch.equal(weight, two[name]) for name, weight in one.items())


def run_loop(
    setup: Setup, options: TrainOptions, resume: Any = NOTHING_STORED, seed: int = 0
) -> Iterator[tuple[Any, ...]]:
    """Outputs of the loop, with the first rows of the setup as prompts of its validations."""
    return run_grpo(RunInputs("train_sokoban", seed, options, {}, setup.folder, setup.rows, setup.rows[:8]), resume, 0)


def copied(policy: Policy) -> Policy:
    """The policy with a model of its own, to be trained; tokenizer and image processor are shared."""
    return replace(policy, model=copy.deepcopy(policy.model))


# Of a rank below four, so that of four ranks two hold no rows of A.
ADAPTED = ("self_attn.[qkvo]_proj", "mlp.(gate|up|down)_proj", "visual.(blocks|merger).*(qkv|attn.proj|linear_fc[12])")


def adapted(policy: Policy, base: Path = Path(), *, is_fresh: bool = True) -> Policy:
    """A copy of a policy with an adapter on all layers that the episodes use; a fresh one changes no log-prob."""
    found = copied(policy)
    attach_adapter(found, Adapter(2, 4.0, ADAPTED, base))
    generator = torch.Generator().manual_seed(0)
    for name, matrix in () if is_fresh else matrices_of(dict(found.model.named_parameters())).items():
        if "lora_B" in name:
            matrix.data.copy_(0.1 * torch.randn(matrix.shape, generator=generator))
    return found


def settings(base: TrainOptions, changes: Mapping[str, Any]) -> TrainOptions:
    """Options at the small size with changes by dotted name, such as `grpo.passes`."""
    return type(base).model_validate(set_values(merge(base.model_dump(), SMALL), changes))


def demonstrate(policy: Policy, rows: Any, options: TrainOptions, cells: Sequence[int]) -> list[TrainSample]:
    """Episodes of Sokoban, one per size of a cell in pixels, with values for every term of the objective."""
    rng, made = np.random.default_rng(0), []
    for number, cell in enumerate(cells):
        env = options.env.model_copy(update={"args": {**options.env.args, "cell_px": cell}})
        changed = options.model_copy(update={"env": env})
        sample = Demonstrator(rows, policy, changed, 0, "test").demonstrate(number)
        count = len(sample.targets)
        values = {
            name: rng.normal(-1, 0.3, count).astype(np.float32)
            for name in ("old_log_probs", "rollout_log_probs", "ref_log_probs", "advantages")
        }
        made.append(TrainSample(**{**vars(sample), **values}))
    return made


def shaken(policy: Policy, share: float = 0.1) -> Policy:
    """The policy with noise of a share of each tensor's own spread."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in policy.model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.add_(share * parameter.std(correction=0) * noise)
    return policy


def weights(policy: Policy) -> Tensor:
    """All weights of a policy as one copied vector."""
    return torch.cat([parameter.detach().flatten().clone() for parameter in policy.model.parameters()])


def by_iteration(chunks: Iterable[tuple[Any, ...]]) -> Iterator[tuple[Any, ...]]:
    """What the loop yields: the order to rewind, one chunk per iteration (it gives two), the mark of its end."""
    chunks = iter(chunks)
    for chunk in chunks:
        if isinstance(chunk[0], dict) and chunk[0]:
            episodes, validations, _, _ = chunk
            _, _, metrics, checkpoint = next(chunks)
            yield episodes, validations, metrics, checkpoint
        else:
            yield chunk
