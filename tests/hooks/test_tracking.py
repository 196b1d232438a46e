"""MLflow sees every iteration once, and its failures stop nothing."""

from __future__ import annotations

import json
import logging

import pytest

from geo_sokoban_pipeline.hooks import tracking
from geo_sokoban_pipeline.hooks.mlflow_run import NOTE, flatten
from geo_sokoban_pipeline.hooks.tracking import artifacts_of
from geo_sokoban_pipeline.run_store import RunFolders


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


def test_switched_off_it_leaves_no_trace(project):
    project.run("train_sokoban")
    assert not (project.folder("06_models") / NOTE).exists()
    assert not (project.path / "data" / "mlflow.db").exists()


def test_failure_of_the_store_is_a_warning(project, caplog, monkeypatch):
    def refuse_connection(*_: object) -> None:
        raise OSError("no store today")

    monkeypatch.setattr(tracking, "connect", refuse_connection)
    with caplog.at_level(logging.WARNING):
        project.run("train_sokoban", params={"tracking": {"enabled": True}})
    assert "this command goes on untracked. OSError: no store today" in caplog.text
    assert (project.folder("07_model_output") / "metrics" / "iter=00001.json").is_file()


def test_story_of_one_run(project):
    from mlflow.tracking import MlflowClient

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
    (project.folder("07_model_output") / "metrics" / "iter=00007.json").write_text('{"iteration": 7}')
    report = project.folder("08_reporting") / "report.html"
    report.parent.mkdir(parents=True)
    report.write_text("<html>")
    project.run("train_sokoban", params=on | more)
    assert json.loads((project.folder("06_models") / NOTE).read_text()) == note
    finished = client.get_run(note["mlflow_run_id"])
    assert finished.info.status == "FINISHED"
    assert finished.data.tags["continued_with.train_sokoban.loop.iterations"] == "33"
    history = client.get_metric_history(note["mlflow_run_id"], "iteration")
    assert sorted(point.step for point in history) == [0, 1, 2, 7]
    rewards = client.get_metric_history(note["mlflow_run_id"], "rollout/raw_reward")
    assert sorted((point.step, point.value) for point in rewards) == [(0, 0.0), (1, 0.5), (2, 1.0)]
    assert [file.path for file in client.list_artifacts(note["mlflow_run_id"], "report")] == ["report/report.html"]

    # `fresh` begins a new one and leaves the old one as it is.
    project.run("train_sokoban", params={**on, "fresh": True})
    fresh = json.loads((project.folder("06_models") / NOTE).read_text())
    assert fresh["mlflow_run_id"] != note["mlflow_run_id"]
    assert client.get_run(note["mlflow_run_id"]).info.status == "FINISHED"
