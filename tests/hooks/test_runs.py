"""Runs: their folders, their locks, and `fresh`."""

from __future__ import annotations

import json
from contextlib import closing, nullcontext
from pathlib import Path

import pytest
from click.testing import CliRunner

from geo_sokoban_pipeline.__main__ import runs as runs_command
from geo_sokoban_pipeline.config import ParameterError
from geo_sokoban_pipeline.hooks.runs import run_names
from geo_sokoban_pipeline.hub import PolicyUnavailableError
from geo_sokoban_pipeline.runs.folders import JOURNAL, RunFolders
from geo_sokoban_pipeline.runs.lock import LOCK_FILE, RunLock, RunLockedError
from geo_sokoban_pipeline.runs.storage import MANIFEST

LAYERS = ("06_models", "07_model_output", "08_reporting")


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
    elsewhere = fill(tmp_path / "elsewhere")
    (folders.models / "checkpoints").symlink_to(tmp_path / "elsewhere")
    (folders.outputs / "metrics").symlink_to(tmp_path / "nowhere")
    with closing(RunLock(folders.models)):
        folders.clear()
    left = [path for path in tmp_path.rglob("*") if path.is_file() or path.is_symlink()]
    assert sorted(left) == sorted([*elsewhere, folders.models / LOCK_FILE])


def test_fresh_clears_one_run_id_of_the_called_pipeline_only(project):
    doomed = fill(*(project.folder(layer) for layer in LAYERS))
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
    project.run("data_sokoban", params={"fresh": True})
    assert all(path.is_file() for path in kept)
    assert (project.folder("07_model_output") / "metrics" / "iter=00001.json").is_file()


def stored(project, *runs):
    """Contents of all files of runs, but for locks and Python's own copies of the code it imports."""
    root = project.path / "data"
    found = (path for layer in LAYERS for path in (root / layer).rglob("*") if path.is_file())
    return {
        path.relative_to(root): path.read_bytes()
        for path in found
        if path.name != LOCK_FILE
        and path.parent.name != "__pycache__"
        and (not runs or path.parts[len(root.parts) + 1] in runs)
    }


def store_run(project, run="train_sokoban"):
    project.run(run)
    fill(*(project.folder(layer, run=run) / "final" for layer in LAYERS))
    return stored(project)


# Paths, names and own code that are not there, by kind.
WRONG = {
    "policy": {"train_sokoban": {"policy": {"source": "folder", "path": "nothere"}}},
    "policy of the hub": {"train_sokoban": {"policy": {"source": "hub", "path": "nobody/nothere"}}},
    "levels": {"sokoban": {"source": "file", "file": {"path": "nothere.xsb@[0:9]"}}},
    "data set of the hub": {"sokoban": {"source": "hub", "hub": {"dataset": "nobody/nothere"}}},
    "reward": {"train_sokoban": {"reward": {"function": "nothere.py"}}},
    "environment": {"train_sokoban": {"env": {"factory": "nothere.py:make"}}},
    "rollout": {"train_sokoban": {"rollout": {"function": "{here}/own.py"}}},
    "expert": {"train_sokoban": {"warm_start": {"teacher": {"factory": "nothere.py"}}}},
    "the run itself": {"train_sokoban": {"policy": {"source": "folder", "path": "{models}/final_policy"}}},
    "own code in the run itself": {"train_sokoban": {"reward": {"function": "{models}/final/reward.py"}}},
}


