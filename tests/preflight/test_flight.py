"""The pre-flight as a whole: one cause is one failure, and a run is looked at as it stands, with what it has stored."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from geo_sokoban_pipeline.policies.policy import Policy, save_policy
from geo_sokoban_pipeline.preflight.checks import Subject
from geo_sokoban_pipeline.preflight.flight import Findings, inspect_run
from geo_sokoban_pipeline.preflight.resources import has_weights
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
        ({"sokoban": {"min_solution": 60, "max_solution": 70}}, [("data", "counts")], [("own code", "one episode")]),
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


def keep_policy(subject: Subject, policy: Policy) -> Path:
    """Store a policy as the run's own starting one."""

    def write(folder: Path) -> dict[str, Any]:
        save_policy(policy, folder)
        return {}

    write_folder(subject.models / "base_policy", write)
    return subject.models / "base_policy"


def test_a_run_that_has_its_policy_needs_the_original_no_more(
    inspect: Any, make_subject: Any, tiny_policy: Policy
) -> None:
    folder = keep_policy(make_subject(), tiny_policy)
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
        write_folder(subject.models / "policy", lambda folder: {})
    assert has_weights(subject, None) == there
