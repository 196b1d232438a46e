"""Sampling: draws that belong to an episode, tokens that follow the distribution, log-probs that say which one."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from geo_sokoban_pipeline.config.rollout import SamplingOptions
from geo_sokoban_pipeline.rollout.engines.transformers import sample_tokens, uniform_draws

LOGITS = torch.tensor([2.0, 1.0, 0.0, -1.0, 3.0])
BANNED = torch.tensor([4])
NONE = torch.empty(0, dtype=torch.long)
ALMOST_ONE = 1 - 2.0**-53


def draw_many(count, options, banned=BANNED, logits=LOGITS):
    draws = uniform_draws(np.full(count, 11), np.arange(count))
    return sample_tokens(logits.expand(count, -1), [options] * count, draws, banned)


def splitmix(seed: int, number: int) -> float:
    """The same stream in plain integers."""

    def mix(state: int) -> int:
        state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        state = (state ^ (state >> 27)) * 0x94D049BB133111EB % 2**64
        return state ^ (state >> 31)

    return (mix((mix(seed % 2**64) + (number + 1) * 0x9E3779B97F4A7C15) % 2**64) >> 11) * 2.0**-53


def test_draws_have_known_values():
    # The first outputs of SplitMix64 from state 0 are 0xE220A8397B1DCDAF and 0x6E789E6AA1B965F4.
    draws = uniform_draws(np.array([0, 0]), np.array([0, 1]))
    assert draws.tolist() == [(0xE220A8397B1DCDAF >> 11) * 2.0**-53, (0x6E789E6AA1B965F4 >> 11) * 2.0**-53]


SEEDS = st.integers(-(2**63), 2**63 - 1)


@given(st.lists(st.tuples(SEEDS, st.integers(0, 2**62)), min_size=1, max_size=8))
def test_draws_equal_plain_integer_arithmetic_in_any_batch(pairs):
    seeds, numbers = (np.array(part, np.int64) for part in zip(*pairs, strict=True))
    assert uniform_draws(seeds, numbers).tolist() == [splitmix(*pair) for pair in pairs]


def test_draws_are_uniform_over_seeds_and_within_a_stream():
    for seeds, numbers in ((np.arange(20_000), np.zeros(20_000)), (np.full(20_000, 3), np.arange(20_000))):
        draws = uniform_draws(seeds, numbers.astype(np.int64))
        assert (draws >= 0).all() and (draws < 1).all()
        counts = np.histogram(draws, bins=20, range=(0, 1))[0]
        # Chi-square with 19 degrees of freedom: 43.8 is its 0.999 quantile.
        assert ((counts - 1000) ** 2 / 1000).sum() < 43.8
        assert abs(np.corrcoef(draws[1:], draws[:-1])[0, 1]) < 0.03
        assert len(np.unique(draws)) == 20_000


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, [0.6439, 0.2369, 0.0871, 0.0321, 0]),
        ({"temperature": 2.0}, [0.4551, 0.2760, 0.1674, 0.1015, 0]),
        ({"top_k": 2}, [0.7311, 0.2689, 0, 0, 0]),
        ({"top_k": 1}, [1, 0, 0, 0, 0]),
        ({"top_p": 0.65}, [0.7311, 0.2689, 0, 0, 0]),
        ({"top_p": 0.64}, [1, 0, 0, 0, 0]),
        ({"top_p": 0.9, "top_k": 2}, [0.7311, 0.2689, 0, 0, 0]),
        ({"greedy": True, "temperature": 5.0}, [1, 0, 0, 0, 0]),
    ],
)
def test_frequencies_follow_the_distribution(options, expected):
    count = 8000
    chosen, _ = draw_many(count, SamplingOptions(**options))
    seen = np.bincount(chosen.numpy(), minlength=5)
    wanted = np.array(expected) * count
    assert (seen[wanted == 0] == 0).all()
    positive = wanted > 0
    # Loose: 22.5 is the 0.9999 quantile with 4 degrees of freedom.
    assert ((seen[positive] - wanted[positive]) ** 2 / wanted[positive]).sum() < 22.5


@pytest.mark.parametrize(
    "options",
    [{}, {"temperature": 0.5}, {"temperature": 3.0, "top_k": 2}, {"top_p": 0.7}, {"greedy": True, "temperature": 0.5}],
)
def test_log_probs_are_after_temperature_and_before_the_cuts(options):
    options = SamplingOptions(**options)
    chosen, log_probs = draw_many(300, options)
    allowed = LOGITS.clone()
    allowed[4] = -torch.inf
    expected = torch.log_softmax(allowed / (1.0 if options.greedy else options.temperature), dim=0)
    torch.testing.assert_close(log_probs, expected[chosen])
    assert log_probs.dtype == torch.float32


@given(
    logits=st.lists(st.floats(-30, 30), min_size=3, max_size=12),
    draw=st.one_of(st.sampled_from([0.0, ALMOST_ONE]), st.floats(0, ALMOST_ONE)),
    top_p=st.sampled_from([1.0, 0.9, 1e-9]),
    top_k=st.integers(0, 3),
    temperature=st.sampled_from([0.01, 1.0, 100.0]),
    banned=st.sets(st.integers(0, 11), max_size=6),
)
@settings(max_examples=150, deadline=None)
def test_no_banned_token_is_ever_chosen(logits, draw, top_p, top_k, temperature, banned):
    banned = sorted(token for token in banned if token < len(logits))[: len(logits) - 1]
    options = SamplingOptions(top_p=top_p, top_k=top_k, temperature=temperature)
    greedy = SamplingOptions(greedy=True)
    ids = torch.tensor(banned, dtype=torch.long)
    scores = torch.tensor([logits, logits])
    chosen, log_probs = sample_tokens(scores, [options, greedy], np.array([draw, draw]), ids)
    assert not set(chosen.tolist()) & set(banned)
    assert torch.isfinite(log_probs).all() and (log_probs <= 1e-6).all()


@pytest.mark.parametrize("options", [{}, {"top_p": 0.99}, {"top_k": 3}])
def test_the_last_draw_takes_the_last_allowed_token(options):
    # 4 is banned and 3 all but impossible: a draw just below 1 must not run off the end of the distribution.
    logits = torch.tensor([[0.0, 0.0, 0.0, -200.0, 50.0]])
    chosen, _ = sample_tokens(logits, [SamplingOptions(**options)], np.array([ALMOST_ONE]), BANNED)
    assert chosen.item() == 2
    first, _ = sample_tokens(logits, [SamplingOptions(**options)], np.array([0.0]), BANNED)
    assert first.item() == 0


def test_rows_of_a_batch_do_not_see_each_other():
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(6, 40, generator=generator)
    kinds = [{}, {"greedy": True}, {"top_k": 3}, {"top_p": 0.5}, {"temperature": 2.0}, {"top_p": 0.9, "top_k": 5}]
    options = [SamplingOptions(**kind) for kind in kinds]
    draws = uniform_draws(np.arange(6), np.zeros(6, np.int64))
    together = sample_tokens(logits, options, draws, BANNED)
    for row in range(6):
        alone = sample_tokens(logits[row : row + 1], options[row : row + 1], draws[row : row + 1], BANNED)
        assert alone[0].item() == together[0][row].item()
        torch.testing.assert_close(alone[1][0], together[1][row])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_any_float_type(dtype):
    chosen, log_probs = sample_tokens(LOGITS[None].to(dtype), [SamplingOptions()], np.array([0.5]), NONE)
    assert log_probs.dtype == torch.float32
    assert chosen.dtype == torch.long


@pytest.mark.parametrize("wrong", [{"temperature": 0}, {"top_p": 0}, {"top_p": 1.1}, {"top_k": -1}, {"top": 1}])
def test_impossible_options_are_refused(wrong):
    with pytest.raises(ValidationError, match=next(iter(wrong))):
        SamplingOptions(**wrong)
