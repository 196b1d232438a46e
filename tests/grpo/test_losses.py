"""Policy losses and importance rules: worked values and gradients, the papers' equations by loops, masked tokens."""

from __future__ import annotations

import math
from dataclasses import dataclass
from importlib import import_module

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from geo_sokoban_pipeline.config.estimators import ESTIMATORS
from geo_sokoban_pipeline.config.grpo import GrpoOptions
from geo_sokoban_pipeline.grpo.loss import GrpoObjective, StepSize, reduce_tokens, token_batch

# Two episodes of three and two trained tokens; the other cells hold numbers that would change every result.
NEW = torch.tensor([[-0.5, -0.6, -1, -2.1], [-0.5, -0.9, -1, -1]], dtype=torch.float64)
OLD = torch.tensor([[-1, -0.5, -9, -2], [-2, -0.3, -9, -9]], dtype=torch.float64)
ROLLOUT = torch.tensor([[-1.1, -0.45, -5, -2.8], [-2.02, -0.2, -5, -5]], dtype=torch.float64)
MASK = torch.tensor([[1, 1, 0, 1], [1, 1, 0, 0]]).bool()
PER_EPISODE = torch.tensor([[1.0], [-0.5]], dtype=torch.float64).expand(2, 4)
PER_TOKEN = torch.tensor([[1, 0.5, 9, -1], [-0.5, 0.25, 9, 9]], dtype=torch.float64)
TURNS = torch.tensor([[0, 0, 7, 1], [0, 0, 7, 7]])

DAPO, PPO = {}, {"clip_high": 0.2}
DUAL = {"dual_clip": 3.0}
TOKENS, SEQUENCES = ("token_mean", None), ("sample_mean", None)


def batch_of(new=NEW, old=OLD, rollout=ROLLOUT, advantages=PER_EPISODE, mask=MASK, turns=TURNS):
    return token_batch(new, old, rollout, advantages, mask, turns)


def function(kind, name):
    """A registered estimator, and the model of its options."""
    path, _, attribute = ESTIMATORS[kind][name].function.rpartition(".")
    module = import_module(f"geo_sokoban_pipeline.grpo.{path}")
    return getattr(module, attribute), ESTIMATORS[kind][name].arguments


def terms_of(name, batch, **options):
    call, arguments = function("loss", name)
    return call(batch, arguments(**options))


def weights_of(name, batch, **options):
    call, arguments = function("importance", name)
    return call(batch, arguments(**options))


def learn(name, options, reduction, rule="none", rule_options=None, **fields):
    """Loss of the two episodes, the gradient of their trained tokens, and that of the others."""
    new = NEW.clone().requires_grad_()
    batch = batch_of(new, **fields)
    terms, _ = terms_of(name, batch, **options)
    weights = weights_of(rule, batch, **(rule_options or {}))
    assert not weights.requires_grad
    loss = reduce_tokens(terms * weights, MASK, *reduction)
    (gradient,) = torch.autograd.grad(loss, new)
    return loss.item(), gradient[MASK].tolist(), gradient[~MASK].tolist()


