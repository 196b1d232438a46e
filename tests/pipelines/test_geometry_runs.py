"""Whole runs of both geometry tasks with `--env=test`: killed and continued, their episodes, what works on them."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest

from geo_sokoban_pipeline.evaluation.audit import audit_files, check_token_parity
from geo_sokoban_pipeline.events import Event
from geo_sokoban_pipeline.policies.policy import load_policy
from geo_sokoban_pipeline.runs.storage import read_json
from geo_sokoban_pipeline.trajectories.parquet import read_trajectories
from geo_sokoban_pipeline.trajectories.schema import validate_trajectories
from geo_sokoban_pipeline.trajectories.types import Trajectory, table_to_trajectories
from kill_hook import kill_at
from runs import TRAJECTORY_KINDS, assert_same_run, finish, kedro_command, read_run

pytestmark = pytest.mark.slow

TASKS = ("geo3k", "geo3k_multi_turn")
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
# Few steps more than --env=test has, so that the policy has learnt to answer at all.
COMMAND = "--params=train_{task}.warm_start.steps=40,train_{task}.warm_start.play_every=40,tracking.enabled=true"


@pytest.fixture(scope="module", params=TASKS)
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """A run that was killed in its second iteration and continued by the same command."""
    task, root = request.param, tmp_path_factory.mktemp(request.param)
    words = (f"--pipelines=train_{task}", COMMAND.format(task=task))
    process = kedro_command(*words, data_root=root, **kill_at(f"{Event.UPDATE}:*", 2))
    output, _ = process.communicate(timeout=600)
    assert process.returncode == -signal.SIGKILL, output[-3000:]
    finish(kedro_command(*words, data_root=root), timeout=600)
    return task, root


def command(run: tuple[str, Path], kind: str, *params: str, expected: int = 0) -> str:
    """Run another pipeline on the run's data."""
    task, root = run
    given = [COMMAND.format(task=task).replace("=true", "=false"), *params]
    return finish(kedro_command(f"--pipelines={kind}_{task}", ",".join(given), data_root=root), expected, timeout=600)


def episodes_of(root: Path, run: str) -> list[Trajectory]:
    outputs = root / "07_model_output" / run / "default"
    files = [path for kind in TRAJECTORY_KINDS for path in sorted((outputs / kind).rglob("*.parquet"))]
    assert files
    found: list[Trajectory] = []
    for path in files:
        table = read_trajectories(path)
        validate_trajectories(table)
        found += table_to_trajectories(table)
    return found


def test_a_killed_run_gives_what_an_undisturbed_one_gives(run, tmp_path):
    task, root = run
    words = (f"--pipelines=train_{task}", COMMAND.format(task=task).replace("=true", "=false"))
    finish(kedro_command(*words, data_root=tmp_path, PYTHONHASHSEED="7"), timeout=600)
    assert_same_run(read_run(tmp_path, f"train_{task}"), read_run(root, f"train_{task}"))


def test_every_stored_episode_keeps_the_contract(run):
    task, root = run
    episodes = episodes_of(root, f"train_{task}")
    codec = load_policy(root / "06_models" / f"train_{task}" / "default" / "final_policy").codec
    assert check_token_parity(episodes, codec) == []
    assert {episode.task for episode in episodes} == {task}
    limit = 3 if task == "geo3k_multi_turn" else 1
    for episode in episodes:
        metrics = episode.metrics
        assert episode.label and len(episode.images) == 1
        assert 1 <= metrics["turns"] <= limit
        assert episode.reward == metrics["success"] or episode.status == "truncated"
        assert sum(name.startswith("family_") for name in metrics) == 1
    assert limit == 1 or any(episode.metrics["turns"] > 1 for episode in episodes)
    assert audit_files(root) == []


