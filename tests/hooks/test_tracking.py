"""MLflow sees every iteration once, and its failures stop nothing."""

from __future__ import annotations

import json
import shutil
from unittest.mock import MagicMock

import pytest
from kedro.framework.project import configure_project
from mlflow.tracking import MlflowClient

from geo_sokoban_pipeline.hooks.tracking import (
    NOTE,
    MlflowRun,
    artifacts_of,
    evaluation_points,
    evaluation_tags,
    flatten,
    parameters_of,
    points_of,
)
from geo_sokoban_pipeline.parameters import ProjectParameters
from geo_sokoban_pipeline.runs.folders import RunFolders
from geo_sokoban_pipeline.runs.lock import RunLock
from geo_sokoban_pipeline.runs.storage import write_json
from hooks.conftest import row


def test_flatten():
    values = {"a": {"b": 1, "c": {"d": "text"}}, "e": [1, 2], "f": None, "g": {}, "h": True}
    assert flatten(values) == {"a.b": "1", "a.c.d": "text", "e": "[1, 2]", "f": "null", "g": "{}", "h": "true"}


def test_artifacts_are_reports_and_the_newest_trajectories(tmp_path):
    folders = RunFolders.of(tmp_path, "train_sokoban", "default")
    names = ["trajectories/iter=00000/part-000.parquet", "trajectories/iter=00010/part-000.parquet"]
    for path in (folders.reports / "report.html", *(folders.outputs / name for name in names)):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("x")
    assert artifacts_of(folders, sample=False) == [(folders.reports / "report.html", "report")]
    assert artifacts_of(folders, sample=True)[1:] == [(folders.outputs / names[1], "trajectories/iter=00010")]


def test_story_of_one_run(project):
    project.run("train_sokoban", params={"run_id": "untracked"})
    assert not (project.folder("06_models", run_id="untracked") / NOTE).exists()
    assert not (project.path / "data" / "mlflow.db").exists()
    on = {"tracking": {"enabled": True}}
    project.fail_at = 1
    with pytest.raises(RuntimeError, match="out of luck"):
        project.run("train_sokoban", params=on)
    note = json.loads((project.folder("06_models") / NOTE).read_text())
    client = MlflowClient(tracking_uri=f"sqlite:///{project.path}/data/mlflow.db")
    failed = client.get_run(note["mlflow_run_id"])
    assert (failed.info.status, failed.info.run_name) == ("FAILED", "train_sokoban/default")
    assert failed.data.tags["error"] == "RuntimeError: out of luck"
    assert failed.data.params["seed"] == "0"
    assert failed.data.params["train_sokoban.loop.iterations"]
    assert not any(name.startswith(("update_sokoban", "tracking", "study")) for name in failed.data.params)

    # Continued, with one more iteration: the same MLflow run. An iteration that only lies on the disk is sent as well.
    project.fail_at, project.iterations = None, 3
    more = {"train_sokoban": {"loop": {"iterations": 33}}}
    (project.folder("07_model_output") / "metrics" / "iter=00007.json").write_text(
        '{"iteration": 7, "rollout/raw_reward": 3.5}'
    )
    report = project.folder("08_reporting") / "report.html"
    report.parent.mkdir(parents=True)
    report.write_text("<html>")
    project.run("train_sokoban", params=on | more)
    assert json.loads((project.folder("06_models") / NOTE).read_text()) == note
    finished = client.get_run(note["mlflow_run_id"])
    assert finished.info.status == "FINISHED"
    assert finished.data.tags["continued_with.train_sokoban.loop.iterations"] == "33"
    rewards = client.get_metric_history(note["mlflow_run_id"], "rollout/raw_reward")
    assert sorted((point.step, point.value) for point in rewards) == [(0, 0.0), (1, 0.5), (2, 1.0), (7, 3.5)]
    assert set(finished.data.metrics) == {"rollout/raw_reward", "rollout/zero_std/count"}
    assert [file.path for file in client.list_artifacts(note["mlflow_run_id"], "report")] == ["report/report.html"]

    # `fresh` begins a new one and leaves the old one as it is.
    project.run("train_sokoban", params={**on, "fresh": True})
    fresh = json.loads((project.folder("06_models") / NOTE).read_text())
    assert fresh["mlflow_run_id"] != note["mlflow_run_id"]
    assert client.get_run(note["mlflow_run_id"]).info.status == "FINISHED"