@pytest.mark.parametrize(
    ("name", "options", "reduction", "expected", "gradient"),
    [
        # A weight of 1 is REINFORCE.
        ("cispo", {"low": 1, "high": 1}, TOKENS, 0.5, [-0.2, -0.2, -0.2, 0.1, 0.1]),
        ("ppo", PPO, TOKENS, -0.073766, [0, -0.180967, -0.180967, 0.448169, 0]),
        ("ppo", DAPO, TOKENS, -0.089766, [0, -0.180967, -0.180967, 0.448169, 0]),
        ("ppo", DUAL, TOKENS, -0.237935, [0, -0.180967, -0.180967, 0, 0]),
        # Reductions: of an episode, the sum of an episode's tokens, Dr. GRPO's constant of 2 × 8 tokens.
        ("ppo", DUAL, SEQUENCES, -0.039946, None),
        ("ppo", DUAL, ("constant", 2), -0.594837, None),
        ("ppo", DUAL, ("constant", 16), -0.074355, None),
        ("ppo", PPO, ("constant", 16), -0.023052, [0, -0.056552, -0.056552, 0.140053, 0]),
        ("gspo", {"clip_low": 0.2, "clip_high": 0.28}, SEQUENCES, -0.160507, [-0.184195] * 3 + [0.196039] * 2),
        ("gspo", {"clip_low": 0.2, "clip_high": 0.28}, TOKENS, -0.349440, None),
        ("gspo", {}, SEQUENCES, -0.108122, [0, 0, 0, 0.196039, 0.196039]),
        (
            "gspo",
            {"clip_low": 0.2, "clip_high": 0.28, "per": "turn"},
            SEQUENCES,
            -0.165862,
            [-0.203567, -0.203567, -0.150806, 0.196039, 0.196039],
        ),
        ("gspo", {"clip_low": 0.2, "clip_high": 0.28, "per": "turn"}, TOKENS, -0.355866, None),
        ("cispo", {}, TOKENS, 0.380007, [-0.329744, -0.180967, -0.180967, 0.448169, 0.054881]),
        ("cispo", {"high": 2}, TOKENS, 0.504091, [-0.329744, -0.180967, -0.180967, 0.2, 0.054881]),
        ("cispo", {"low": 0.8, "high": 1.2}, TOKENS, 0.476612, [-0.24, -0.180967, -0.180967, 0.12, 0.08]),
        ("sapo", {}, SEQUENCES, -0.425861, [-0.247790, -0.150465, -0.150465, 0.055026, 0.064892]),
        ("sapo", {}, TOKENS, -0.769803, None),
        ("gmpo", {}, SEQUENCES, -0.101156, [0, -0.178157, -0.178157, 0.216657, 0]),
        ("gmpo", {"clip": 0.2}, SEQUENCES, -0.021115, None),
    ],
)
def test_two_episodes(name, options, reduction, expected, gradient):
    loss, found, masked = learn(name, options, reduction)
    assert loss == pytest.approx(expected, rel=0, abs=5e-7)
    assert gradient is None or found == pytest.approx(gradient, rel=0, abs=5e-7)
    assert masked == [0.0, 0.0, 0.0]


@pytest.mark.parametrize(
    ("name", "options", "expected", "gradient"),
    [
        # Each token is trained for its own advantage.
        ("gspo", {"clip_low": 0.2, "clip_high": 0.28}, 0.023941, [-0.184195, -0.092098, 0.184195, 0.196039, 0]),
        # A sequence has one: the means of 1, 0.5 and -1, and of -0.5 and 0.25.
        ("gmpo", {}, 0.019250, [0, -0.029693, -0.029693, 0.054164, 0]),
    ],
)
def test_advantages_of_tokens_in_losses_of_sequences(name, options, expected, gradient):
    loss, found, _ = learn(name, options, SEQUENCES, advantages=PER_TOKEN)
    assert loss == pytest.approx(expected, rel=0, abs=5e-7)
    assert found == pytest.approx(gradient, rel=0, abs=5e-7)


TIS, IN_BOUNDS = {"cap": 2.0}, {"low": 0.5, "high": 2.0}


@pytest.mark.parametrize(
    ("rule", "options", "denominator", "expected", "gradient"),
    [
        ("none", {}, None, -0.089766, [0, -0.180967, -0.180967, 0.448169, 0]),
        ("truncated", TIS, None, -0.287391, [0, -0.172142, -0.361935, 0.457223, 0]),
        ("truncated", TIS | {"level": "sequence"}, None, -0.748309, [0, -0.361935, -0.361935, 0.413712, 0]),
        ("masked", IN_BOUNDS, None, 0.074544, [0, -0.172142, 0, 0.457223, 0]),
        ("masked", IN_BOUNDS, 4, 0.093180, None),  # if dropped tokens left the denominator
        ("masked", IN_BOUNDS | {"level": "sequence"}, None, 0.487561, [0, 0, 0, 0.413712, 0]),
        ("masked", IN_BOUNDS | {"level": "sequence"}, 2, 1.218903, None),
        ("masked", {"high": 3.0, "level": "sequence"}, None, -0.958188, None),
        ("masked", {"low": 0.99, "high": 1.01, "level": "geometric"}, None, 0, [0, 0, 0, 0, 0]),
    ],
)
def test_importance_rules(rule, options, denominator, expected, gradient):
    loss, found, masked = learn("ppo", DAPO, ("token_mean", denominator), rule, options)
    assert loss == pytest.approx(expected, rel=0, abs=5e-7)
    assert gradient is None or found == pytest.approx(gradient, rel=0, abs=5e-7)
    assert masked == [0.0, 0.0, 0.0]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, [1.105171, 0.951229, 2.225541, 1.020201, 0.904837]),
        ({"level": "sequence"}, [2.339647] * 3 + [0.923116] * 2),
        ({"level": "geometric"}, [1.327548] * 3 + [0.960789] * 2),
        # The first two tokens are one turn: log-ratios of 0.1 and -0.05; the third is another.
        ({"level": "sequence", "per": "turn"}, [math.exp(0.05)] * 2 + [2.225541] + [0.923116] * 2),
        ({"level": "geometric", "per": "turn"}, [math.exp(0.025)] * 2 + [2.225541] + [0.960789] * 2),
    ],
)
def test_levels_of_importance(options, expected):
    weights = weights_of("truncated", batch_of(), cap=3.0, **options)
    assert weights[MASK].tolist() == pytest.approx(expected, rel=0, abs=5e-7)


