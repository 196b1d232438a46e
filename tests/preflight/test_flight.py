"""The pre-flight as a whole: one cause is one failure, the table says it, and the timed part leaves nothing behind."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from geo_sokoban_pipeline.envs.inspection import Check, guard
from geo_sokoban_pipeline.pipelines.check.nodes import judge_table
from geo_sokoban_pipeline.policies.policy import Policy
from geo_sokoban_pipeline.policies.preparing import policy_writer
from geo_sokoban_pipeline.preflight.checks import PreflightError, as_table, rows_of, summarise
from geo_sokoban_pipeline.preflight.flight import Findings, inspect_run
from geo_sokoban_pipeline.preflight.resources import (
    Timing,
    describe_timing,
    estimate_run,
    has_weights,
    ready_policy,
    time_iteration,
)
from geo_sokoban_pipeline.runs.policy_folder import write_policy
from geo_sokoban_pipeline.runs.storage import write_folder

SMALL = {"counts": {"train": 24, "validation": 8, "eval": 8}, "max_solution": 4}
GONE = {"source": "folder", "path": "/no/such/policy"}


def failures(findings: Findings) -> list[tuple[str, str]]:
    return [(check.group, check.name) for check in findings.checks if check.state == "failure"]


def state_of(findings: Findings, group: str, name: str) -> str:
    return {(check.group, check.name): check.state for check in findings.checks}[group, name]


@pytest.fixture
def inspect(make_subject: Any) -> Callable[..., Findings]:
    """`inspect(train_sokoban={…})`: the findings about a small run without servers."""

    def look(**changes: Any) -> Findings:
        changes["sokoban"] = {**SMALL, **changes.get("sokoban", {})}
        return inspect_run(make_subject(tracking={"enabled": False}, **changes), None)

    return look


@pytest.mark.parametrize(
    ("changes", "expected", "skipped"),
    [
        ({}, [], []),
        (
            {"train_sokoban": {"env": {"factory": "no_such.build_env"}}},
            [("own code", "train_sokoban.env.factory")],
            [("own code", "one episode"), ("disk", "space"), ("memory", "rank")],
        ),
        (
            {"train_sokoban": {"env": {"args": {"cell_pxx": 3}}}},
            [("own code", "arguments")],
            [("own code", "one episode")],
        ),
        (
            {"sokoban": {"height": 5, "width": 5, "min_solution": 60, "max_solution": 70}},
            [("data", "counts")],
            [("own code", "one episode")],
        ),
        (
            {"train_sokoban": {"policy": GONE}},
            [("model", "policy")],
            [("own code", "one episode"), ("machine", "attention")],
        ),
        (
            {"train_sokoban": {"rollout": {"max_turns": 3, "engine": "sglang", "server": {"python": "nowhere"}}}},
            [("servers", "environment")],
            [],
        ),
        ({"train_sokoban": {"rollout": {"max_turns": 3}}}, [], []),
    ],
)
def test_one_cause_is_one_failure(inspect: Any, changes: Any, expected: Any, skipped: Any) -> None:
    findings = inspect(**changes)
    assert failures(findings) == expected
    assert {state_of(findings, *row) for row in skipped} <= {"skipped"}
    moves = [check.state for check in findings.checks if check.name == "moves"]
    assert moves == (["warning"] if "rollout" in changes.get("train_sokoban", {}) else [])


def test_ranks_of_a_cluster_are_planned_and_its_gpus_left_to_the_estimate(inspect: Any) -> None:
    findings = inspect(train_sokoban={"placement": "ray", "processes": 2, "sharding": "full"})
    rows = {check.name: check for check in findings.checks if check.group == "memory"}
    assert (rows["weights"].state, rows["rank"].state, rows["GPUs"].state) == ("ok", "ok", "skipped")
    assert "estimate_sokoban.gpu" in rows["GPUs"].found


def test_a_run_that_has_its_policy_needs_the_original_no_more(
    inspect: Any, make_subject: Any, tiny_policy: Policy
) -> None:
    folder = write_policy(make_subject().folders.models / "base_policy", policy_writer(tiny_policy, {})).path
    findings = inspect(train_sokoban={"policy": GONE})
    assert state_of(findings, "model", "files") == "ok"
    assert findings.model is not None and findings.model.folder == folder
    assert ("model", "policy") in failures(inspect(train_sokoban={"policy": GONE}, fresh=True))
    (folder / "model.safetensors").write_bytes(b"torn")
    damaged = inspect(train_sokoban={"policy": GONE})
    assert state_of(damaged, "model", "files") == "skipped"
    assert [group for group, _ in failures(damaged)] == ["run"]


@pytest.mark.parametrize(
    ("policy", "stored", "fresh", "there"),
    [
        ({}, False, False, True),
        (GONE, False, False, False),
        (GONE, True, False, True),
        (GONE, True, True, False),
    ],
)
def test_whether_there_is_something_to_time(
    make_subject: Any, policy: dict[str, Any], stored: bool, fresh: bool, there: bool
) -> None:
    subject = make_subject(train_sokoban={"policy": policy}, fresh=fresh)
    if stored:
        write_folder(subject.folders.models / "policy", lambda folder: {})
    assert has_weights(subject, None) == there


# The table and the timed part.

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
        judge_table(table)
        assert "the run can begin" in summarise(table)
    else:
        with pytest.raises(PreflightError, match=error):
            judge_table(table)
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
    assert found.found.startswith("KeyError: 'lost', in tests/preflight/test_flight.py, line ")


# The timed part: it takes the policy that the run will take, with its type, and leaves nothing behind.

BRIEF = {"grpo": {"groups": 2, "group_size": 2, "filter": "none"}, "rollout": {"max_turns": 2}}


@pytest.mark.parametrize(("fresh", "stored"), [(False, True), (True, False)])
def test_a_fresh_run_is_not_timed_with_the_old_policy(
    make_subject: Any, tiny_policy: Policy, tmp_path: Path, fresh: bool, stored: bool
) -> None:
    ones = copy.deepcopy(tiny_policy)  # the run's policy after the warm start
    ones.model.load_state_dict({name: torch.ones_like(value) for name, value in ones.model.state_dict().items()})
    write_policy(make_subject().folders.models / "policy", policy_writer(ones, {}))
    subject = make_subject(train_sokoban={"warm_start": {"steps": 0}}, fresh=fresh)
    policy, seconds = ready_policy(subject, [], None, tmp_path / "made")
    weight = next(policy.model.parameters())
    assert bool((weight == 1).all()) == stored
    assert seconds is None


@pytest.mark.parametrize(("dtype", "attention"), [("bfloat16", "eager"), ("float32", "sdpa")])
def test_the_policy_built_here_has_the_type_and_attention_of_the_options(
    make_subject: Any, tmp_path: Path, dtype: str, attention: str
) -> None:
    chosen = {"policy": {"dtype": dtype, "attention": attention}, "warm_start": {"steps": 0}}
    policy, _ = ready_policy(make_subject(train_sokoban=chosen), [], None, tmp_path / "made")
    assert policy.model.dtype == getattr(torch, dtype)
    assert policy.model.config._attn_implementation == attention


@pytest.mark.parametrize("processes", [1, 2])
def test_nothing_is_left_behind(
    make_subject: Any, sokoban_rows: Any, tiny_weights: int, tmp_path: Path, processes: int
) -> None:
    brief = {**BRIEF, "threads": 1, "processes": processes}
    subject = make_subject(train_sokoban=brief, check_sokoban={"imitation_steps": 0})
    timing = time_iteration(subject, sokoban_rows(8), None)
    assert (timing.episodes, timing.sft_step) == (4, None)
    assert timing.checkpoint_bytes > 3 * 4 * tiny_weights and timing.trajectory_bytes > 0
    assert list(tmp_path.iterdir()) == []
