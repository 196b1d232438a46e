"""Schedules: learning rates by step, and when to save and evaluate."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from geo_sokoban_pipeline.grpo.schedules import is_eval_due, is_save_due, learning_rate

RECIPE_Q = {
    "base": 7e-4,
    "warmup_steps": 6,
    "total_steps": 200,
    "decay_fraction": 0.3,
    "decay_to": 0.1,
}
PLAIN = {"base": 1.0, "warmup_steps": 0, "total_steps": 10, "decay_fraction": 1.0, "decay_to": 0.5}


@pytest.mark.parametrize(
    ("step", "expected"),
    [
        (0, 7e-4 / 6),
        (2, 7e-4 / 2),
        (5, 7e-4),
        (100, 7e-4),
        (139, 7e-4),
        (169, 7e-4 * 0.55),
        (199, 7e-5),
        (5000, 7e-5),
    ],
)
def test_recipe_q(step, expected):
    assert learning_rate(step, **RECIPE_Q) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("step", "options", "expected"),
    [
        (0, {"base": 1e-6, "decay_fraction": 0.0}, 1e-6),
        (0, {"warmup_steps": 10}, 0.1),
        (9, {"decay_to": 0.0}, 0.0),
        (9, {"warmup_steps": 10}, 1.0),
        (10, {"warmup_steps": 10}, 0.5),
        (10**6, {"decay_fraction": 0.0}, 1.0),
    ],
)
def test_learning_rate(step, options, expected):
    assert learning_rate(step, **PLAIN | options) == pytest.approx(expected)


@given(st.integers(0, 30), st.integers(1, 60), st.floats(0.05, 1), st.floats(0, 1))
def test_rate_rises_then_falls_within_its_bounds(warmup, total, fraction, floor):
    options = {"base": 2.0, "warmup_steps": warmup, "total_steps": total, "decay_fraction": fraction}
    rates = [learning_rate(step, decay_to=floor, **options) for step in range(max(total, warmup) + 5)]
    assert all(0.0 <= rate <= 2.0 for rate in rates)
    assert rates[:warmup] == sorted(rates[:warmup])
    tail = rates[max(0, warmup - 1) :]
    assert all(later <= earlier + 1e-12 for earlier, later in pairwise(tail))
    assert rates[-1] == pytest.approx(2.0 * floor)


@pytest.mark.parametrize(
    ("interval", "options", "expected"),
    [
        (20, {}, [19, 39, 59]),
        (20, {"num_iterations": 50}, [19, 39, 49, 59]),
        (None, {"num_iterations": 50}, []),
        (1, {}, list(range(64))),
    ],
)
def test_save_is_due(interval, options, expected):
    assert [step for step in range(64) if is_save_due(step, interval, **options)] == expected


def test_evaluation_is_not_due_only_because_the_run_ends():
    assert [step for step in range(64) if is_eval_due(step, 20)] == [19, 39, 59]
    assert not any(is_eval_due(step, None) for step in range(64))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: learning_rate(-1, **PLAIN), "step=-1"),
        (lambda: learning_rate(0, **PLAIN | {"total_steps": 0}), "total_steps=0"),
        (lambda: learning_rate(0, **PLAIN | {"decay_fraction": 1.5}), "decay_fraction=1.5"),
        (lambda: learning_rate(0, **PLAIN | {"decay_to": 1.5}), "decay_to=1.5"),
        (lambda: is_save_due(0, 0), "interval=0"),
        (lambda: is_eval_due(0, -1), "interval=-1"),
    ],
)
def test_bad_input_is_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()