def test_rows_become_points():
    row = {
        "iteration": 0,
        "policy_version": 0,
        "rollout/raw_reward": 0.5,
        "rollout/zero_std/count_-0.1": 3.0,
        "rollout/zero_std/count_1.0": 2.0,
        "train/kl_loss": None,
        "eval/start/sampled_solve_rate": 0.4,
        "eval/validation/sampled_solve_rate": 0.6,
    }
    assert points_of(row) == [
        ("rollout/raw_reward", 0.5, 0),
        ("eval/validation/sampled_solve_rate", 0.4, 0),
        ("eval/validation/sampled_solve_rate", 0.6, 1),
        ("rollout/zero_std/count", 5.0, 0),
    ]
    assert points_of({"iteration": 3, "eval/validation/x": 0.5}) == [("eval/validation/x", 0.5, 4)]


SUMMARY = {
    "policies": ["warm_start", "final"],
    "rows": [
        row("warm_start", "sampled", 0.4, 0.37, 0.45),
        row("final", "sampled", 0.7, 0.6, 0.8),
        row("final", "greedy", 0.8),
        row("final_blank", "sampled", 0.1),
        row("teacher (direct)", "-", 1.0),
    ],
}


def test_an_evaluation_becomes_lines_and_tags():
    assert evaluation_points(SUMMARY, 150) == [
        ("eval/final/sampled_solve_rate", 0.4, 0),
        ("eval/final/sampled_solve_rate", 0.7, 150),
        ("eval/final/greedy_solve_rate", 0.8, 150),
    ]
    assert evaluation_tags(SUMMARY) == {
        "eval.final.warm_start.sampled.interval": "0.3700–0.4500",
        "eval.final.final.sampled.interval": "0.6000–0.8000",
        "eval.final.final_blank.sampled": "0.1000",
        "eval.final.teacher _direct_": "1.0000",
    }
    assert evaluation_points({}, 3) == [] and evaluation_tags({}) == {}
    # An evaluation that names its policy stands at the version of that policy, whatever the command asks for.
    checkpoints = {"final": {"iteration": 39, "policy_version": 40, "hash": "abc"}}
    named = {**SUMMARY, "checkpoints": checkpoints, "data_id": "6x6-1box-0af3", "prompts_hash": "def"}
    assert evaluation_points(named, 150)[1] == ("eval/final/sampled_solve_rate", 0.7, 40)
    assert {
        "eval.final.data_id": "6x6-1box-0af3",
        "eval.final.prompts_hash": "def",
        "eval.final.final.policy": "abc",
        "eval.final.final.policy.iteration": "39",
        "eval.final.final.policy.policy_version": "40",
    }.items() <= evaluation_tags(named).items()
    # A policy may be called by a long path, which MLflow would take in no tag.
    folder = f"../{'a' * 300}/../final_policy"
    found = evaluation_tags({"policies": [folder], "checkpoints": {folder: checkpoints["final"]}, "rows": []})
    assert len(found) == 3 and all(len(name) < 250 and "/" not in name for name in found)


def test_only_parameters_that_are_in_force():
    configure_project("geo_sokoban_pipeline", preserve_logging=True)
    parameters = ProjectParameters()
    flat = flatten(parameters_of(parameters, "train_sokoban"))
    assert not any("server" in name or ".hub." in name or ".file." in name for name in flat)
    assert flat["train_sokoban.policy.tiny.hidden"] and flat["train_sokoban.task"] == "sokoban"
    given = {"train_geo3k": {"policy": {"source": "hub", "path": "a/b"}, "rollout": {"engine": "sglang"}}}
    given["geo3k"] = {"source": "hub"}
    flat = flatten(parameters_of(ProjectParameters.model_validate(given), "train_geo3k"))
    assert not any(".tiny." in name or "problems" in name for name in flat)
    assert flat["geo3k.hub.dataset"] and flat["train_geo3k.task"] == "geo3k"
    assert any(name.startswith("train_geo3k.rollout.server.") for name in flat)