def test_fresh_changes_nothing_where_an_input_is_not_there(project, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    store_run(project)
    models = project.folder("06_models")
    (models / "final_policy").mkdir()
    (models / "final_policy" / "config.json").write_text('{"model_type": "qwen3_vl"}')
    (models / "final_policy" / "model.safetensors").touch()
    (models / "final" / "reward.py").write_text("def reward(result, args):\n    return {'reward': 0.0}\n")
    (project.path / "own.py").write_text("def other(): pass\n")
    before, seen = stored(project), len(project.seen)
    for what, wrong in WRONG.items():
        text = json.dumps(wrong).replace("{here}", str(project.path)).replace("{models}", str(models))
        with pytest.raises((ParameterError, OSError, PolicyUnavailableError)):
            project.run("train_sokoban", params=json.loads(text) | {"fresh": True})
        assert stored(project) == before, what
    assert len(project.seen) == seen


@pytest.mark.parametrize(
    ("run", "reader", "params"),
    [
        ("train_sokoban", "update_sokoban", {}),  # it works on train_sokoban/default
        ("train_sokoban", "train_sokoban", {"seed": 9}),  # it goes on with the old run
    ],
)
def test_a_run_that_fails_before_its_first_result_leaves_the_old_one(project, run, reader, params):
    before = store_run(project, run)
    project.fail_at = 1
    for _ in range(2):
        with pytest.raises(RuntimeError):
            project.run(run, params={"fresh": True, "seed": 1})
        assert not (project.folder("08_reporting", run=run) / "final").exists()
        (project.folder("06_models", run=run) / "policy").mkdir()
    project.fail_at = None
    # Commands on other run ids leave it alone; whichever names this one puts it back.
    project.run(run, params={"run_id": "other"})
    assert not (project.folder("08_reporting", run=run) / "final").exists()
    project.run(reader, params=params)
    kept = {name: text for name, text in before.items() if name.name != "commands.json"}
    assert kept.items() <= stored(project, run).items()
    assert not (project.folder("06_models", run=run) / "policy").exists()


def test_fresh_of_several_runs_replaces_each(project):
    for run in ("train_sokoban", "update_sokoban"):
        store_run(project, run)
    before = stored(project)
    project.fail_at = 1
    with pytest.raises(RuntimeError):
        project.run("train_sokoban", "update_sokoban", params={"fresh": True})
    project.fail_at = None
    with pytest.raises(OSError, match="nothere"):
        project.run("train_sokoban", "update_sokoban", params=WRONG["policy"])
    assert stored(project) == before


@pytest.mark.parametrize(
    ("option", "selection", "reads"),
    [
        ("--from-nodes", {"from_nodes": ["train_sokoban.loop"]}, True),
        ("--nodes", {"node_names": ["train_sokoban.loop"]}, True),
        ("--tags", {"tags": ["late"]}, True),
        ("--tags", {"tags": ["early"]}, False),
        ("--nodes", {"node_names": ["train_sokoban.prepare"]}, False),
    ],
)
def test_fresh_refuses_nodes_that_read_what_it_replaces(project, option, selection, reads):
    files = fill(project.folder("06_models"))
    with pytest.raises(ParameterError, match=f"fresh=true.*{option}") if reads else nullcontext():
        project.run("train_sokoban", params={"fresh": True}, **selection)
    assert all(path.is_file() == reads for path in files)


def test_a_command_warns_of_what_is_missing_in_the_run_that_it_reads(project, caplog):
    project.run("train_sokoban")  # here without checkpoints
    caplog.clear()
    project.run("update_sokoban")
    said = "train_sokoban/default: episodes or metrics of iterations up to 1 are stored, but there is no checkpoint"
    assert [record.levelname for record in caplog.records if said in record.getMessage()] == ["WARNING"]


def test_run_in_use_is_not_touched(project):
    kept = fill(project.folder("06_models"))
    with closing(RunLock(project.folder("06_models"))):
        with pytest.raises(RunLockedError):
            project.run("train_sokoban", params={"fresh": True})
        assert project.seen == []
        assert all(path.is_file() for path in kept)
        project.run("train_sokoban", params={"run_id": "beside"})
        project.run("update_sokoban")


# The list of runs on the command line


def listed(root, *words, **options):
    return CliRunner().invoke(runs_command, ["--data-root", str(root), *words], **options)


def test_runs_are_listed_removed_and_restored(tmp_path):
    kept, doomed = (RunFolders.of(tmp_path, "train_sokoban", name) for name in ("kept", "doomed"))
    for folders in (kept, doomed, RunFolders.of(tmp_path, "evaluate_sokoban", "empty")):
        RunLock(folders.models).close()
    fill(kept.models, doomed.models, doomed.outputs)
    lines = listed(tmp_path).output.splitlines()
    assert [[word for word in ("kept", "doomed", "empty") if word in line] for line in lines if "sokoban" in line] == [
        ["doomed"],
        ["kept"],
    ]
    for words, typed, why in (
        (["remove", "train_sokoban/doomed"], "no\n", "nothing was deleted"),
        (["remove", "train_sokoban/doomed"], "", ""),  # nobody is there to type
        (["remove", "train_sokoban/missing"], "", "doomed, train_sokoban/kept"),
        (["restore", "train_sokoban/doomed"], "", "no run is set aside"),
    ):
        done = listed(tmp_path, *words, input=typed)
        assert done.exit_code == 1 and why in done.output and doomed.outputs.is_dir()
    with closing(RunLock(doomed.models)):
        done = listed(tmp_path, "remove", "train_sokoban/kept", "train_sokoban/doomed", "--yes")
        assert done.exit_code == 1 and "in use" in done.output and not kept.is_empty
        assert "running" in listed(tmp_path).output
    assert "[/x]" in listed(tmp_path / "[/x]").output  # no markup
    before = contents_of(doomed)
    doomed.set_aside()
    assert "set aside" in listed(tmp_path).output
    assert listed(tmp_path, "restore", "train_sokoban/doomed").exit_code == 0
    assert contents_of(doomed) == before
    doomed.set_aside()
    assert listed(tmp_path, "remove", "train_sokoban/doomed", input="delete\n").exit_code == 0
    assert not any(folder.exists() for folder in doomed.layers) and not kept.is_empty


def test_the_list_of_runs_reads_the_data_root_as_all_commands_do(tmp_path, monkeypatch):
    """`~` that no shell has expanded."""
    fill(RunFolders.of(tmp_path / "runs", "train_sokoban", "mine").models)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("GEO_SOKOBAN_DATA_ROOT", "~/runs")
    assert "mine" in CliRunner().invoke(runs_command, []).output
    assert "mine" in listed("~/runs").output


def test_restore_never_deletes(tmp_path):
    """The new run has its first checkpoint, but the old one is not deleted yet; or the journal cannot be read."""
    folders = RunFolders.of(tmp_path, "train_sokoban", "x")
    fill(folders.models, folders.outputs)
    folders.set_aside()
    fill(folders.models / "checkpoints" / "iter=00000")
    (folders.models / "checkpoints" / "iter=00000" / MANIFEST).write_text('{"files": {}}')
    for state, journal in (("interrupted", None), ("damaged", "{"), ("damaged", "[]"), ("damaged", "{}")):
        if journal is not None:
            (folders.models / JOURNAL).write_text(journal)
        before = contents_of(folders)
        assert state in listed(tmp_path).output
        done = listed(tmp_path, "restore", "train_sokoban/x")
        assert done.exit_code == 1 and done.output.startswith("Error: ") and contents_of(folders) == before
    # Killed while the old run was moved: what lies in its place is the old run's too.
    (folders.models / JOURNAL).write_text('{"state": "moving"}')
    (folders.outputs / "file.json").mkdir()  # a place that is taken
    assert listed(tmp_path, "restore", "train_sokoban/x").output.startswith("Error: [Errno ")
    (folders.outputs / "file.json").rmdir()
    assert "set aside" in listed(tmp_path).output
    assert listed(tmp_path, "restore", "train_sokoban/x").exit_code == 0
    assert (folders.models / "file.json").is_file() and (folders.models / "checkpoints").is_dir()


def contents_of(folders):
    files = (path for layer in folders.layers for path in layer.rglob("*") if path.is_file() and path.name != LOCK_FILE)
    return {path: path.read_bytes() for path in files}


def test_all_data_are_removed_but_the_files_of_the_checkout(tmp_path):
    roots = [tmp_path, tmp_path / "studies" / "lengths", tmp_path / "studies" / "lengths" / "8x8"]
    members = [RunFolders.of(root, "train_sokoban", "x") for root in roots]
    for folders in members:
        fill(folders.models, folders.outputs)
    fill(tmp_path / "05_model_input" / "sokoban", tmp_path / "mlartifacts")
    kept = [tmp_path / "README.md", tmp_path / "05_model_input" / ".gitkeep", tmp_path / "mythesis.db"]
    kept += fill(tmp_path / "mythesis", tmp_path / "05_mythesis")
    for path in (*kept, tmp_path / "mlflow.db", tmp_path / "mlflow.db-wal"):
        path.touch()
    assert listed(tmp_path, "remove", "--all", input="y\n").exit_code == 1
    for folders in members:
        with closing(RunLock(folders.models)):
            assert listed(tmp_path, "remove", "--all", "--yes").exit_code == 1
    assert (tmp_path / "mlflow.db").exists() and not any(folders.is_empty for folders in members)
    done = listed(tmp_path, "remove", "--all", "--yes")
    assert done.exit_code == 0 and "mlartifacts" in done.output and "mythesis" not in done.output
    assert sorted(path for path in tmp_path.rglob("*") if path.is_file()) == sorted(kept)
    assert listed(tmp_path, "remove", "--all").exit_code == 0  # it asks for nothing where nothing is stored


def test_data_root_that_cannot_be_written_is_named(project):
    (project.path / "data").write_text("a file in the way")
    with pytest.raises(OSError, match="data"):
        project.run("train_sokoban")
    assert project.seen == []