def test_summary_metrics_and_report(run):
    task, root = run
    reports = root / "08_reporting" / f"train_{task}" / "default"
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
    row = read_json(root / "07_model_output" / f"train_{task}" / "default" / "metrics" / "iter=00002.json")
    assert {
        f"eval/validation/sampled_{name}" for name in ("solve_rate", "first_attempt_rate", "answered_share")
    } <= set(row)
    assert ("rollout/tool_calls/mean" in row) == (task == "geo3k_multi_turn")
    page = (reports / "report.html").read_text(encoding="utf-8")
    assert "held-out problems" in page and "solve rate" not in page

    from mlflow.tracking import MlflowClient

    client = MlflowClient(tracking_uri=f"sqlite:///{root / 'mlflow.db'}")
    note = read_json(root / "06_models" / f"train_{task}" / "default" / "mlflow_run.json")
    logged = client.get_run(note["mlflow_run_id"])
    assert logged.data.metrics["rollout/answered"] == pytest.approx(row["rollout/answered"])
    assert f"{task}.instruction" in logged.data.params
    assert not any(name.startswith(("sokoban.", "train_sokoban.")) for name in logged.data.params)


def test_update_replays_and_rollout_repeats(run):
    task, root = run
    models = root / "06_models"
    command(run, "update", f"update_{task}.source.iteration=1")
    for name in ("model.safetensors", "optimizer.safetensors"):
        replayed = models / f"update_{task}" / "default" / "checkpoints" / "iter=00001" / name
        stored = models / f"train_{task}" / "default" / "checkpoints" / "iter=00001" / name
        assert replayed.read_bytes() == stored.read_bytes()
    command(run, "rollout", f"rollout_{task}.source.checkpoint=1")
    name = "trajectories/iter=00002/part-000.parquet"
    made, stored = (read_run(root, f"{kind}_{task}")["episodes"][name] for kind in ("rollout", "train"))
    apart = ("trajectory_id", "timings")
    for one, other in zip(made, stored, strict=True):
        assert {k: v for k, v in one.items() if k not in apart} == {k: v for k, v in other.items() if k not in apart}


def test_evaluation_of_a_stored_policy(run):
    task, root = run
    command(run, "evaluate", f"evaluate_{task}.source.checkpoint=start")
    summary = read_json(root / "08_reporting" / f"evaluate_{task}" / "default" / "eval_summary.json")
    trained = read_json(root / "08_reporting" / f"train_{task}" / "default" / "eval_summary.json")
    assert summary["source"] == {"run": f"train_{task}", "run_id": "default", "checkpoint": "start", "iteration": None}
    assert {**summary["rows"][0], "policy": ""} == {**trained["rows"][0], "policy": ""}
    assert summary["rows"][-3:] == trained["rows"][-3:]
    assert (root / "08_reporting" / f"evaluate_{task}" / "default" / "report.html").is_file()


@pytest.mark.parametrize("imitate", ["teacher", "optimal"])
def test_control(run, imitate):
    task, root = run
    own = (f"control_{task}.source.run_id=default", f"control_{task}.imitate={imitate}", f"control_{task}.share=0.2")
    command(run, "control", *own, f"run_id={imitate}")
    summary = read_json(root / "08_reporting" / f"control_{task}" / imitate / "eval_summary.json")
    assert [(row["policy"], row["mode"]) for row in summary["rows"]] == [
        (f"control_{imitate}", "sampled"),
        (f"control_{imitate}", "greedy"),
    ]
    manifest = read_json(root / "06_models" / f"control_{task}" / imitate / "policy" / "manifest.json")
    assert manifest["fingerprint"]["control.imitate"] == imitate and manifest["budget"]["steps"] >= 1


def test_pre_flight(run):
    task, root = run
    output = command(run, "check", f"check_{task}.timed=false")
    assert f"Pre-flight of train_{task}" in output
    table = read_json(root / "08_reporting" / f"check_{task}" / "default" / "table.json")
    checks = {(check["group"], check["name"]): check for check in table["checks"]}
    assert table["states"]["failure"] == 0
    assert checks["data", "stored prompts"]["state"] == "ok"
    assert checks["run", f"train_{task}/default"]["found"].startswith("finished after 3 iterations")
    assert "expert plausible" in checks["own code", "one episode"]["found"]
