"""Log-probs, entropy and KL estimates: worked values, and no NaN from banned or masked places."""

from __future__ import annotations

import math

import pytest
import torch

from geo_sokoban_pipeline.grpo.loss import (
    entropy,
    kl_estimate,
    score_states,
    token_log_probs,
    token_log_probs_and_entropy,
)

LOGITS = torch.tensor([[2.0, 1.0, 0.0]])
ID = torch.tensor([0])


@pytest.mark.parametrize(("temperature", "expected"), [(1.0, -0.407606), (0.8, -0.313781)])
def test_log_prob_of_the_seed(temperature, expected):
    assert token_log_probs(LOGITS, ID, temperature=temperature).item() == pytest.approx(expected, abs=1e-6)


def test_entropy_of_the_seed():
    assert entropy(LOGITS).item() == pytest.approx(0.832396, abs=1e-6)


@pytest.mark.parametrize("temperature", [1.0, 0.8])
def test_both_at_once_equal_each_alone(temperature):
    logits = torch.randn(4, 7, 11, generator=torch.Generator().manual_seed(1))
    ids = torch.randint(0, 9, (4, 7), generator=torch.Generator().manual_seed(2))
    pair = token_log_probs_and_entropy(logits, ids, temperature=temperature, banned_ids=[9, 10])
    assert torch.equal(pair[0], token_log_probs(logits, ids, temperature=temperature, banned_ids=[9, 10]))
    assert torch.equal(pair[1], entropy(logits, banned_ids=[9, 10]))


@pytest.mark.parametrize("banned", [[2], torch.tensor([2])])
def test_banned_ids_have_no_mass(banned):
    two = torch.tensor([[2.0, 1.0]])
    assert token_log_probs(LOGITS, ID, banned_ids=banned).item() == pytest.approx(token_log_probs(two, ID).item())
    assert entropy(LOGITS, banned_ids=banned).item() == pytest.approx(entropy(two).item())
    assert token_log_probs(LOGITS, torch.tensor([2]), banned_ids=banned).item() == -math.inf


def test_banned_ids_give_no_nan_gradient():
    """Also where the banned id was fed at a position that the loss masks out, such as an image pad."""
    logits = torch.randn(3, 5, generator=torch.Generator().manual_seed(6)).requires_grad_()
    log_probs, spread = token_log_probs_and_entropy(logits, torch.tensor([0, 4, 1]), banned_ids=[3, 4])
    mask = torch.tensor([True, False, True])
    (torch.where(mask, log_probs, 0.0).sum() - 0.005 * spread.sum()).backward()
    assert torch.isfinite(logits.grad).all()
    assert torch.equal(logits.grad[:, 3:], torch.zeros(3, 2))


@pytest.mark.parametrize("use", ["none", "reported", "trained"])
@pytest.mark.parametrize("temperature", [1.0, 0.8, 2.0])
def test_scores_without_logits_equal_those_of_logits(temperature, use):
    """Values and gradients; the last chunk is shorter, one label is banned and masked out."""
    generator = torch.Generator().manual_seed(7)
    states, weight = (torch.randn(size, 6, generator=generator).requires_grad_() for size in (10, 12))
    labels = torch.randint(0, 9, (10,), generator=generator)
    labels[3] = 11
    banned, mask = torch.tensor([9, 10, 11]), torch.arange(10) != 3

    def learn(scored):
        log_probs, spread = scored
        loss = torch.where(mask, log_probs, 0.0).square().sum()
        if use == "trained":
            loss = loss - 0.3 * spread.square().sum()
        assert spread.requires_grad == (use == "trained")
        return log_probs, spread, *torch.autograd.grad(loss, (states, weight))

    logits = states @ weight.T
    log_probs, spread = token_log_probs_and_entropy(logits, labels, temperature=temperature, banned_ids=banned)
    expected = learn((log_probs, spread if use == "trained" else spread.detach() * (use == "reported")))
    options = {"chunk": 4, "temperature": temperature, "banned_ids": banned, "entropy": use}
    found = learn(score_states(states, weight, labels, **options))
    assert found[0][3] == -math.inf
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)


def test_scores_without_logits_leave_frozen_tensors_alone():
    weight, labels = torch.randn(12, 6), torch.arange(5)
    states = torch.randn(5, 6)
    for trained in (states, weight):
        trained.requires_grad_()
        values, _ = score_states(states, weight, labels, chunk=2, temperature=1.0, banned_ids=labels[:0])
        values.sum().backward()
        trained.requires_grad_(False)
        assert trained.grad is not None
        trained.grad = None
        assert states.grad is None and weight.grad is None


def test_half_precision_logits_are_computed_in_float32():
    logits = torch.randn(6, 50, generator=torch.Generator().manual_seed(3)).bfloat16()
    ids = torch.arange(6)
    result = token_log_probs(logits, ids)
    assert result.dtype == torch.float32
    assert torch.equal(result, token_log_probs(logits.float(), ids))


def test_saturated_token_is_exactly_zero():
    assert token_log_probs(torch.tensor([[200.0, 0.0]]), ID).item() == 0.0


@pytest.mark.parametrize(
    ("kind", "difference", "expected"),
    [
        ("k1", 0.5, 0.5),
        ("k2", 0.5, 0.125),
        ("k3", 0.5, math.exp(-0.5) - 0.5),
        ("low_var_kl", 0.5, math.exp(-0.5) - 0.5),
        ("k3", -3.0, math.exp(3) - 4),
        ("low_var_kl", -3.0, 10.0),
        ("low_var_kl", 30.0, 10.0),
        ("k1", 0.0, 0.0),
        ("low_var_kl", 0.0, 0.0),
    ],
)
def test_kl_estimates(kind, difference, expected):
    value = kl_estimate(torch.tensor([-1.0 + difference]), torch.tensor([-1.0]), kind)
    assert value.item() == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("kind", ["k1", "k2", "k3", "low_var_kl"])
@pytest.mark.parametrize("poison", [float("-inf"), float("nan"), -1e4])
def test_masked_kl_is_zero_with_zero_gradient(kind, poison):
    log_probs = torch.tensor([[-1.0, poison]], requires_grad=True)
    value = kl_estimate(log_probs, torch.tensor([[-1.5, poison]]), kind, loss_mask=torch.tensor([[1, 0]]))
    value.sum().backward()
    assert value[0, 1].item() == 0.0 and log_probs.grad[0, 1].item() == 0.0
    assert torch.isfinite(log_probs.grad).all()


@pytest.mark.parametrize("kind", ["k3", "low_var_kl"])
def test_exploding_kl_has_a_finite_gradient(kind):
    log_probs = torch.tensor([-1e4], requires_grad=True)
    kl_estimate(log_probs, torch.tensor([0.0]), kind).sum().backward()
    assert torch.isfinite(log_probs.grad).all()


def test_k3_is_unbiased_and_not_negative():
    """Expectation over the policy's own samples equals the exact divergence, here summed over all ids."""
    new, ref = (torch.randn(9, generator=torch.Generator().manual_seed(s)).log_softmax(-1) for s in (1, 2))
    exact = (new.exp() * (new - ref)).sum()
    values = kl_estimate(new, ref, "k3")
    assert (values >= 0).all()
    assert (new.exp() * values).sum().item() == pytest.approx(exact.item(), abs=1e-6)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: token_log_probs(LOGITS, ID, temperature=0.0), "temperature=0.0"),
        (lambda: kl_estimate(ID.float(), ID.float(), "k4"), "kind='k4'"),
    ],
)
def test_bad_input_is_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()
