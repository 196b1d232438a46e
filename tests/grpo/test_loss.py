"""Policy loss: worked values of the seed, masked positions without effect, and equivalences of batch layouts."""

from __future__ import annotations

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from geo_sokoban_pipeline.config.estimators import TruncatedArguments
from geo_sokoban_pipeline.config.grpo import GrpoOptions
from geo_sokoban_pipeline.grpo import policy_loss
from geo_sokoban_pipeline.grpo.importance import truncated
from geo_sokoban_pipeline.grpo.loss import (
    GrpoObjective,
    StepSize,
    off_policy_metrics,
    reduce_tokens,
    reduction_weights,
    token_batch,
)

VALUES = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 0.0]])
MASK = torch.tensor([[1, 0, 1], [1, 1, 0]])


@pytest.mark.parametrize(
    ("ratio", "advantage", "dual_clip", "expected", "clipped"),
    [
        (1.5, 1.0, None, -1.28, 1.0),
        (1.25, 1.0, None, -1.25, 0.0),
        (0.5, 1.0, None, -0.5, 0.0),
        (1.5, -1.0, None, 1.5, 0.0),
        (0.5, -1.0, None, 0.8, 1.0),
        (5.0, -1.0, 3.0, 3.0, 0.0),
        (5.0, 1.0, 3.0, -1.28, 1.0),  # dual clip is for negative advantages only
        (2.0, -1.0, 3.0, 2.0, 0.0),
    ],
)
def test_clipped_loss(ratio, advantage, dual_clip, expected, clipped):
    new, old = torch.tensor([[-1.0 + math.log(ratio)]]), torch.tensor([[-1.0]])
    result = policy_loss(new, old, torch.tensor([advantage]), torch.ones(1, 1), dual_clip=dual_clip)
    assert result.loss.item() == pytest.approx(expected, abs=1e-6)
    assert result.metrics["pg_loss"] == pytest.approx(expected, abs=1e-6)
    assert result.metrics["pg_clipfrac"] == clipped
    assert result.metrics["ppo_kl"] == pytest.approx(abs(math.log(ratio)), abs=1e-6)
    assert result.metrics["ppo_kl_signed"] == pytest.approx(-math.log(ratio), abs=1e-6)


@pytest.mark.parametrize(
    ("reduction", "denominator", "expected"),
    [
        ("sample_mean", 1, 6.5),
        ("sample_mean", None, 3.25),
        ("constant", 1, 13.0),
        ("constant", 4, 3.25),
        ("token_mean", None, 3.25),
        ("token_mean", 8, 1.625),
    ],
)
def test_reductions(reduction, denominator, expected):
    assert reduce_tokens(VALUES, MASK, reduction, denominator).item() == pytest.approx(expected)


@pytest.mark.parametrize(("reduction", "denominator"), [("sample_mean", None), ("token_mean", None), ("constant", 4)])
def test_empty_mask_gives_zero(reduction, denominator):
    assert reduce_tokens(VALUES, torch.zeros_like(MASK), reduction, denominator).item() == 0.0


def test_advantages_per_episode_equal_the_same_per_token():
    log_probs, old, advantages = VALUES.neg(), VALUES.flip(0).neg(), torch.tensor([1.0, -2.0])
    one = policy_loss(log_probs, old, advantages, MASK)
    two = policy_loss(log_probs, old, advantages.unsqueeze(1).expand(2, 3), MASK)
    assert one.loss.item() == two.loss.item()


def test_importance_weights_scale_each_token():
    """But for masked ones, whatever stands there."""
    zeros = torch.zeros(1, 3)
    weights = torch.tensor([[0.0, 2.0, math.nan]], requires_grad=True)
    mask = torch.tensor([[1, 1, 0]])
    result = policy_loss(zeros, zeros, torch.tensor([1.0]), mask, importance_weights=weights)
    assert result.loss.item() == pytest.approx(-1.0)
    assert not result.loss.requires_grad  # weights and advantages carry no gradient


SHAPES = st.tuples(st.integers(1, 5), st.integers(1, 6), st.integers(0, 10_000))


def random_batch(shape):
    rows, columns, seed = shape
    generator = torch.Generator().manual_seed(seed)
    new, old = (-3 * torch.rand(rows, columns, generator=generator, dtype=torch.float64) for _ in range(2))
    mask = (torch.rand(rows, columns, generator=generator) < 0.6).to(torch.int8)
    return new, old, torch.randn(rows, generator=generator, dtype=torch.float64), mask


