"""Whole runs of both geometry tasks with `--env=test`: killed and continued, their episodes, what works on them."""

from __future__ import annotations

import signal
from typing import Any

import pytest

from geo_sokoban_pipeline.evaluation.audit import audit_files, check_token_parity
from geo_sokoban_pipeline.events import Event
from geo_sokoban_pipeline.policies.policy import load_policy
from geo_sokoban_pipeline.runs.storage import read_json
from kill_hook import kill_at
from pipelines.conftest import LEARNT
from runs import Project, assert_same_run, finish, kedro_command, read_episodes, read_run

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("stored")]

TOOLS = "geo3k_multi_turn"
TASKS = ("geo3k", TOOLS)
SHARED = {
    "policy",
    "mode",
    "episodes",
    "clusters",
    "solved",
    "solve_rate",
    "low",
    "high",
    "mean_return",
    "invalid_share",
    "pass_at_k",
}
OWN = {"first_attempt", "answered_share", "plausible_share", "tools", "responses", "breakdowns"}


def test_a_killed_run_gives_what_an_undisturbed_one_gives(stored_run, tmp_path):
    """Killed in its second iteration."""
    run = f"train_{TOOLS}"
    given = ",".join(f"{run}.warm_start.{name}={value}" for name, value in LEARNT.items())
    words = (f"--pipelines={run}", f"--params={given}")
    finish(kedro_command(*words, data_root=tmp_path, **kill_at(f"{Event.UPDATE}:*", 2)), expected=-signal.SIGKILL)
    Project(tmp_path).succeed(*words)
    assert_same_run(read_run(stored_run(TOOLS).root, run), read_run(tmp_path, run))


@pytest.mark.parametrize("task", TASKS)
def test_episodes_summary_and_report(stored_run, task):
    project = stored_run(task)
    models, outputs, reports = (
        project.folder(layer, f"train_{task}") for layer in ("06_models", "07_model_output", "08_reporting")
    )
    episodes = read_episodes(outputs)
    assert check_token_parity(episodes, load_policy(models / "final_policy").codec) == []
    assert {episode.task for episode in episodes} == {task}
    limit = 3 if task == TOOLS else 1
    for episode in episodes:
        metrics = episode.metrics
        assert episode.label and len(episode.images) == 1
        assert 1 <= metrics["turns"] <= limit
        assert episode.reward == metrics["success"] or episode.status == "truncated"
        assert sum(name.startswith("family_") for name in metrics) == 1
    assert limit == 1 or any(episode.metrics["turns"] > 1 for episode in episodes)
    assert audit_files(project.root) == []

    summary = read_json(reports / "eval_summary.json")
    rows: dict[tuple[str, str], dict[str, Any]] = {(row["policy"], row["mode"]): row for row in summary["rows"]}
    ablated = ("final", "final_blank", "final_shuffled")
    assert set(rows) == {
        *((policy, mode) for policy in ("warm_start", *ablated) for mode in ("sampled", "greedy")),
        *((policy, "-") for policy in ("label", "most_frequent", "teacher (plausible)")),
    }
    changes = {name for name in rows if "change" in rows[name]}
    assert changes == {(name, mode) for name in ablated[1:] for mode in ("sampled", "greedy")}
    assert all(set(row) - {"change"} == SHARED | OWN for row in rows.values())
    assert rows["label", "-"]["solve_rate"] == 1.0
    row = read_json(outputs / "metrics" / "iter=00002.json")
    names = ("solve_rate", "first_attempt_rate", "answered_share")
    assert {f"eval/validation/sampled_{name}" for name in names} <= set(row)
    assert ("rollout/tool_calls/mean" in row) == (task == TOOLS)
    page = (reports / "report.html").read_text(encoding="utf-8")
    assert "held-out problems" in page and "solve rate" not in page


def test_update_replays_and_rollout_repeats(stored_run):
    task, project = TOOLS, stored_run(TOOLS)
    project.run(f"update_{task}", {f"update_{task}": {"source": {"iteration": 1}}})
    for name in ("model.safetensors", "optimizer.safetensors"):
        replayed, stored = (
            project.folder("06_models", f"{kind}_{task}") / "checkpoints" / "iter=00001" / name
            for kind in ("update", "train")
        )
        assert replayed.read_bytes() == stored.read_bytes()
    project.run(f"rollout_{task}", {f"rollout_{task}": {"source": {"checkpoint": 1}}})
    name = "trajectories/iter=00002/part-000.parquet"
    made, stored = (read_run(project.root, f"{kind}_{task}")["episodes"][name] for kind in ("rollout", "train"))
    apart = ("trajectory_id", "timings")
    for one, other in zip(made, stored, strict=True):
        assert {k: v for k, v in one.items() if k not in apart} == {k: v for k, v in other.items() if k not in apart}


def test_a_stored_run_is_evaluated_and_checked(stored_run):
    project = stored_run(TOOLS)
    project.run(f"evaluate_{TOOLS}", {f"evaluate_{TOOLS}": {"source": {"checkpoint": "start"}}})
    summary, trained = (
        read_json(project.folder("08_reporting", f"{kind}_{TOOLS}") / "eval_summary.json")
        for kind in ("evaluate", "train")
    )
    assert summary["source"] == {"run": f"train_{TOOLS}", "run_id": "default", "checkpoint": "start", "iteration": None}
    assert {**summary["rows"][0], "policy": ""} == {**trained["rows"][0], "policy": ""}
    assert summary["rows"][-3:] == trained["rows"][-3:]
    assert (project.folder("08_reporting", f"evaluate_{TOOLS}") / "report.html").is_file()

    project.run(f"check_{TOOLS}", {f"check_{TOOLS}": {"timed": False}})
    table = read_json(project.folder("08_reporting", f"check_{TOOLS}") / "table.json")
    checks = {(check["group"], check["name"]): check for check in table["checks"]}
    assert table["states"]["failure"] == 0
    assert checks["data", "stored prompts"]["state"] == "ok"
    assert checks["run", f"train_{TOOLS}/default"]["found"].startswith("finished after 3 iterations")
    assert "expert plausible" in checks["own code", "one episode"]["found"]
