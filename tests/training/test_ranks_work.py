"""What a sharded step does beside its result: collectives are counted, and so is what the optimizer holds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from geo_sokoban_pipeline.config.grpo import GrpoOptions, OptimizerOptions
from geo_sokoban_pipeline.distributed.slices import own_part
from geo_sokoban_pipeline.grpo.loss import GrpoObjective
from geo_sokoban_pipeline.policies.tiny import build_tiny_policy
from geo_sokoban_pipeline.training.backend import RankedBackend, build_backend
from geo_sokoban_pipeline.training.backends import optim
from geo_sokoban_pipeline.training.batch import TrainSample
from geo_sokoban_pipeline.training.worker_group import WorkerGroup
from open_workers import apply, apply_on_all
from task_options import TinyPolicyOptions
from training.four_ranks import FourRanks, MovingBackend, move_for_real
from training.live_bytes import LiveBytes
from training.setup import SIZES, Setup, copied

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("ranks")]

OBJECTIVE = GrpoObjective(GrpoOptions())


class Collectives(TorchDispatchMode):
    """Counts the collectives of a thread by name; torch's own fails where modules are called in parts."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "c10d" in function.namespace:
            self.counts[function.name()] += 1
        return function(*args, **(kwargs or {}))


@contextmanager
def counted(workers: WorkerGroup | None) -> Iterator[Counter[str]]:
    """Collectives of rank 0, whose calls have a thread of their own, for the `with` block."""
    mode = Collectives()
    if workers is not None:
        apply(workers, lambda worker: start(mode))
    yield mode.counts
    if workers is not None:
        apply(workers, lambda worker: end(mode))