@settings(max_examples=40, deadline=None)
@given(SHAPES, st.sampled_from(["sample_mean", "token_mean"]))
def test_packed_equals_padded(shape, reduction):
    new, old, advantages, mask = random_batch(shape)
    denominator = {"sample_mean": len(new), "token_mean": max(1, int(mask.sum()))}[reduction]
    padded = policy_loss(new, old, advantages, mask, reduction=reduction)
    packed = 0.0
    for row, kept in enumerate(mask.bool()):
        tokens = [values[row][kept].unsqueeze(0) for values in (new, old, mask)]
        loss = policy_loss(
            tokens[0], tokens[1], advantages[row : row + 1], tokens[2], reduction=reduction, denominator=denominator
        )
        packed += loss.loss.item()
    # float32 weights: sums of a few terms agree to 1e-6.
    assert packed == pytest.approx(padded.loss.item(), abs=1e-6)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"clip_low": 1.5}, "clip_low"),
        ({"clip_high": -0.1}, "clip_high"),
        ({"dual_clip": 1.0}, "dual_clip"),
        ({"reduction": "median"}, "reduction='median'"),
        ({"reduction": "constant"}, "denominator=None"),
        ({"denominator": 0}, "denominator=0"),
        ({"importance_weights": torch.ones(3)}, "importance_weights has shape"),
    ],
)
def test_bad_options_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        policy_loss(VALUES, VALUES, torch.zeros(2), MASK, **options)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: policy_loss(VALUES, VALUES[:1], torch.zeros(2), MASK), "one shape"),
        (lambda: policy_loss(VALUES, VALUES, torch.zeros(3), MASK), "advantages has shape"),
        (lambda: reduce_tokens(VALUES, MASK[:, :1]), "one shape"),
        (lambda: reduction_weights(MASK[0]), r"must be \(B, T\)"),
    ],
)
def test_bad_shapes_are_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("computed", [torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_precision_follows_the_trained_log_probs(computed, stored):
    """Half precision is computed in float32; what was stored in a higher precision does not raise that of the loss."""
    new, old = (torch.tensor([values]).to(torch.bfloat16) for values in ([-1.0, -2.0, -0.5], [-1.5, -1.9, -0.75]))
    mask, advantages = torch.ones(1, 3), torch.tensor([[0.5, -1.0, 2.0]])
    found = policy_loss(new.to(computed), old.to(stored), advantages, mask)
    wanted = torch.float64 if computed == torch.float64 else torch.float32
    assert found.loss.dtype == wanted
    assert found.loss == policy_loss(new.to(wanted), old.to(wanted), advantages.to(wanted), mask).loss


def test_gap_between_trainer_and_engine():
    """Ratios 1, 2 and 4 under a cap of 2, in a step of six tokens: masked ones do not count."""
    trainer, mask = torch.zeros(1, 4, dtype=torch.float64), torch.tensor([[True, True, True, False]])
    engine = -torch.tensor([[1.0, 2.0, 4.0, 100.0]], dtype=torch.float64).log()
    batch, args = token_batch(trainer, trainer, engine, trainer, mask), TruncatedArguments(cap=2.0)
    found = off_policy_metrics(batch, truncated(batch, args), args, StepSize(samples=2, tokens=6))
    assert found == pytest.approx({"tis": 7 / 6, "tis_abs": 4 / 6, "tis_clipfrac": 1 / 6})


@pytest.mark.parametrize("count", [2, 3])
def test_a_missing_reference_is_named(count):
    """One row for two samples would be broadcast, and shift the rows of more."""
    values = np.full(4, -1.0, np.float32)
    samples = [
        SimpleNamespace(
            targets=np.arange(4),
            old_log_probs=values,
            rollout_log_probs=values,
            advantages=values,
            ref_log_probs=values if number else None,
            turns=np.zeros(4, np.int64),
        )
        for number in range(count)
    ]
    log_probs = torch.full((count, 4), -1.0)
    objective = GrpoObjective(GrpoOptions(kl_coefficient=0.1))
    with pytest.raises(ValueError, match=f"kl_coefficient=0.1 needs ref_log_probs .* 1 of {count} have none"):
        objective(samples, log_probs, torch.zeros(count, 4), torch.ones(count, 4), StepSize.of(samples))