@pytest.mark.parametrize(("gap", "kept"), [(-1e-3, 0.0), (0.0, 1.0), (1e-3, 0.0)])
def test_bounds_belong_to_what_is_kept(gap, kept):
    batch = batch_of(old=NEW + gap, rollout=NEW)
    assert weights_of("masked", batch, low=1.0, high=1.0)[MASK].tolist() == [kept] * 5


@pytest.mark.parametrize(
    ("name", "options", "metric", "clipped"),
    [
        ("ppo", DAPO, "pg_clipfrac", [1, 0, 0, 0, 1]),
        ("ppo", DUAL, "dual_clipfrac", [0, 0, 0, 1, 0]),
        ("gspo", {}, "pg_clipfrac", [1, 1, 1, 0, 0]),
        ("cispo", {"low": 0.6, "high": 2.0}, "pg_clipfrac", [0, 0, 0, 1, 1]),
        ("gmpo", {}, "pg_clipfrac", [1, 0, 0, 0, 1]),
    ],
)
def test_clipped_tokens_are_counted(name, options, metric, clipped):
    _, metrics = terms_of(name, batch_of(), **options)
    assert metrics[metric][MASK].tolist() == clipped
    assert not metrics[metric][~MASK].any()


# Every loss with the options under which its equation is compared.
LOSSES = [
    ("ppo", DAPO),
    ("ppo", DUAL),
    ("gspo", {"clip_low": 0.2, "clip_high": 0.28}),
    ("gspo", {"clip_low": 0.2, "clip_high": 0.28, "per": "turn"}),
    ("cispo", {"low": 0.8, "high": 1.5}),
    ("sapo", {}),
    ("gmpo", {}),
    ("gmpo", {"per": "turn"}),
]


def test_every_loss_is_tested():
    assert {name for name, _ in LOSSES} == set(ESTIMATORS["loss"])


def surrogate(ratio, advantage, low, high):
    return -min(ratio * advantage, min(max(ratio, 1 - low), 1 + high) * advantage)


def loss_of_the_paper(name, options, new, old, advantage):
    """Mean over the tokens of one sequence, from scalars with a graph."""
    count, changes = len(new), [one - other for one, other in zip(new, old, strict=True)]
    ratios = [change.exp() for change in changes]
    if name == "ppo":
        terms = [surrogate(ratio, advantage, 0.2, 0.28) for ratio in ratios]
        if options and advantage < 0:
            terms = [min(term, -3.0 * advantage) for term in terms]
        return sum(terms) / count
    if name == "gspo":
        return surrogate((sum(changes) / count).exp(), advantage, 0.2, 0.28)
    if name == "cispo":
        weights = [min(max(ratio.item(), 0.8), 1.5) for ratio in ratios]
        return -sum(weight * advantage * one for weight, one in zip(weights, new, strict=True)) / count
    if name == "sapo":
        tau = 1.0 if advantage > 0 else 1.05
        return -sum(advantage * (4 / tau) / (1 + (-tau * (ratio - 1)).exp()) for ratio in ratios) / count
    clipped = [min(change, 0.4) if advantage > 0 else max(change, -0.4) for change in changes]
    return -advantage * (sum(clipped) / count + torch.zeros((), dtype=torch.float64)).exp()


