"""The table: what is timed becomes an estimate, failures become one line, an error in a check becomes a row."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from geo_sokoban_pipeline.envs.inspection import Check, guard
from geo_sokoban_pipeline.preflight.checks import PreflightError, as_table, judge, rows_of, summarise
from geo_sokoban_pipeline.preflight.resources import Timing, describe_timing, estimate_run

TIMING = Timing(
    sft_step=0.1,
    rollout=2.56,
    update=1.0,
    save=0.44,
    episodes=256,
    tokens=51_200,
    steps=6,
    skipped=0,
    checkpoint_bytes=6_000_000,
    trajectory_bytes=400_000,
    peak_bytes=900_000_000,
)


@pytest.mark.parametrize(
    ("changes", "done", "seconds"),
    [
        # A validation is 160 prompts, sampled and greedy: 3.2 s. Six of them, one before training.
        # The evaluation: two policies sampled and greedy, the last one with blank images too.
        ({}, 0, {"warm start": 100 + 4 * 3.2, "iterations": 400, "validations": 6 * 3.2, "evaluation": 640 * 6 * 0.01}),
        ({"sft_step": None}, 0, {"iterations": 400, "validations": 6 * 3.2, "evaluation": 38.4}),
        ({"sft_step": None}, 70, {"iterations": 120, "validations": 2 * 3.2, "evaluation": 38.4}),
        ({"sft_step": None}, 100, {"iterations": 0, "validations": 0, "evaluation": 38.4}),
    ],
)
def test_a_run_is_estimated_from_one_iteration(
    make_subject: Any, changes: dict[str, Any], done: int, seconds: dict[str, float]
) -> None:
    options = make_subject(train_sokoban={"loop": {"iterations": 100, "eval_interval": 20}}).options
    parts = estimate_run(replace(TIMING, **changes), options, validation=160, evaluation=640, done=done)
    assert parts == pytest.approx(seconds)


@pytest.mark.parametrize(
    ("changes", "state", "text"),
    [
        ({}, "ok", ""),
        ({"skipped": 2}, "warning", "2 of 6 optimizer steps had no finite gradient; a run continues"),
        ({"steps": 0}, "warning", "no group to train on"),
    ],
)
def test_timed_rows(make_subject: Any, changes: dict[str, Any], state: str, text: str) -> None:
    found = describe_timing(replace(TIMING, **changes), make_subject().options, validation=160, evaluation=640)
    by_name = {check.name: check for check in found}
    assert "100 episodes/s, 20,000 tokens/s" in by_name["rollout"].found
    assert "4.00 s an iteration" in by_name["estimate of the run"].found
    gradients = by_name.get("gradients", Check("", "", "ok", ""))
    assert gradients.state == state
    assert text in gradients.found


@pytest.mark.parametrize(
    ("found", "error"),
    [
        ([Check("a", "x", "ok", "fine")], None),
        ([Check("a", "x", "warning", "slow", "hurry")], None),
        (
            [Check("a", "x", "ok", "fine"), Check("b", "y", "failure", "broken", "mend it")],
            "first, b, y: broken; mend it",
        ),
    ],
)
def test_only_failures_stop(make_subject: Any, found: list[Check], error: str | None) -> None:
    table = as_table(make_subject(), found)
    if error is None:
        judge(table)
        assert "the run can begin" in summarise(table)
    else:
        with pytest.raises(PreflightError, match=error):
            judge(table)
    assert sum(table["states"].values()) == len(found)


def test_rows_of_a_group_stand_together(make_subject: Any) -> None:
    found = [Check("a", "1", "ok", ""), Check("b", "2", "ok", "", "do"), Check("a", "3", "ok", "")]
    assert [(group, name) for group, name, _, _ in rows_of(as_table(make_subject(), found))] == [
        ("a", "1"),
        ("", "3"),
        ("b", "2"),
    ]


def test_a_check_that_raises_is_a_failure() -> None:
    def check() -> list[Check]:
        raise KeyError("lost")

    (found,) = guard("a", "x", check)
    assert (found.group, found.name, found.state) == ("a", "x", "failure")
    assert found.found.startswith("KeyError: 'lost', in tests/preflight/test_table.py, line ")