@pytest.mark.parametrize("micro_batches", [1, 4, 16])
def test_a_step_reduces_each_unit_once(
    four_ranks: FourRanks, setup: Setup, batches: dict[str, list[TrainSample]], micro_batches: int
) -> None:
    policy, sample = copied(setup.trained), batches["boards"][0]
    options = OptimizerOptions(max_tokens=16 // micro_batches * sample.length)
    counts = []
    with four_ranks.group(policy, "two shards") as workers:
        assert workers is not None
        backend = RankedBackend(policy, options, 0.9, workers)
        for _ in range(2):
            with counted(workers) as collectives:
                backend.step([sample] * 32, OBJECTIVE, 1e-3)  # 16 on each rank
            counts.append(collectives)
    units = policy.model.config.text_config.num_hidden_layers + 2
    for found in counts:
        assert [count for name, count in found.items() if "reduce_scatter" in name] == [units], found
        # Each pass gathers the weights, so this is not the count of a step that did nothing.
        assert sum(count for name, count in found.items() if "gather" in name) > micro_batches


def test_gradients_are_shared_out_after_each_micro_batch(
    four_ranks: FourRanks, setup: Setup, batches: dict[str, list[TrainSample]]
) -> None:
    """With `gradient_sync=micro_batch`: as many sums as units and micro-batches, and the step of one process."""
    samples = batches["boards"]
    longest = max(sample.length for sample in samples)
    found = []
    for layout, sync in (("one process", "step"), ("two shards", "step"), ("two shards", "micro_batch")):
        policy = copied(setup.trained)
        options = OptimizerOptions(max_tokens=longest, vision_patches=40, eps=1e-5, gradient_sync=sync)
        with four_ranks.group(policy, layout) as workers:
            backend = build_backend(policy, options, 0.9, workers)
            with counted(workers) as collectives:
                metrics = backend.step(samples, OBJECTIVE, 1e-3)
            weights = {name: weight.clone() for name, weight in backend.weight_source().read()}
        sums = sum(count for name, count in collectives.items() if "reduce_scatter" in name)
        found.append((metrics, weights, sums))
    (metrics, weights, _), (_, _, once), (metrics_2, weights_2, often) = found
    units = setup.trained.model.config.text_config.num_hidden_layers + 2
    assert once == units and often > 2 * units
    assert metrics_2 == pytest.approx(metrics, rel=1e-6, abs=1e-6)
    for name, weight in weights.items():
        torch.testing.assert_close(weights_2[name], weight, rtol=0, atol=0.05 * 1e-3, msg=name)


@pytest.mark.parametrize("layout", ["one process", "two replicas", "two shards"])
@pytest.mark.parametrize("matrices", ["adamw", "muon"])
def test_a_backend_that_slept_goes_on_as_if_it_had_not(
    four_ranks: FourRanks, setup: Setup, batches: dict[str, list[TrainSample]], layout: str, matrices: Any
) -> None:
    """Bit for bit; its weights can be read meanwhile. Both memories are that of the CPU, and bytes move."""
    found = []
    for sleeps in (False, True):
        policy = copied(setup.trained)
        with four_ranks.group(policy, layout) as workers:
            backend = build_backend(policy, OptimizerOptions(matrices=matrices), 0.9, workers)
            if workers is not None:
                apply_on_all(workers, move_for_real)
            else:
                backend.__class__ = MovingBackend
            rows = []
            for _ in range(3):
                if sleeps:
                    backend.offload()
                weights = {name: weight.clone() for name, weight in backend.weight_source().read()}
                if sleeps:
                    backend.onload()
                rows.append(backend.step(batches["boards"], OBJECTIVE, 1e-3))
            found.append((rows, weights))
            backend.close()
    (rows, weights), (rows_2, weights_2) = found
    assert rows == rows_2
    assert all(torch.equal(weight, weights_2[name]) for name, weight in weights.items())


@pytest.mark.parametrize("layout", ["four shards", "two copies of two shards"])
def test_a_rank_holds_one_whole_matrix_at_a_time(
    four_ranks: FourRanks,
    batches: dict[str, list[TrainSample]],
    monkeypatch: pytest.MonkeyPatch,
    layout: str,
) -> None:
    # Many small matrices, so that all at once would be seen.
    sizes = {**SIZES, "layers": 12, "vision_hidden": 16}
    policy, size = (
        build_tiny_policy(TinyPolicyOptions.model_validate(sizes), seed=0),
        4 if layout == "four shards" else 2,
    )
    orthogonalise, whole = optim.orthogonalise, []

    def counted(matrix: Tensor) -> Tensor:
        whole.append(matrix.shape)
        return orthogonalise(matrix)

    monkeypatch.setattr(optim, "orthogonalise", counted)  # on this rank
    with four_ranks.group(policy, layout) as workers:
        assert workers is not None
        backend = RankedBackend(policy, OptimizerOptions(matrices="muon"), 0.9, workers)
        (muon,) = (one for one in backend.own.optimizers.in_force if isinstance(one, optim.Muon))
        live, matrices = LiveBytes(), [matrix for group in muon.param_groups for matrix in group["params"]]
        backend.step(batches["boards"], OBJECTIVE, 1e-3)  # makes the moments
        whole.clear()
        muon.register_step_pre_hook(lambda *_: start(live))
        muon.register_step_post_hook(lambda *_: end(live))
        backend.step(batches["boards"], OBJECTIVE, 1e-3)
    shapes = sorted((tuple(matrix.shape) for matrix in matrices), key=lambda shape: -shape[0] * shape[1])
    assert len(whole) == -(-len(shapes) // size), "each rank has its part of the work"
    shards = sum(own_part(matrix).nbytes for matrix in matrices)
    largest = 4 * shapes[0][0] * shapes[0][1]
    # The momentum's shards; of one matrix: rows from all ranks, the result, and what the iteration makes.
    assert live.peak <= shards + 8 * largest < size * shards


def start(mode: TorchDispatchMode) -> None:
    mode.__enter__()


def end(mode: TorchDispatchMode) -> None:
    mode.__exit__(None, None, None)