def random_batch(rows, columns, seed):
    """Log-probs before and after, one advantage per row, a mask, and turns in order."""
    generator = torch.Generator().manual_seed(seed)
    new, old, rollout = (-2 * torch.rand(rows, columns, generator=generator, dtype=torch.float64) for _ in range(3))
    mask = torch.rand(rows, columns, generator=generator) < 0.7
    turns = torch.randint(0, 2, (rows, columns), generator=generator).cumsum(1)
    advantages = torch.randn(rows, 1, generator=generator, dtype=torch.float64).expand(rows, columns)
    return {"new": new, "old": old, "rollout": rollout, "advantages": advantages, "mask": mask, "turns": turns}


BATCHES = st.builds(random_batch, st.integers(1, 4), st.integers(1, 7), st.integers(0, 10**6))


@pytest.mark.parametrize(("name", "options"), LOSSES)
@settings(max_examples=40, deadline=None)
@given(fields=BATCHES)
def test_the_equation_of_the_paper(name, options, fields):
    """Values and gradients, summed over sequences with unequal weights."""
    new = fields["new"].requires_grad_()
    terms, _ = terms_of(name, batch_of(**fields), **options)
    found, wanted = 0.0 * new.sum(), 0.0 * new.sum()
    for row, kept in enumerate(fields["mask"]):
        own = fields["turns"][row] if options.get("per") == "turn" else torch.zeros_like(fields["turns"][row])
        for number in set(own[kept].tolist()):
            places = (kept & (own == number)).nonzero().flatten().tolist()
            weight = row + 2.0 * number + 1.0
            found = found + weight * terms[row, places].mean()
            values = [new[row, place] for place in places], fields["old"][row, places].tolist()
            wanted = wanted + weight * loss_of_the_paper(name, options, *values, fields["advantages"][row, 0].item())
    assert found.item() == pytest.approx(wanted.item(), rel=1e-12, abs=1e-12)
    gradients = [torch.autograd.grad(value, new)[0] for value in (found, wanted)]
    torch.testing.assert_close(*gradients, rtol=1e-10, atol=1e-12)
    assert not gradients[0][~fields["mask"]].any()


@pytest.mark.parametrize(("name", "options"), LOSSES)
@settings(max_examples=40, deadline=None)
@given(fields=BATCHES)
def test_before_any_update_the_gradient_is_that_of_reinforce(name, options, fields):
    new = fields["new"].requires_grad_()
    batch = batch_of(**fields | {"old": new.detach()})
    terms, metrics = terms_of(name, batch, **options)
    (gradient,) = torch.autograd.grad(terms.sum(), new)
    torch.testing.assert_close(gradient, -batch.advantages, rtol=1e-10, atol=1e-12)
    assert not any(value.any() for value in metrics.values())


RULES = [
    ("none", {}),
    *(
        (name, {"level": level, "per": per})
        for name in ("truncated", "masked")
        for level in ("token", "sequence", "geometric")
        for per in ("episode", "turn")
    ),
]


@pytest.mark.parametrize(("name", "options"), RULES)
def test_where_trainer_and_engine_agree_weights_are_one(name, options):
    batch = batch_of(rollout=OLD)
    assert torch.equal(weights_of(name, batch, **options)[MASK], torch.ones(5, dtype=torch.float64))


@pytest.mark.parametrize("junk", [-1e4, math.inf, -math.inf, math.nan])
@pytest.mark.parametrize(("name", "options"), LOSSES)
def test_masked_tokens_touch_nothing(name, options, junk):
    """Neither what they hold nor how many they are."""

    def run(fields, mask):
        new = fields["new"].clone().requires_grad_()
        batch = batch_of(**fields | {"new": new, "mask": mask})
        terms, metrics = terms_of(name, batch, **options)
        assert not terms[~mask].any()
        weights = [weights_of(rule, batch, **others) for rule, others in RULES]
        (gradient,) = torch.autograd.grad(terms.sum(), new)
        assert not gradient[~mask].any()
        return [part[mask] for part in (terms, gradient, *weights, *metrics.values())]

    fields = {"new": NEW, "old": OLD, "rollout": ROLLOUT, "advantages": PER_TOKEN, "turns": TURNS}
    wider = {key: torch.cat([value, value[:, :2]], dim=1) for key, value in fields.items()}
    mask = torch.cat([MASK, torch.zeros(2, 2).bool()], dim=1)
    dirty = {key: value.masked_fill(~mask, 3 if key == "turns" else junk) for key, value in wider.items()}
    for one, other in zip(run(fields, MASK), run(dirty, mask), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-14, atol=0)


