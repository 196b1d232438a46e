"""Which commands have worked on a run."""

from __future__ import annotations

import pytest

from geo_sokoban_pipeline.runs.lock import RunLock, RunLockedError
from geo_sokoban_pipeline.runs.provenance import read_commands


def outcomes(project):
    return [entry["outcome"] for entry in read_commands(project.folder("07_model_output"))]


def test_every_command_of_a_run_leaves_its_time(project, monkeypatch):
    monkeypatch.setattr("geo_sokoban_pipeline.runs.provenance.RENEWAL_SECONDS", 0.0)
    project.fail_at = 1
    project.failure = KeyboardInterrupt()  # no hook of Kedro sees it, as with a kill
    with pytest.raises(KeyboardInterrupt):
        project.run("train_sokoban")
    (killed,) = read_commands(project.folder("07_model_output"))
    assert killed["outcome"] == "running" and killed["seconds"] > 0 and killed["cores"] >= 1
    project.failure = RuntimeError("out of luck")
    with pytest.raises(RuntimeError, match="out of luck"):
        project.run("train_sokoban")
    project.fail_at = None
    project.run("train_sokoban", "update_sokoban")
    assert outcomes(project) == ["running", "failed", "finished"]
    assert len(read_commands(project.folder("07_model_output", run="update_sokoban"))) == 1
    # A command that is refused has not worked on the run; a run that is cleared has no past.
    lock = RunLock(project.folder("06_models"))
    with pytest.raises(RunLockedError):
        project.run("train_sokoban")
    lock.close()
    assert outcomes(project) == ["running", "failed", "finished"]
    project.run("train_sokoban", params={"fresh": True})
    assert outcomes(project) == ["finished"]


def test_a_folder_that_cannot_be_written_stops_nothing(project, caplog):
    project.folder("07_model_output").parent.mkdir(parents=True)
    project.folder("07_model_output").write_text("a file where a folder belongs")
    with pytest.raises(Exception, match="metrics"):  # what the run itself writes there
        project.run("train_sokoban")
    assert "the run's time is not noted" in caplog.text
