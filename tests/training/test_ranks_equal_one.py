"""N ranks compute what one does, with copies of the weights or shards of them, however a step is cut."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import combinations, product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from geo_sokoban_pipeline.config.grpo import GrpoOptions, OptimizerOptions
from geo_sokoban_pipeline.config.policy import PolicyOptions
from geo_sokoban_pipeline.distributed.slices import own_part
from geo_sokoban_pipeline.grpo.loss import GrpoObjective
from geo_sokoban_pipeline.policies.policy import Policy, freeze_parameters
from geo_sokoban_pipeline.training.backend import RankedBackend, build_backend
from geo_sokoban_pipeline.training.backends.base import TrainBackend
from geo_sokoban_pipeline.training.backends.torch import TorchBackend
from geo_sokoban_pipeline.training.batch import TrainSample
from geo_sokoban_pipeline.training.sharding import StepCost, shard_samples
from open_workers import apply
from policies.mixtures import build_mixture
from training.four_ranks import FourRanks, keep_gradients, megatron_of, watch_gradients
from training.setup import Setup, adapted, copied

pytestmark = pytest.mark.xdist_group("ranks")

slow = pytest.mark.slow

RATE = 1e-3
REPLICAS_2, REPLICAS_4, SHARDS_2, SHARDS_4 = "two replicas", "four replicas", "two shards", "four shards"
COPIES_2, HYBRID_4 = "two copies of one shard", "two copies of two shards"
TENSOR_2 = "tensor 2"  # Megatron's; test_megatron_steps.py has its table
# Parts into which a layout splits the weights.
SHARDS = {REPLICAS_2: 1, REPLICAS_4: 1, SHARDS_2: 2, SHARDS_4: 4, COPIES_2: 1, HYBRID_4: 2}
REDUCTIONS: dict[str, dict[str, Any]] = {
    "token_mean": {},
    "sample_mean": {},
    "constant": {"constant_denominator": 40.0, "entropy_coefficient": 0.01},
}
KL: dict[str, dict[str, Any]] = {"kl": {"kl_coefficient": 0.1}, "no kl": {}}
RECOMPUTE = {"old_log_probs": "recompute"}
LOSSES: tuple[dict[str, Any], ...] = (
    {"loss": "ppo"},
    {"loss": "gspo", "loss_args": {"per": "turn"}},
    {"loss": "cispo", "importance": "truncated", "importance_args": {"level": "sequence"}, **RECOMPUTE},
    {"loss": "sapo", "importance": "masked", "importance_args": {"level": "geometric", "per": "turn"}, **RECOMPUTE},
    {"loss": "gmpo"},
)
BATCHES = ("boards", "diagrams", "uneven", "one", "mixed", "text")
# What bounds memory and changes no result; ranks then make other numbers of micro-batches and of passes of the tower.
MEMORY: dict[str, dict[str, Any]] = {
    "plain": {},
    "micro-batches": {"max_tokens": 500},
    "checkpointing": {"gradient_checkpointing": True},
    "vision": {"vision_patches": 40},
    "logits": {"logit_chunk": 3},
    "offload": {"offload": True},
}
CHOICES = (tuple(SHARDS), ("adamw", "muon"), tuple(REDUCTIONS), tuple(KL), BATCHES, tuple(MEMORY))
# The quick one: samples of unequal lengths on the two ranks of the default run, with every kind of sum.
QUICK = (REPLICAS_2, "muon", "token_mean", "kl", "uneven", "plain")
CASES = [
    QUICK,
    (REPLICAS_2, "adamw", "sample_mean", "no kl", "boards", "checkpointing"),
    (REPLICAS_2, "adamw", "token_mean", "no kl", "diagrams", "vision"),
    (REPLICAS_2, "muon", "constant", "kl", "diagrams", "micro-batches"),
    (REPLICAS_2, "muon", "sample_mean", "no kl", "one", "logits"),
    (REPLICAS_2, "muon", "constant", "kl", "mixed", "logits"),
    (REPLICAS_2, "muon", "sample_mean", "no kl", "text", "plain"),
    (REPLICAS_4, "adamw", "sample_mean", "no kl", "boards", "logits"),
    (REPLICAS_4, "muon", "sample_mean", "no kl", "diagrams", "plain"),
    (REPLICAS_4, "adamw", "constant", "no kl", "uneven", "checkpointing"),
    (REPLICAS_4, "adamw", "token_mean", "no kl", "one", "micro-batches"),
    (REPLICAS_4, "adamw", "sample_mean", "no kl", "mixed", "vision"),
    (REPLICAS_4, "muon", "token_mean", "kl", "text", "logits"),
    (SHARDS_2, "adamw", "sample_mean", "no kl", "boards", "micro-batches"),
    (SHARDS_2, "muon", "token_mean", "kl", "diagrams", "offload"),
    (SHARDS_2, "muon", "constant", "no kl", "uneven", "logits"),
    (SHARDS_2, "adamw", "token_mean", "kl", "one", "vision"),
    (SHARDS_2, "muon", "constant", "kl", "mixed", "plain"),
    (SHARDS_2, "muon", "token_mean", "no kl", "text", "checkpointing"),
    (SHARDS_4, "muon", "token_mean", "kl", "boards", "vision"),
    (SHARDS_4, "muon", "constant", "no kl", "diagrams", "checkpointing"),
    (SHARDS_4, "adamw", "sample_mean", "kl", "uneven", "vision"),
    (SHARDS_4, "adamw", "constant", "no kl", "one", "plain"),
    (SHARDS_4, "adamw", "token_mean", "no kl", "mixed", "offload"),
    (SHARDS_4, "adamw", "sample_mean", "no kl", "text", "logits"),
    (SHARDS_4, "adamw", "token_mean", "kl", "text", "micro-batches"),
    (COPIES_2, "adamw", "constant", "kl", "boards", "offload"),
    (COPIES_2, "muon", "token_mean", "no kl", "diagrams", "logits"),
    (COPIES_2, "muon", "sample_mean", "no kl", "uneven", "offload"),
    (COPIES_2, "muon", "token_mean", "kl", "one", "checkpointing"),
    (COPIES_2, "adamw", "constant", "no kl", "mixed", "vision"),
    (COPIES_2, "muon", "sample_mean", "kl", "mixed", "micro-batches"),
    (COPIES_2, "adamw", "constant", "kl", "text", "plain"),
    (HYBRID_4, "adamw", "constant", "no kl", "boards", "plain"),
    (HYBRID_4, "muon", "sample_mean", "no kl", "diagrams", "vision"),
    (HYBRID_4, "adamw", "token_mean", "kl", "uneven", "micro-batches"),
    (HYBRID_4, "muon", "token_mean", "kl", "one", "offload"),
    (HYBRID_4, "adamw", "sample_mean", "kl", "mixed", "checkpointing"),
    (HYBRID_4, "muon", "constant", "no kl", "text", "logits"),
    (HYBRID_4, "adamw", "constant", "kl", "text", "offload"),
]


def options_of(case: tuple[str, ...]) -> dict[str, Any]:
    """Options of GRPO in a case; the losses take turns, so that each meets every layout."""
    layout, _, reduction, kl, batch, _ = case
    loss = LOSSES[(list(SHARDS).index(layout) + BATCHES.index(batch)) % len(LOSSES)]
    return {"reduction": reduction, **REDUCTIONS[reduction], **KL[kl], **loss}


def exists(case: tuple[str, ...]) -> bool:
    """Whether there is such a case: replicas have nothing to offload, and text has no images to cut."""
    layout, *_, batch, memory = case
    return not (memory == "offload" and "replicas" in layout) and not (memory == "vision" and batch == "text")


def test_every_two_choices_meet_in_a_case() -> None:
    def pairs(cases: Any) -> set[Any]:
        return {pair for case in cases for pair in combinations(enumerate(case), 2)}

    assert pairs(CASES) == pairs(filter(exists, product(*CHOICES)))
    met = {(case[0], options_of(case)["loss"]) for case in CASES}
    assert met == set(product(SHARDS, [str(loss["loss"]) for loss in LOSSES]))


@dataclass
class Steps:
    """Three steps of a backend.

    Attributes:
        names: of the gradients of a step, where they are known.
        scores: log-probs before them.
    """

    rows: list[dict[str, float]]
    gradients: list[Tensor | None]
    scores: np.ndarray
    weights: dict[str, Tensor]
    names: list[str] = field(default_factory=list)

    @property
    def first_gradients(self) -> list[Tensor | None]:
        return self.gradients[: len(self.gradients) // len(self.rows)]


def take_steps(backend: TrainBackend, own: TorchBackend, samples: list[TrainSample], grpo: dict[str, Any]) -> Steps:
    gradients, scores = keep_gradients(own), np.concatenate(backend.log_probs(samples))
    rows = [backend.step(samples, GrpoObjective(GrpoOptions(**grpo)), RATE) for _ in range(3)]
    return Steps(
        rows, gradients, scores, {name: weight.detach().clone() for name, weight in backend.weight_source().read()}
    )


def alone(policy: Policy, samples: list[TrainSample], matrices: Any, grpo: dict[str, Any], **changes: Any) -> Steps:
    """One process, a step at once."""
    policy = copied(policy)
    backend = TorchBackend(policy, optimizer_options(matrices, **changes), 0.9)
    steps = take_steps(backend, backend, samples, grpo)
    names = {id(parameter): name for name, parameter in policy.model.named_parameters()}
    groups = [group for optimizer in backend.optimizers.in_force for group in optimizer.param_groups]
    steps.names = [names[id(parameter)] for group in groups for parameter in group["params"]]
    return steps


def together(
    four_ranks: FourRanks,
    policy: Policy,
    layout: str,
    samples: list[TrainSample],
    options: OptimizerOptions,
    grpo: dict[str, Any],
    chosen: PolicyOptions | None = None,
) -> Steps:
    policy = copied(policy)
    whole = sum(parameter.numel() for parameter in policy.model.parameters())
    with four_ranks.group(policy, layout, chosen) as workers:
        assert workers is not None
        backend = build_backend(policy, options, 0.9, workers)
        assert isinstance(backend, RankedBackend)
        groups = [group for optimizer in backend.own.optimizers.in_force for group in optimizer.param_groups]
        held = sum(own_part(weight).numel() for group in groups for weight in group["params"])
        assert held <= 1.05 * whole / SHARDS[layout], "rank 0 holds its part"
        apply(workers, lambda _: None, *[watch_gradients] * (workers.size - 1))
        return take_steps(backend, backend.own, samples, grpo)


def optimizer_options(matrices: Any, **changes: Any) -> OptimizerOptions:
    # A larger epsilon: moments near 0 would turn the rounding of two sums into steps of full size.
    return OptimizerOptions(**{"matrices": matrices, "eps": 1e-5, "clip": 0.3, **changes})


def compare(found: Steps, expected: Steps) -> None:
    compare_results(found, expected)
    norm = torch.stack([gradient.norm() for gradient in expected.first_gradients if gradient is not None]).norm()
    for name, one, other in zip(expected.names, found.first_gradients, expected.first_gradients, strict=True):
        if one is None or other is None:
            assert one is other, name
        else:
            assert (one - other).norm() <= 1e-5 * norm, name


def compare_results(found: Steps, expected: Steps) -> None:
    """Compare all but the gradients."""
    assert found.rows[0] == pytest.approx(expected.rows[0], rel=1e-6, abs=1e-6)
    for row, wanted in zip(found.rows[1:], expected.rows[1:], strict=True):
        # These are of weights that differ by a few thousandths of the learning rate.
        assert row == pytest.approx(wanted, rel=2e-5, abs=2e-6)
    np.testing.assert_allclose(found.scores, expected.scores, atol=1e-5)
    assert list(found.weights) == list(expected.weights)
    for name, weight in expected.weights.items():
        torch.testing.assert_close(found.weights[name], weight, rtol=0, atol=0.05 * RATE, msg=name)


@pytest.fixture(scope="module")
def reference(setup: Setup, batches: dict[str, list[TrainSample]]) -> Any:
    """Steps of one process, each made once."""

    @cache
    def made(batch: str, matrices: str, grpo: str) -> Steps:
        return alone(setup.trained, batches[batch], matrices, json.loads(grpo))

    return made


@pytest.mark.parametrize(
    "case", [pytest.param(case, id=", ".join(case), marks=[] if case == QUICK else slow) for case in CASES]
)
def test_steps_of_ranks_are_those_of_one(
    four_ranks: FourRanks,
    setup: Setup,
    batches: dict[str, list[TrainSample]],
    reference: Any,
    case: tuple[str, ...],
) -> None:
    layout, matrices, _, _, batch, memory = case
    grpo = options_of(case)
    options = optimizer_options(matrices, **MEMORY[memory])
    first, second = (together(four_ranks, setup.trained, layout, batches[batch], options, grpo) for _ in range(2))
    compare(first, reference(batch, matrices, json.dumps(grpo)))
    assert first.rows == second.rows
    assert all(torch.equal(weight, second.weights[name]) for name, weight in first.weights.items()), "equal bits"


@slow
@pytest.mark.parametrize(
    ("layout", "memory"), [(REPLICAS_2, "plain"), (SHARDS_4, "checkpointing"), (HYBRID_4, "micro-batches")]
)
def test_mixtures_of_experts_do_too(
    four_ranks: FourRanks, setup: Setup, batches: dict[str, list[TrainSample]], layout: str, memory: str
) -> None:
    policy, grpo = build_mixture(setup.policy), {"reduction": "token_mean", "kl_coefficient": 0.1}
    expected = alone(policy, batches["boards"], "adamw", grpo)
    options = optimizer_options("adamw", **MEMORY[memory])
    compare(together(four_ranks, policy, layout, batches["boards"], options, grpo), expected)
    gradients = dict(zip(expected.names, expected.first_gradients, strict=True))
    routers = [gradient for name, gradient in gradients.items() if name.endswith("mlp.gate.weight")]
    assert routers and all(gradient is not None and gradient.norm() > 0 for gradient in routers)


@slow
@pytest.mark.parametrize("layout", [REPLICAS_2, SHARDS_2, HYBRID_4, TENSOR_2])
@pytest.mark.parametrize("place", [0, -1], ids=["the first", "the last"])
def test_all_ranks_skip_a_step_in_which_one_has_no_finite_gradient(
    four_ranks: FourRanks,
    splittable: Policy,
    batches: dict[str, list[TrainSample]],
    tmp_path: Path,
    layout: str,
    place: int,
) -> None:
    """Nothing moves, and the next step is that of a backend that never saw the bad one."""
    samples, size = batches["boards"], {HYBRID_4: 4, TENSOR_2: 1}.get(layout, 2)
    bad = shard_samples(samples, size, StepCost.of(splittable.model.config))[place][0]
    poisoned = list(samples)
    poisoned[bad] = replace(samples[bad], advantages=np.full_like(samples[bad].advantages, np.nan))
    grpo: dict[str, Any] = {"reduction": "token_mean"}
    expected = alone(splittable, samples, "adamw", grpo)
    policy = copied(splittable)
    before = {name: weight.detach().clone() for name, weight in policy.model.named_parameters()}
    with four_ranks.group(policy, layout) as workers:
        backend = build_backend(policy, optimizer_options("adamw"), 0.9, workers, megatron_of(layout))
        row = backend.step(poisoned, GrpoObjective(GrpoOptions(**grpo)), RATE)
        assert row["skipped"] == 1.0 and not np.isfinite(row["grad_norm"])
        assert all(torch.equal(weight, before[name]) for name, weight in backend.weight_source().read())
        for wanted in expected.rows:
            found = backend.step(samples, GrpoObjective(GrpoOptions(**grpo)), RATE)
            assert found == pytest.approx(wanted, rel=2e-5, abs=2e-6) and found["skipped"] == 0.0
        for name, weight in backend.weight_source().read():
            torch.testing.assert_close(weight, expected.weights[name], rtol=0, atol=0.05 * RATE, msg=name)
        backend.export(tmp_path)  # compares the copies


@slow
@pytest.mark.parametrize(
    ("layout", "batch"),
    [
        *((layout, "boards") for layout in (REPLICAS_2, SHARDS_2, HYBRID_4)),
        # Micro-batches without an image beside others with one: units reduce their gradients in one order.
        (SHARDS_2, "mixed"),
    ],
)
def test_products_in_bfloat16_leave_weights_and_sums_in_float32(
    four_ranks: FourRanks, setup: Setup, batches: dict[str, list[TrainSample]], layout: str, batch: str
) -> None:
    """The gap to one process is less than the gap of both to products in float32."""
    samples, grpo = batches[batch], {"reduction": "token_mean"}
    chosen = setup.options.policy.model_copy(update={"compute": "bfloat16"})
    whole = with_own_head(setup.trained) if batch == "mixed" else setup.trained
    exact = alone(whole, samples, "adamw", grpo)
    policy = replace(whole, compute="bfloat16")
    one = alone(policy, samples, "adamw", grpo)
    found = together(four_ranks, policy, layout, samples, optimizer_options("adamw"), grpo, chosen)
    assert {weight.dtype for weight in found.weights.values()} == {torch.float32}
    assert {gradient.dtype for gradient in found.gradients if gradient is not None} == {torch.float32}
    assert 1e-4 < gap(one, exact) < 0.1
    assert gap(found, one) < gap(one, exact)
    assert abs(found.rows[-1]["loss"] - one.rows[-1]["loss"]) < 0.01


@slow
@pytest.mark.parametrize("has_own_head", [False, True])
@pytest.mark.parametrize("layout", [SHARDS_2, HYBRID_4])
def test_gathers_in_bfloat16_are_as_good_as_one_process(
    four_ranks: FourRanks, setup: Setup, batches: dict[str, list[TrainSample]], layout: str, has_own_head: bool
) -> None:
    """As near to one process as this is to itself under two sizes of micro-batches; sums in bfloat16 round more."""
    whole = with_own_head(setup.trained) if has_own_head else setup.trained
    policy, samples, grpo = replace(whole, compute="bfloat16"), batches["boards"], {}
    chosen = setup.options.policy.model_copy(update={"compute": "bfloat16"})
    one = alone(policy, samples, "adamw", grpo)
    length = max(sample.length for sample in samples)
    sizes = [one, *(alone(policy, samples, "adamw", grpo, max_tokens=count * length) for count in (1, 2, 5))]
    found, rounded = (
        together(four_ranks, policy, layout, samples, optimizer_options("adamw", **sums), grpo, chosen)
        for sums in ({}, {"reduce_dtype": "bfloat16", "gradient_sync": "micro_batch"})
    )
    most = max(gap(*pair) for pair in combinations(sizes, 2))
    assert 0 < gap(found, one) <= most
    assert gap(found, one) < gap(rounded, one) <= 2 * most
    apart = max(np.abs(first.scores - other.scores).max() for first, other in combinations(sizes, 2))
    for steps in (found, rounded):
        assert np.abs(steps.scores - one.scores).max() <= apart
        assert {weight.dtype for weight in steps.weights.values()} == {torch.float32}


def with_own_head(policy: Policy) -> Policy:
    """The policy with an output head that is not its embeddings."""
    policy = copied(policy)
    policy.model.config.tie_word_embeddings = policy.model.config.text_config.tie_word_embeddings = False
    policy.model.lm_head.weight = torch.nn.Parameter(policy.model.lm_head.weight.detach().flip(0).clone())
    return policy


def gap(found: Steps, expected: Steps) -> float:
    """Difference of the gradients of a first step, as a share of their norm."""
    pairs = [
        (one, other)
        for one, other in zip(found.first_gradients, expected.first_gradients, strict=True)
        if one is not None and other is not None
    ]
    difference = torch.stack([(one - other).norm() for one, other in pairs]).norm()
    return float(difference / torch.stack([other.norm() for _, other in pairs]).norm())


@slow
@pytest.mark.parametrize(
    ("layout", "frozen", "batch"),
    [
        *product([REPLICAS_2, SHARDS_2, HYBRID_4], ["visual", "language_model"], ["boards"]),
        # Micro-batches without an image beside others with one, in which no gradient enters the language model.
        *product([SHARDS_2, HYBRID_4], ["language_model.embed_tokens", "language_model"], ["mixed"]),
        (SHARDS_2, "language_model.embed_tokens", "one"),
    ],
)
def test_frozen_parts_stay_as_they_are(
    four_ranks: FourRanks,
    setup: Setup,
    batches: dict[str, list[TrainSample]],
    layout: str,
    frozen: str,
    batch: str,
) -> None:
    samples, grpo = batches[batch], {"reduction": "sample_mean"}
    chosen = setup.options.policy.model_copy(update={"freeze": (frozen,)})
    policy = copied(setup.trained)
    freeze_parameters(policy.model, chosen.freeze)
    memory = MEMORY["micro-batches" if batch == "mixed" else "plain"]
    expected = alone(policy, samples, "muon", grpo, **memory)
    found = together(four_ranks, policy, layout, samples, optimizer_options("muon", **memory), grpo, chosen)
    compare(found, expected)
    before = dict(setup.trained.model.named_parameters())
    same, expected_same = (
        {name for name, weight in steps.weights.items() if torch.equal(weight, before[name])}
        for steps in (found, expected)
    )
    assert {name for name in before if name.startswith(f"model.{frozen}.")} <= same == expected_same < set(before)


@slow
@pytest.mark.parametrize(
    ("layout", "matrices", "batch", "memory"),
    [
        (REPLICAS_2, "adamw", "uneven", "plain"),
        (SHARDS_2, "muon", "boards", "micro-batches"),
        (SHARDS_4, "adamw", "mixed", "checkpointing"),
        (SHARDS_4, "muon", "one", "vision"),
        (COPIES_2, "adamw", "text", "plain"),
        (HYBRID_4, "adamw", "boards", "offload"),
    ],
)
def test_ranks_train_an_adapter_as_one_does(
    four_ranks: FourRanks,
    setup: Setup,
    batches: dict[str, list[TrainSample]],
    layout: str,
    matrices: str,
    batch: str,
    memory: str,
) -> None:
    """Two of four ranks hold no rows of A. The ranks give out the sum of base and product."""
    policy, grpo = adapted(setup.trained, is_fresh=False), {"reduction": "token_mean", "kl_coefficient": 0.1}
    samples, options = batches[batch], optimizer_options(matrices, **MEMORY[memory])
    expected = alone(policy, samples, matrices, grpo)
    first, second = (together(four_ranks, policy, layout, samples, options, grpo) for _ in range(2))
    compare(first, expected)
    assert all(torch.equal(weight, second.weights[name]) for name, weight in first.weights.items()), "equal bits"
    base = dict(setup.trained.model.named_parameters())
    assert list(first.weights) == list(base)
    moved = {name for name, weight in first.weights.items() if not torch.equal(weight, base[name])}
    assert moved == {f"{name.partition('.lora_')[0]}.weight" for name in expected.names}


@slow
@pytest.mark.parametrize("layout", [REPLICAS_2, SHARDS_2, HYBRID_4])
def test_frozen_weights_of_ranks_are_in_bfloat16(
    four_ranks: FourRanks, setup: Setup, batches: dict[str, list[TrainSample]], layout: str
) -> None:
    samples, grpo = batches["boards"], {"reduction": "token_mean"}
    chosen = setup.options.policy.model_copy(update={"compute": "bfloat16"})
    exact = alone(adapted(setup.trained, is_fresh=False), samples, "adamw", grpo)
    policy = adapted(replace(setup.trained, compute="bfloat16"), is_fresh=False)
    one = alone(policy, samples, "adamw", grpo)
    found = together(four_ranks, policy, layout, samples, optimizer_options("adamw"), grpo, chosen)
    assert {weight.dtype for weight in found.weights.values()} == {torch.float32}
    assert gap(found, one) < gap(one, exact) < 0.1
    assert abs(found.rows[-1]["loss"] - one.rows[-1]["loss"]) < 0.01


@slow
@pytest.mark.parametrize("layout", [REPLICAS_2, SHARDS_4])
def test_steps_with_the_default_epsilon(
    four_ranks: FourRanks, setup: Setup, batches: dict[str, list[TrainSample]], layout: str
) -> None:
    """AdamW turns the rounding of a gradient near 0 into a step of full size: few weights, and no metric, show it."""
    samples, grpo, eps = batches["boards"], {"reduction": "token_mean"}, OptimizerOptions().eps
    expected = alone(setup.trained, samples, "adamw", grpo, eps=eps)
    found = together(four_ranks, setup.trained, layout, samples, optimizer_options("adamw", eps=eps), grpo)
    for row, wanted in zip(found.rows, expected.rows, strict=True):
        assert row == pytest.approx(wanted, rel=1e-4, abs=1e-5)
    gaps = torch.cat([(found.weights[name] - weight).abs().flatten() for name, weight in expected.weights.items()])
    assert (gaps > 0.05 * RATE).float().mean() < 0.01