def test_a_note_holds_no_login(tmp_path):
    client = MagicMock()
    client.create_run.return_value.info.run_id = "1"
    client.get_metric_history.return_value = []
    for uri in ("postgresql://u:pw@h/db", "postgresql://u:p/w@x@h/db", "postgresql://u@h/db", "postgresql://h/db"):
        MlflowRun.create(client, "2", uri, tmp_path, "name")
        assert json.loads((tmp_path / NOTE).read_text())["tracking_uri"] == "postgresql://h/db"


def test_a_run_of_a_moved_data_root_goes_on_beside_it(tracked):
    """The folder is moved between two commands: the run goes on in a new experiment, with all that it had."""
    on = {"tracking": {"enabled": True}}
    report = tracked.folder("08_reporting") / "report.html"
    report.parent.mkdir(parents=True)
    report.write_text("<html>")
    tracked.run("train_sokoban", params=on)
    first = json.loads((tracked.folder("06_models") / NOTE).read_text())
    assert first["tracking_uri"] == "mlflow.db"
    moved = tracked.path.with_name("moved")
    shutil.move(tracked.path / "data", moved / "data")
    shutil.copytree(tracked.path / "conf", moved / "conf")
    tracked.path = moved
    tracked.run("train_sokoban", params=on)
    second = json.loads((tracked.folder("06_models") / NOTE).read_text())
    client = MlflowClient(tracking_uri=f"sqlite:///{moved}/data/mlflow.db")
    before, run = (client.get_run(note["mlflow_run_id"]) for note in (first, second))
    assert run.info.artifact_uri.startswith((moved / "data/mlartifacts").as_uri())
    assert client.download_artifacts(run.info.run_id, "report/report.html")
    assert before.data.metrics.keys() == run.data.metrics.keys() and run.data.params == before.data.params
    names = {found.experiment_id: found.name for found in client.search_experiments()}
    name = names[run.info.experiment_id]
    assert names[before.info.experiment_id] == f"{name} before move {before.info.experiment_id}"
    # Nothing is written to the old place any more, and the next command finds the new one.
    assert not report.parents[3].exists()
    tracked.run("train_sokoban", params=on)
    assert json.loads((tracked.folder("06_models") / NOTE).read_text()) == second


def test_the_next_command_closes_what_was_killed(tracked):
    """A run whose process is gone is KILLED; one that works, and one of another data root, stay as they are."""
    on = {"tracking": {"enabled": True}}
    tracked.run("train_sokoban", params={**on, "run_id": "alive"})
    client = MlflowClient(tracking_uri=f"sqlite:///{tracked.path}/data/mlflow.db")
    note = json.loads((tracked.folder("06_models", run_id="alive") / NOTE).read_text())
    found = {"alive": note["mlflow_run_id"]}
    for name in ("killed", "elsewhere"):
        tags = {"run": "train_sokoban", "run_id": name}
        found[name] = client.create_run(note["experiment_id"], tags=tags).info.run_id
    write_json(tracked.folder("06_models", run_id="killed") / NOTE, {**note, "mlflow_run_id": found["killed"]})
    client.update_run(found["alive"], status="RUNNING")
    lock = RunLock(tracked.folder("06_models", run_id="alive"))
    tracked.run("train_sokoban", params={**on, "run_id": "third"})
    lock.close()
    states = {name: client.get_run(identifier).info.status for name, identifier in found.items()}
    assert states == {"killed": "KILLED", "alive": "RUNNING", "elsewhere": "RUNNING"}
