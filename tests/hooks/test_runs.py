"""Runs: their folders, their locks, and `fresh`."""

from __future__ import annotations

from pathlib import Path

import pytest

from geo_sokoban_pipeline.config import ParameterError
from geo_sokoban_pipeline.hooks.runs import run_names
from geo_sokoban_pipeline.runs.folders import RunFolders
from geo_sokoban_pipeline.runs.lock import LOCK_FILE, RunLock, RunLockedError


def fill(*folders: Path) -> list[Path]:
    """Put a file and a folder into each folder and return the files."""
    files = []
    for folder in folders:
        (folder / "inner").mkdir(parents=True)
        for path in (folder / "file.json", folder / "inner" / "file.json"):
            path.write_text("{}")
            files.append(path)
    return files


def test_runs_are_namespaces_with_the_name_of_a_pipeline(project):
    registered = project.pipelines()
    assert run_names(registered["train_sokoban"], registered) == ["train_sokoban"]
    assert run_names(registered["data_sokoban"], registered) == []
    both = registered["train_sokoban"] + registered["update_sokoban"]
    assert run_names(both, registered) == ["train_sokoban", "update_sokoban"]


def test_clear_keeps_the_lock_and_nothing_else(tmp_path):
    folders = RunFolders.of(tmp_path, "train_sokoban", "default")
    fill(folders.models, folders.outputs, folders.reports)
    lock = RunLock(folders.models)
    folders.clear()
    lock.close()
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == [folders.models / LOCK_FILE]


def test_fresh_clears_one_run_id_of_the_called_pipeline_only(project):
    doomed = fill(*(project.folder(layer) for layer in ("06_models", "07_model_output", "08_reporting")))
    kept = fill(
        project.folder("06_models", run_id="other"),
        project.folder("06_models", run="update_sokoban"),
        project.folder("08_reporting", run="update_sokoban"),
        project.folder("05_model_input"),
    )
    project.run("train_sokoban")
    assert all(path.is_file() for path in doomed)
    project.run("train_sokoban", params={"fresh": True})
    assert not any(path.exists() for path in doomed)
    assert all(path.is_file() for path in kept)
    assert (project.folder("07_model_output") / "metrics" / "iter=00001.json").is_file()


def test_fresh_of_a_data_pipeline_clears_nothing(project):
    kept = fill(project.folder("06_models"))
    project.run("data_sokoban", params={"fresh": True})
    assert all(path.is_file() for path in kept)


def test_fresh_refuses_a_start_in_the_middle(project):
    kept = fill(project.folder("06_models"))
    with pytest.raises(ParameterError, match="fresh=true.*--from-nodes"):
        project.run("train_sokoban", params={"fresh": True}, from_nodes=["train_sokoban.loop"])
    assert all(path.is_file() for path in kept)


def test_run_in_use_is_not_touched(project):
    kept = fill(project.folder("06_models"))
    lock = RunLock(project.folder("06_models"))
    with pytest.raises(RunLockedError):
        project.run("train_sokoban", params={"fresh": True})
    assert project.seen == []
    assert all(path.is_file() for path in kept)
    project.run("train_sokoban", params={"run_id": "beside"})
    project.run("update_sokoban")
    lock.close()


@pytest.mark.parametrize("failure", [RuntimeError("out of luck"), KeyboardInterrupt()])
def test_failed_or_interrupted_run_can_be_repeated_in_the_same_process(project, failure):
    project.fail_at, project.failure = 1, failure
    with pytest.raises(type(failure)):
        project.run("train_sokoban")
    project.fail_at = None
    project.run("train_sokoban")
    RunLock(project.folder("06_models")).close()


def test_data_root_that_cannot_be_written_is_named(project):
    (project.path / "data").write_text("a file in the way")
    with pytest.raises(OSError, match="data"):
        project.run("train_sokoban")
    assert project.seen == []
