"""What a process holds of a policy of 150 million weights that several ranks share: its part, and a few units."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from geo_sokoban_pipeline.config.grpo import GrpoOptions, OptimizerOptions
from geo_sokoban_pipeline.distributed.slices import own_part
from geo_sokoban_pipeline.grpo.loss import GrpoObjective
from geo_sokoban_pipeline.policies.policy import load_empty
from geo_sokoban_pipeline.rollout.engines.sglang.payload import pack_tensors
from geo_sokoban_pipeline.rollout.engines.sglang.weights import cut_buckets
from geo_sokoban_pipeline.training.backends.factory import build_backend
from geo_sokoban_pipeline.training.batch import TrainSample
from geo_sokoban_pipeline.training.worker import Worker
from training.four_ranks import FourRanks
from training.large import forget_peak, peak, write_random_policy
from training.setup import SIZES, Setup

pytestmark = pytest.mark.slow

# Deep and narrow, because the bound is in units: of 7 million weights each.
LARGE = {**SIZES, "layers": 22, "hidden": 768, "heads": 12, "kv_heads": 4, "head_dim": 64, "mlp": 2304}
BUCKET = 32 << 20


@pytest.fixture(scope="module")
def large(setup: Setup, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the policy; its tokenizer is that of the small one."""
    folder = tmp_path_factory.mktemp("large")
    write_random_policy(folder, setup.policy, LARGE)
    return folder


@dataclass(frozen=True)
class Job:
    """A function of a rank's backend, or of nothing."""

    work: Callable[..., Any]
    takes_backend: bool

    def __call__(self, worker: Worker) -> Any:
        return self.work(worker.backend) if self.takes_backend else self.work()


def watch_gradients(backend: Any) -> None:
    """Have a backend note the bytes of its gradients before it drops them."""
    clear = backend.optimizers.clear_gradients

    def note() -> None:
        gradients = [parameter.grad for parameter in backend._parameters.values() if parameter.grad is not None]
        backend.gradient_bytes = sum(map(held, gradients))
        clear()

    backend.optimizers.clear_gradients = note


def held(tensor: torch.Tensor) -> int:
    return own_part(tensor).untyped_storage().nbytes()


def state_bytes(backend: Any) -> dict[str, int]:
    """Bytes of parameters, gradients and moments of a rank."""
    moments, _ = backend.optimizers.state()
    parameters = backend._parameters.values()
    return {
        "parameters": sum(map(held, parameters)),
        "gradients": backend.gradient_bytes,
        "moments": sum(map(held, moments.values())),
    }


@pytest.mark.parametrize(("layout", "count"), [("two shards", 2), ("four shards", 4)])
def test_no_process_needs_the_whole_model(
    four_ranks: FourRanks,
    setup: Setup,
    batches: dict[str, list[TrainSample]],
    large: Path,
    tmp_path: Path,
    layout: str,
    count: int,
) -> None:
    """Over loading, three steps, saving, and sending weights, in resident memory; the driver included."""
    policy = load_empty(setup.options.policy, large)
    sizes = {name: parameter.numel() for name, parameter in policy.model.named_parameters()}
    parts = (".layers.0.", ".visual.", ".embed_tokens.")
    layer, tower, embedding = (sum(n for name, n in sizes.items() if part in name) for part in parts)
    assert sum(sizes.values()) >= 150e6 and layer > max(tower, embedding)
    whole, unit = 4 * 4 * sum(sizes.values()), 4 * layer
    with four_ranks.group(policy, layout) as workers:
        assert workers is not None and workers.size == count

        def everywhere(work: Callable[..., Any], *own: Any) -> list[Any]:
            return workers.run(lambda: work(*own), [Job(work, bool(own))] * (count - 1))

        before = everywhere(forget_peak)
        backend: Any = build_backend(policy, OptimizerOptions(), 0.9, workers)
        everywhere(watch_gradients, backend.own)
        for _ in range(3):
            backend.step(batches["mixed"], GrpoObjective(GrpoOptions()), 1e-4)
        states = everywhere(state_bytes, backend.own)
        saved = backend.export(tmp_path) | backend.save_state(tmp_path)
        sent = 0
        for bucket, _ in cut_buckets(backend.weight_source().read("bfloat16"), BUCKET):
            sent += sum(map(len, pack_tensors(bucket)))
        after = everywhere(peak)
    assert policy.is_empty
    assert sum(file["bytes"] for file in saved.values()) > 0.75 * whole - 1e6
    assert sent > whole / 8
    for state in states:
        assert sum(state.values()) <= 1.05 * whole / count + unit, state
        assert state["gradients"] > 0.9 * whole / count / 4 and state["moments"] > 0.9 * whole / count / 2
    grown = [(most - first) / 1e6 for most, first in zip(after, before, strict=True)]
    assert max(grown) <= (whole / count + 3 * unit) / 1e6 + 150, grown