@pytest.mark.parametrize("advantage", [1.0, -1.0])
@pytest.mark.parametrize("gap", [-1e4, -100.0, 100.0, 1e4])
@pytest.mark.parametrize(("name", "options"), LOSSES)
def test_exploding_ratios_give_finite_gradients(name, options, gap, advantage):
    new = torch.tensor([[gap, -1.0]], requires_grad=True)
    zeros = torch.zeros(1, 2)
    batch = batch_of(new, zeros, zeros, zeros + advantage, zeros == 0, zeros.long())
    terms, _ = terms_of(name, batch, **options)
    terms.sum().backward()
    assert terms.isfinite().all() and new.grad.isfinite().all()


@pytest.mark.parametrize(("name", "options"), LOSSES)
def test_a_batch_without_a_trained_token(name, options):
    new = NEW.clone().requires_grad_()
    batch = batch_of(new, mask=torch.zeros(2, 4).bool())
    terms, _ = terms_of(name, batch, **options)
    terms.sum().backward()
    assert not terms.any() and not new.grad.any()
    assert all(weights_of(rule, batch, **others).isfinite().all() for rule, others in RULES)


def partitions(items):
    """Every way to split a list into parts."""
    if not items:
        yield []
        return
    first, *rest = items
    for split in partitions(rest):
        yield [[first], *split]
        for place, part in enumerate(split):
            yield [*split[:place], [first, *part], *split[place + 1 :]]


@dataclass
class Row:
    """The fields of an episode that an objective reads."""

    targets: np.ndarray
    old_log_probs: np.ndarray
    rollout_log_probs: np.ndarray
    advantages: np.ndarray
    turns: np.ndarray
    ref_log_probs: None = None


@pytest.mark.parametrize("reduction", ["sample_mean", "token_mean", "constant"])
@pytest.mark.parametrize("rule", sorted(ESTIMATORS["importance"]))
@pytest.mark.parametrize("loss", sorted(ESTIMATORS["loss"]))
def test_a_step_is_the_sum_of_its_parts_however_it_is_cut(loss, rule, reduction):
    """Micro-batches and ranks are parts of a step; each is divided by the counts of the whole step."""
    rng = np.random.default_rng(0)
    options = {"loss": loss, "importance": rule, "reduction": reduction, "old_log_probs": "recompute"}
    levels = {} if rule == "none" else {"importance_args": {"level": "geometric", "per": "turn"}}
    objective = GrpoObjective(GrpoOptions(**options, **levels, constant_denominator=17.0))
    sizes = (5, 1, 3, 4)
    rows = [
        Row(np.arange(n), *(-3 * rng.random((2, n))), rng.normal(size=n), np.sort(rng.integers(0, 3, n))) for n in sizes
    ]
    given = [torch.tensor(-3 * rng.random(n), requires_grad=True) for n in sizes]

    def part(places):
        width = max(sizes[place] for place in places)
        new = torch.stack([torch.nn.functional.pad(given[place], (0, width - sizes[place])) for place in places])
        mask = torch.stack([torch.arange(width) < sizes[place] for place in places])
        return objective([rows[place] for place in places], new, torch.rand(new.shape), mask, StepSize.of(rows))

    def step(split):
        found = [part(places) for places in split]
        gradients = torch.autograd.grad(sum(one.loss for one in found), given)
        names = set(found[0].metrics) - {"entropy_loss", "loss"}
        return torch.cat(gradients), {name: sum(one.metrics[name] for one in found) for name in names}

    whole, numbers = step([[0, 1, 2, 3]])
    splits = list(partitions([0, 1, 2, 3]))
    assert len(splits) == 15
    for split in splits:
        gradient, metrics = step(split)
        torch.testing.assert_close(gradient, whole, rtol=0, atol=1e-6)  # weights of tokens are float32
        assert metrics == pytest.approx(numbers, abs=1e-6), split
