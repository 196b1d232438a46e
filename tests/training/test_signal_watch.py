"""When there is nothing left to learn: one warning with the way out, and the count at the end."""

from __future__ import annotations

import logging

import pytest

from geo_sokoban_pipeline.envs.geo3k.task import GEO3K
from geo_sokoban_pipeline.envs.sokoban.task import SOKOBAN
from geo_sokoban_pipeline.training.grpo_loop import SignalWatch


def metrics(trained: float, solved: int = 0, unsolved: int = 0, rate: float = 1.0) -> dict[str, float | None]:
    return {
        "rollout/groups": 48.0,
        "rollout/trained_ratio": trained,
        "rollout/success_rate": rate,
        "rollout/dynamic_filter/drop_all_solved": float(solved),
        "rollout/dynamic_filter/drop_none_solved": float(unsolved),
    }


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.WARNING)
    return caplog


@pytest.mark.parametrize(
    ("rows", "messages"),
    [
        ([metrics(0.5, 24)] * 30, []),
        ([metrics(0.1, 44)] * 4 + [metrics(0.2, 40), metrics(0.1, 44)] * 3, []),  # never five in a row
        (
            [metrics(0.1, 44)] * 30,
            ["iteration 4: no group to train on but few (48 groups, 44 without a signal): 100 %"],
        ),
        (
            [metrics(0.5, 24), metrics(0.0, 48), metrics(0.5, 24)] + [metrics(0.0, 48)] * 27,
            ["iteration 1: no group to train on (48 groups, 48 without", "28 of 30 iterations trained nothing"],
        ),
        (
            [metrics(0.0, 0, 48, 0.0)] * 3,
            ["only 0 % of the episodes are solved; raise train_geo3k.warm_start.steps", "3 of 3 iterations trained"],
        ),
        # Without a filter every group is trained, and equal rewards alone tell that it moves nothing.
        ([{**metrics(1.0), "rollout/zero_std/count_1.0": 48.0}] * 9, ["iteration 4: no group to train on but few"]),
    ],
)
def test_what_is_said_of_iterations(said, rows, messages):
    watch = SignalWatch(GEO3K)
    for iteration, row in enumerate(rows):
        watch.observe(iteration, row)
    watch.close()
    assert len(said.records) == len(messages)
    for record, message in zip(said.records, messages, strict=True):
        assert message in record.message


@pytest.mark.parametrize(
    ("rate", "steps", "message"),
    [
        (0.949, 400, None),
        (0.95, 400, "the warm start already solves 95.0 % of the validation levels"),
        (1.0, 400, "shorten it (train_sokoban.warm_start.steps=400"),
        (1.0, 0, "the starting policy already solves 100.0 % of the validation levels"),
    ],
)
def test_a_start_that_solves_nearly_everything_is_said(said, rate, steps, message):
    SignalWatch(SOKOBAN).observe_start(rate, steps)
    assert [message in record.message for record in said.records] == [True] * (message is not None)
