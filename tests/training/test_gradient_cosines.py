"""Cosines of policy gradients: the truth against itself, its opposite, scaled, with known errors, and nothing."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from geo_sokoban_pipeline.evaluation.credit import Turns
from geo_sokoban_pipeline.grpo.scoring import assistant_turns
from geo_sokoban_pipeline.training.gradient_cosines import measure_cosines
from training.setup import Setup


def describe(episodes, gain, variance=0.0, whole=None):
    """Each turn in a state of its own, whose number is that of the turn; the episode's end is one more."""
    counts = [len(assistant_turns(episode)) for episode in episodes]
    total = sum(counts)
    last = np.cumsum(counts) - 1
    result = np.arange(1, total + 1)
    result[last] = total + np.arange(len(counts))
    zeros = np.zeros(total)
    after = np.full(total, variance)
    after[last] = 0.0
    return Turns(
        prompt=zeros.astype(int),
        group=zeros.astype(int),
        place=zeros.astype(int),
        state=np.arange(total),
        result=result,
        action=np.arange(total),
        value=zeros,
        gain=gain,
        before=np.full(total, variance),
        after=after,
        is_whole=np.ones(total, bool) if whole is None else whole,
    )


def measure(setup: Setup, estimates, turns, episodes=None, seed=0):
    chosen = setup.episodes if episodes is None else episodes
    return measure_cosines(estimates, turns, chosen, setup.policy, setup.options.optimizer, 1.0, seed)


@pytest.fixture
def gain(setup: Setup):
    count = sum(len(assistant_turns(episode)) for episode in setup.episodes)
    return np.random.default_rng(0).normal(size=count)


def test_the_truth_and_what_is_not(setup: Setup, gain):
    found = measure(
        setup,
        {"same": gain, "scaled": 3 * gain, "opposite": -gain, "none": 0 * gain},
        describe(setup.episodes, gain),
    )
    assert [found[name] for name in ("same", "scaled", "opposite")] == pytest.approx([1, 1, -1], abs=1e-5)
    assert np.isnan(found["none"])


def test_errors_of_the_truth_are_taken_from_its_length(setup: Setup, gain):
    """The estimate is the truth without its errors: over several draws of these its mean cosine is 1."""
    deviation, generator, cosines, plain = 0.5, np.random.default_rng(1), [], []
    for seed in range(8):
        exact = describe(setup.episodes, gain, deviation**2)
        error = generator.normal(0, deviation, exact.result.max() + 1)
        error[exact.result[exact.after == 0]] = 0.0
        measured = replace(exact, gain=gain + error[exact.result] - error[exact.state])
        cosines.append(measure(setup, {"exact": gain}, measured, seed=seed)["exact"])
        without = replace(measured, before=0 * gain, after=0 * gain)
        plain.append(measure(setup, {"exact": gain}, without, seed=seed)["exact"])
    assert np.mean(plain) < 0.93 and np.mean(cosines) > 0.95


def test_turns_that_are_not_measured_and_episodes_without_tokens(setup: Setup, gain):
    """They count nothing, and the turns of later episodes keep their places; other iterations are not taken."""
    silent = replace(setup.episodes[2], loss_mask=np.zeros_like(setup.episodes[2].loss_mask))
    later = replace(setup.episodes[3], iteration=setup.episodes[3].iteration + 1)
    episodes = [*setup.episodes[:2], silent, *setup.episodes[4:], later]
    counts = [len(assistant_turns(episode)) for episode in episodes]
    gain = np.resize(gain, sum(counts))
    gain[0] = np.nan
    whole = np.repeat([True] * (len(episodes) - 1) + [False], counts)
    turns = describe(episodes, gain, whole=whole)
    other = np.where(whole, gain, 100.0)
    other[0] = 7.0
    found = measure(setup, {"same": other}, turns, episodes)
    assert found["same"] == pytest.approx(1, abs=1e-5)
