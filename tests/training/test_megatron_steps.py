"""Steps of Megatron's ranks are those of one process without Megatron, however a step is cut and a policy divided."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from geo_sokoban_pipeline.config.grpo import GrpoOptions, OptimizerOptions
from geo_sokoban_pipeline.grpo.loss import GrpoObjective, SftObjective
from geo_sokoban_pipeline.policies.policy import Policy, freeze_parameters
from geo_sokoban_pipeline.training.backend import build_backend
from geo_sokoban_pipeline.training.backends.base import TrainBackend
from geo_sokoban_pipeline.training.backends.torch import TorchBackend
from geo_sokoban_pipeline.training.batch import TrainSample
from training.four_ranks import LAYOUTS, FourRanks, megatron_of
from training.setup import Setup, copied
from training.test_ranks_equal_one import KL, MEMORY, RATE, REDUCTIONS, Steps, compare_results, optimizer_options

pytestmark = pytest.mark.xdist_group("ranks")

slow = pytest.mark.slow

T1, T2, T2S, D2 = "tensor 1", "tensor 2", "tensor 2, sequence", "data 2"
T2D2, T2D2S = "tensor 2 x data 2", "tensor 2 x data 2, sequence"
# The smallest in which ranks hold parts of some weights and copies of others, and each has a summand of some gradients.
QUICK = (T2, "muon", "sample_mean", "no kl", "text", "logits")
CASES = [
    (T1, "muon", "token_mean", "kl", "mixed", "vision"),
    (T1, "adamw", "constant", "no kl", "boards", "offload"),
    (T2, "adamw", "token_mean", "no kl", "boards", "micro-batches"),
    (T2, "muon", "constant", "kl", "diagrams", "checkpointing"),
    QUICK,
    (T2, "adamw", "sample_mean", "kl", "one", "offload"),
    (T2S, "muon", "token_mean", "kl", "boards", "checkpointing"),
    (T2S, "adamw", "constant", "no kl", "mixed", "micro-batches"),
    (T2S, "muon", "sample_mean", "no kl", "diagrams", "vision"),
    (D2, "muon", "constant", "kl", "uneven", "micro-batches"),
    (D2, "adamw", "sample_mean", "no kl", "one", "checkpointing"),
    (T2D2, "muon", "token_mean", "no kl", "diagrams", "logits"),
    (T2D2, "muon", "constant", "kl", "boards", "offload"),
    (T2D2, "adamw", "sample_mean", "kl", "uneven", "vision"),
    (T2D2, "muon", "sample_mean", "no kl", "text", "micro-batches"),
    (T2D2S, "muon", "token_mean", "kl", "one", "plain"),
    (T2D2S, "adamw", "constant", "no kl", "mixed", "checkpointing"),
]


def take_steps(backend: TrainBackend, samples: list[TrainSample], grpo: dict[str, Any]) -> Steps:
    scores = np.concatenate(backend.log_probs(samples))
    rows = [backend.step(samples, GrpoObjective(GrpoOptions(**grpo)), RATE) for _ in range(3)]
    return Steps(rows, [], scores, {name: weight.detach().clone() for name, weight in backend.weight_source().read()})


@pytest.fixture(scope="module")
def reference(splittable: Policy, batches: dict[str, list[TrainSample]]) -> Any:
    """Steps of one process without Megatron, each made once."""

    @cache
    def made(batch: str, matrices: Any, reduction: str, kl: str) -> Steps:
        grpo = {"reduction": reduction, **REDUCTIONS[reduction], **KL[kl]}
        backend = TorchBackend(copied(splittable), optimizer_options(matrices), 0.9)
        return take_steps(backend, batches[batch], grpo)

    return made


@pytest.mark.parametrize(
    "case", [pytest.param(case, id=", ".join(case), marks=[] if case == QUICK else slow) for case in CASES]
)
def test_steps_are_those_of_one_process(
    four_ranks: FourRanks,
    splittable: Policy,
    batches: dict[str, list[TrainSample]],
    reference: Any,
    tmp_path: Path,
    case: tuple[str, ...],
) -> None:
    layout, matrices, reduction, kl, batch, memory = case
    grpo = {"reduction": reduction, **REDUCTIONS[reduction], **KL[kl]}
    policy = copied(splittable)
    with four_ranks.group(policy, layout) as workers:
        options = optimizer_options(matrices, **MEMORY[memory])
        backend = build_backend(policy, options, 0.9, workers, megatron_of(layout))
        found = take_steps(backend, batches[batch], grpo)
        backend.export(tmp_path)  # it compares the copies of what ranks hold alike
        backend.renew()
        backend.close()
    compare_results(found, reference(batch, matrices, reduction, kl))
    for name, weight in policy.model.named_parameters():
        assert torch.equal(weight, found.weights[name]), f"the engine has the trained {name}"


@pytest.mark.parametrize("layout", [T2, pytest.param(T2D2, marks=slow)])
def test_sft_counts_each_sample_once(
    four_ranks: FourRanks, splittable: Policy, batches: dict[str, list[TrainSample]], layout: str
) -> None:
    alone = TorchBackend(copied(splittable), optimizer_options("muon"))
    expected = alone.step(batches["boards"], SftObjective(), RATE)
    policy = copied(splittable)
    with four_ranks.group(policy, layout) as workers:
        backend = build_backend(policy, optimizer_options("muon"), workers=workers)
        found = backend.step(batches["boards"], SftObjective(), RATE)
    assert found == pytest.approx(expected, rel=1e-6)


FROZEN = ("visual", "language_model.embed_tokens", "language_model.layers.0")


@slow
def test_frozen_parts_stay_and_a_part_of_a_fused_matrix_is_refused(
    four_ranks: FourRanks, splittable: Policy, batches: dict[str, list[TrainSample]], setup: Setup
) -> None:
    chosen = setup.options.policy.model_copy(update={"freeze": FROZEN})
    alone = copied(splittable)
    freeze_parameters(alone.model, FROZEN)
    expected = take_steps(TorchBackend(alone, optimizer_options("muon"), 0.9), batches["boards"], {})
    policy = copied(splittable)
    freeze_parameters(policy.model, FROZEN)
    with four_ranks.group(policy, T2, chosen) as workers:
        backend = build_backend(policy, optimizer_options("muon"), 0.9, workers)
        compare_results(take_steps(backend, batches["boards"], {}), expected)
    for name, weight in splittable.model.named_parameters():
        if name.startswith(tuple(f"model.{part}" for part in FROZEN)):
            assert torch.equal(expected.weights[name], weight), name
    part = copied(splittable)
    freeze_parameters(part.model, ["language_model.layers.1.self_attn.q_proj"])
    with pytest.raises(ValueError, match=r"layers\.1\.self_attn\.q_proj\.weight.* are one parameter there"):
        build_backend(part, OptimizerOptions(), megatron=megatron_of(T1))


@slow
@pytest.mark.parametrize("layout", [T1, T2, T2S])
def test_products_in_bfloat16_over_float32_weights(
    four_ranks: FourRanks, splittable: Policy, batches: dict[str, list[TrainSample]], setup: Setup, layout: str
) -> None:
    """As far from one process as that is from products in float32."""
    samples, chosen = batches["boards"], setup.options.policy.model_copy(update={"compute": "bfloat16"})
    rows, scores = {}, {}
    for name in ("float32", "bfloat16", layout):
        policy = copied(splittable)
        policy.compute = None if name == "float32" else "bfloat16"
        with four_ranks.group(policy, name if name in LAYOUTS else "one process", chosen) as workers:
            megatron = megatron_of(name) if name in LAYOUTS else None
            backend: Any = build_backend(policy, optimizer_options("adamw"), 0.9, workers, megatron)
            scores[name] = np.concatenate(backend.log_probs(samples))
            rows[name] = backend.step(samples, GrpoObjective(GrpoOptions()), RATE)
            kinds = {weight.dtype for _, weight in backend.weight_source().read()}
        assert kinds == {torch.float32}
    gap = np.abs(scores["bfloat16"] - scores["float32"])
    found = np.abs(scores[layout] - scores["float32"])
    assert 1e-4 < found.mean() <= 1.5 * gap.mean() and found.max() <= 2 * gap.max()
    assert rows[layout]["loss"] == pytest.approx(rows["float32"]["loss"], abs=0.01)
    assert rows[layout]["grad_norm"] == pytest.approx(rows["float32"]["grad_norm"], rel=0.05)
