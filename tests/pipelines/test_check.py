"""The pre-flight as a command: a table, exit code 0 where the run can begin and 1 where it would fail."""

from __future__ import annotations

import pytest

from geo_sokoban_pipeline.preflight.checks import PreflightError
from geo_sokoban_pipeline.runs.storage import read_json
from geo_sokoban_pipeline.training import grpo_loop

pytestmark = pytest.mark.slow

CHECK = "--pipelines=check_sokoban"


def table_of(project):
    """Stored table, and the states of its checks by group and name."""
    table = read_json(project.folder("08_reporting", "check_sokoban") / "table.json")
    return table, {(check["group"], check["name"]): check for check in table["checks"]}


def test_a_run_that_can_begin(project):
    result = project.succeed(CHECK)
    table, checks = table_of(project)
    assert table["states"]["failure"] == 0
    assert {group for group, _ in checks} == {
        "parameters",
        "data",
        "model",
        "own code",
        "run",
        "disk",
        "memory",
        "libraries",
        "machine",
        "network",
        "timed",
    }
    assert "16 episodes" in checks["timed", "rollout"]["found"]
    assert "s an iteration" in checks["timed", "estimate of the run"]["found"]
    assert "Pre-flight of train_sokoban" in result.output
    # Nothing of the run is made, nothing is left behind.
    files = {path.relative_to(project.root).as_posix() for path in project.root.rglob("*") if path.is_file()}
    assert files == {"06_models/check_sokoban/default/run.lock", "08_reporting/check_sokoban/default/table.json"}


def test_a_run_that_would_fail(project):
    servers = "train_sokoban.rollout.engine=sglang,train_sokoban.rollout.server.python=nowhere"
    words = f"--params=train_sokoban.grpo.group_size=1,sokoban.counts.eval=99999,{servers}"
    line = project.refused(CHECK, words)
    assert "train_sokoban/default: 3 failures" in line
    assert "group_size=1" in line
    table, checks = table_of(project)
    failed = {name for name, check in checks.items() if check["state"] == "failure"}
    assert failed == {
        ("parameters", "group size"),
        ("data", "counts"),
        ("servers", "environment"),
    }
    assert checks["timed", "iteration"]["state"] == "skipped"


def test_updates_that_diverge_are_a_row_not_a_traceback(project, monkeypatch):
    """One step without a finite gradient is survived, three in a row end a run."""
    monkeypatch.setattr(grpo_loop, "learning_rate", lambda *_, **__: 1e30)
    project.run("check_sokoban")
    assert table_of(project)[1]["timed", "gradients"]["state"] == "warning"
    each = {"grpo": {"groups_per_step": 1}}
    with pytest.raises(PreflightError, match="timed, iteration: DivergedError|timed, iteration: .* in a row"):
        project.run("check_sokoban", params={"train_sokoban": each})


def test_without_the_timed_part_and_on_a_stored_run(clone):
    clone.run("check_sokoban", params={"check_sokoban": {"timed": False}})
    table, checks = table_of(clone)
    assert table["states"]["failure"] == 0
    assert checks["timed", "iteration"]["state"] == "skipped"
    assert checks["data", "stored prompts"]["state"] == "ok"
    assert checks["run", "train_sokoban/default"]["found"].startswith("finished after 3 iterations")
