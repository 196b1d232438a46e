"""What trackers get beside metrics: inputs, lineage, tables, the machine; MLflow and Weights & Biases the same."""

from __future__ import annotations

import json
import os
import struct
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pandas as pd
import pytest
from mlflow.tracking import MlflowClient

from builders import CONTEXT, make_trajectories
from geo_sokoban_pipeline.config.grpo import SourceOptions
from geo_sokoban_pipeline.hooks import tracking, wandb_run
from geo_sokoban_pipeline.hooks.tracked import (
    PromptTable,
    artifact_folder,
    describe_prompts,
    episode_table,
    policy_table,
    prompt_context,
    read_lineage,
    source_lineage,
)
from geo_sokoban_pipeline.hooks.tracking import NOTE, MlflowRun, connect
from geo_sokoban_pipeline.hooks.wandb_run import WandbRun, is_wanted, read_sent
from geo_sokoban_pipeline.parameters import TrackingOptions
from geo_sokoban_pipeline.runs.fingerprint import hash_files, hash_rows
from geo_sokoban_pipeline.runs.folders import MLFLOW_NOTE, WANDB_NOTE, WANDB_SENT, RunFolders
from geo_sokoban_pipeline.runs.storage import read_manifest, write_folder
from geo_sokoban_pipeline.tasks import task_or_plain
from geo_sokoban_pipeline.trajectories.index import Place, build_index
from geo_sokoban_pipeline.trajectories.types import trajectories_to_table

TABLE = PromptTable("sokoban.prompts", "training", "d" * 32, 3, Path("/data/prompts.parquet"), "id1", "generated")


KEY = {"WANDB_API_KEY": "k" * 40}
ROOT = "runs #1 50%25 ü?x a%2Fb"  # a data root with all that a URI reads otherwise


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    """A folder, and in it a client of the store of its data root, a run of that store, and its address."""
    folder = tmp_path_factory.mktemp("store")
    client, experiment, uri = connect(TrackingOptions(), folder / ROOT)
    (folder / "models").mkdir()
    return folder, client, MlflowRun.create(client, experiment, uri, folder / "models", "name"), uri


def test_prompts_are_described_by_their_content():
    frame = pd.DataFrame([{"task_id": "a", "level": "#"}, {"task_id": "b", "level": "."}])
    note = {"id": "abc", "run": {"params": {"sokoban": {"source": "generated"}}}}
    found = describe_prompts("sokoban.eval_prompts", frame, Path("/root"), note)
    assert found == PromptTable(
        "sokoban.eval_prompts",
        "evaluation",
        hash_rows(frame.to_dict("records")),
        2,
        Path("/root/05_model_input/sokoban/abc/eval_prompts.parquet"),
        "abc",
        "generated",
    )
    assert prompt_context("sokoban.prompts") == ("sokoban", "training")
    assert prompt_context("sokoban.raw_levels") is None and prompt_context("train_sokoban.prompts") is None


@pytest.mark.parametrize(
    ("uri", "folder"),
    [
        (None, "/a b/mlartifacts"),
        ("sqlite:////x/y.db", "/x/mlartifacts"),
        ("sqlite:////x%20y/m.db?timeout=3", "/x y/mlartifacts"),
        ("sqlite+pysqlite:////x/m.db", "/x/mlartifacts"),
        ("sqlite:///m.db", str(Path.cwd() / "mlartifacts")),
        ("sqlite:///:memory:", None),
        ("http://127.0.0.1:5000", None),
        ("postgresql://h/db", None),
    ],
)
def test_artifacts_lie_beside_a_database_in_a_file(uri, folder):
    found = artifact_folder(TrackingOptions(uri=uri), Path("/a b"))
    assert found == (None if folder is None else Path(folder))


def test_a_run_holds_inputs_tables_and_files_once_in_the_data_root(store, tmp_path):
    folder, client, run, _ = store
    for _ in range(2):
        run.log_input(TABLE)
    (found,) = client.get_run(run.mlflow_run_id).inputs.dataset_inputs
    assert (found.dataset.name, found.dataset.digest) == ("sokoban.prompts", "d" * 32)
    assert json.loads(found.dataset.source) == {"uri": "file:///data/prompts.parquet"}
    assert json.loads(found.dataset.profile) == {"num_rows": 3, "data_id": "id1", "source": "generated"}
    assert [(tag.key, tag.value) for tag in found.tags] == [("mlflow.data.context", "training")]
    for names, rates in ((["a", "b"], [0.1, None]), (["a", "c"], [0.5, 1.0])):
        run.log_table("evaluation/policies", {"policy": names, "solve_rate": rates})
    file = client.download_artifacts(run.mlflow_run_id, "evaluation/policies.json", str(tmp_path))
    table = json.loads(Path(file).read_text())
    assert (table["columns"], table["data"]) == (["policy", "solve_rate"], [["a", 0.5], ["c", 1.0]])
    listed = client.get_run(run.mlflow_run_id).data.tags["mlflow.loggedArtifacts"]
    assert json.loads(listed) == [{"path": "evaluation/policies.json", "type": "table"}]
    run.log_file(Path(file), "report")
    assert {path.name for path in folder.iterdir()} == {ROOT, "models"}
    assert (folder / ROOT / "mlflow.db").stat().st_size
    assert len(list((folder / ROOT / "mlartifacts").rglob("report/policies.json"))) == 1


def test_the_machine_is_recorded_until_the_run_is_closed(store, monkeypatch):
    _, client, run, uri = store

    def recorded():
        history = client.get_metric_history(run.mlflow_run_id, "system/cpu_utilization_percentage")
        return [point.step for point in history]

    with monkeypatch.context() as patch:  # without psutil there is nothing to record
        patch.setitem(sys.modules, "mlflow.system_metrics.system_metrics_monitor", None)
        run.watch_machine(uri, 0.01)
    assert client.get_run(run.mlflow_run_id).data.metrics == {}
    run.watch_machine(uri, 0.05)
    deadline = time.monotonic() + 60
    while not recorded():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    run.close("FINISHED", None)
    assert "system/system_memory_usage_megabytes" in client.get_run(run.mlflow_run_id).data.metrics
    steps = recorded()
    time.sleep(0.3)
    assert steps == recorded() == list(range(len(steps)))


def test_a_torn_note_of_mlflow_begins_a_new_run(store):
    folder, client, run, uri = store
    experiment = client.get_run(run.mlflow_run_id).info.experiment_id
    assert MlflowRun.resume(client, experiment, uri, folder / "models").mlflow_run_id == run.mlflow_run_id
    (folder / "models/mlflow_run.json").write_text('{"mlflow')
    assert MlflowRun.resume(client, experiment, uri, folder / "models") is None


def policy(folder, text, **entries):
    def write(place):
        (place / "config.json").write_text(text)
        return entries

    write_folder(folder, write)
    return hash_files(read_manifest(folder)["files"])


def test_lineage_follows_the_manifests(tmp_path):
    hub = {"policy.source": "hub", "policy.path": "Qwen/Qwen3-VL-2B-Instruct", "policy.revision": "abc"}
    base = policy(tmp_path / "base_policy", "base", fingerprint=hub)
    warm = policy(tmp_path / "policy", "warm", fingerprint={**hub, "input.base_policy": base})
    checkpoint = policy(tmp_path / "checkpoints/iter=00012", "twelve", fingerprint={"input.policy": warm})
    policy(tmp_path / "checkpoints/iter=00009", "nine", fingerprint={"input.policy": warm})
    final = policy(tmp_path / "final_policy", "twelve", iteration=12, policy_version=13, started_from=warm)
    assert read_lineage(tmp_path) == {
        "policy.start": base,
        "policy.start.source": "hub",
        "policy.start.path": "Qwen/Qwen3-VL-2B-Instruct",
        "policy.start.revision": "abc",
        "policy.warm_start": warm,
        "policy.warm_start.started_from": base,
        "policy.final": final,
        "policy.final.started_from": warm,
        "policy.final.iteration": "12",
        "policy.final.policy_version": "13",
        "policy.checkpoint": checkpoint,
        "policy.checkpoint.iteration": "12",
        "policy.checkpoint.started_from": warm,
    }
    assert read_lineage(tmp_path / "nothing") == {}


@pytest.mark.parametrize(("note", "known"), [('{"mlflow_run_id": "7"}', {"source.mlflow_run_id": "7"}), ("{", {})])
def test_a_torn_note_of_a_source_names_no_run(tmp_path, note, known):
    models = RunFolders.of(tmp_path, "train_sokoban", "default").models
    models.mkdir(parents=True)
    (models / MLFLOW_NOTE).write_text(note, encoding="utf-8")
    source = SourceOptions(run="train_sokoban", run_id="default")
    assert source_lineage(source, tmp_path) == {"source.run": "train_sokoban", "source.run_id": "default", **known}


def test_tables_of_an_evaluation():
    rows = [{"policy": "start", "solve_rate": 0.5, "by": {"x": 1}}, {"policy": "final", "mode": "greedy"}]
    assert policy_table({"rows": rows}) == {
        "policy": ["start", "final"], "solve_rate": [0.5, None], "mode": [None, "greedy"]
    }  # fmt: skip
    assert policy_table({}) == {}
    table = trajectories_to_table(make_trajectories(8, iteration=1), CONTEXT)
    index = build_index(table, Place("train_sokoban", "default", "evaluation", "x"), task_or_plain)
    columns = episode_table(index, ["start", "final"])
    assert columns["policy"] == ["final"] * 8
    assert columns["trajectory_id"] == index["trajectory_id"].to_pylist()
    assert episode_table(index.slice(0, 0), []) == {}
    # Of a large evaluation the first prompts are shown, whole: groups of four.
    assert episode_table(index, ["start", "final"], limit=7)["trajectory_id"] == columns["trajectory_id"][:4]


@pytest.mark.parametrize(
    ("options", "environment", "wanted"),
    [({}, KEY, True), ({}, {}, False), ({"wandb": False}, KEY, False), ({"enabled": False}, KEY, False)],
)
def test_wandb_is_wanted_with_its_key_alone(options, environment, wanted):
    assert is_wanted(TrackingOptions(**options), environment) is wanted


class RecordedRun:
    """The calls of W&B's run that `WandbRun` makes, in their order; what wandb itself does is tested below."""

    def __init__(self):
        self.logged, self.config, self.summary, self.ended = [], {}, {}, None
        self.config = SimpleNamespace(values={}, update=lambda new, allow_val_change: self.config.values.update(new))

    def define_metric(self, name, **_):
        pass

    def log(self, values):
        self.logged.append(values)

    def save(self, path, base_path, policy):
        pass

    def finish(self, exit_code):
        self.ended = exit_code


def test_each_point_goes_to_its_own_axis_once(tmp_path):
    row = {
        "iteration": 0,
        "rollout/raw_reward": 0.5,
        "eval/start/sampled_solve_rate": 0.4,
        "eval/validation/sampled_solve_rate": 0.6,
    }
    run = RecordedRun()
    tracked = WandbRun(run, tmp_path)
    tracked.log_rows([row])
    tracked.log_rows([row, {"iteration": 1, "rollout/raw_reward": 1.0}])
    tracked.log_points([("warm_start/loss", 2.0, 10), ("eval/final/greedy_solve_rate", 0.9, 2)])
    assert run.logged == [
        {"iteration": 0, "rollout/raw_reward": 0.5, "rollout/zero_std/count": 0.0},
        {"policy_version": 0, "eval/validation/sampled_solve_rate": 0.4},
        {"policy_version": 1, "eval/validation/sampled_solve_rate": 0.6},
        {"iteration": 1, "rollout/raw_reward": 1.0, "rollout/zero_std/count": 0.0},
        {"warm_start/step": 10, "warm_start/loss": 2.0},
        {"iteration": 2, "eval/final/greedy_solve_rate": 0.9},
    ]
    # The next command continues from what is noted, and sends nothing twice; the last line was torn by a kill.
    with (tmp_path / WANDB_SENT).open("a") as file:
        file.write('\n{"iterations": [2')
    later = RecordedRun()
    continued = WandbRun(later, tmp_path)
    continued.log_rows([row, {"iteration": 2, "rollout/raw_reward": 2.0}])
    continued.log_points([("warm_start/loss", 2.0, 10)])
    assert [entry.get("iteration") for entry in later.logged] == [2]
    assert read_sent(tmp_path)[0] == {0, 1, 2}
    continued.close("FAILED", RuntimeError("out of luck"))
    assert (later.ended, later.summary) == (1, {"error": "RuntimeError: out of luck"})


def scan(raw):
    """Records of a file of W&B: after seven bytes of its own a log of LevelDB, in blocks of 32 KiB."""
    place, record = 7, b""
    while place < len(raw):
        left = 32_768 - place % 32_768
        if left < 7:
            place += left
            continue
        _, length, kind = struct.unpack("<IHB", raw[place : place + 7])
        record += raw[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # whole, or the last piece
            yield record
            record = b""


def read_offline(folder):
    """The offline files of W&B below a folder: its runs, their configuration, history, exit codes."""
    from wandb.proto.wandb_internal_pb2 import Record

    runs, configured, history, exits = set(), {}, [], []
    for file in sorted(Path(folder).glob("wandb/offline-run-*/run-*.wandb"), key=lambda path: path.stat().st_mtime):
        for raw in scan(file.read_bytes()):
            record = Record()
            record.ParseFromString(raw)
            kind = record.WhichOneof("record_type")
            if kind == "run":
                runs.add((record.run.project, record.run.run_id, record.run.display_name))
            for config in (record.config, record.run.config):
                configured |= {item.key or ".".join(item.nested_key): item.value_json for item in config.update}
            if kind == "history":
                cells = {item.key or ".".join(item.nested_key): item.value_json for item in record.history.item}
                history.append({name: json.loads(value) for name, value in cells.items() if not name.startswith("_")})
            if kind == "exit":
                exits.append(record.exit.exit_code)
    return runs, configured, history, exits


@pytest.fixture
def offline(monkeypatch):
    """Weights & Biases keeps its runs in files."""
    pytest.importorskip("wandb", reason="the extra wandb is not installed")
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    monkeypatch.setenv("WANDB_MODE", "offline")


@pytest.mark.usefixtures("offline")
def test_story_of_one_run_in_wandb_offline(tracked):
    """A failed and continued run is one run of W&B, without a point twice; the process' environment stays as it is."""
    before = dict(os.environ)
    tracked.fail_at = 1
    with pytest.raises(RuntimeError, match="out of luck"):
        tracked.run("train_sokoban", params={"tracking": {"enabled": True, "experiment": "mine"}})
    tracked.fail_at, tracked.iterations = None, 3
    tracked.run("train_sokoban", params={"tracking": {"enabled": True, "experiment": "mine"}})
    changed = {name for name in {*before, *os.environ} if before.get(name) != os.environ.get(name)}
    assert not {name for name in changed if name.startswith(("WANDB", "MLFLOW"))}
    note = json.loads((tracked.folder("06_models") / WANDB_NOTE).read_text())
    runs, configured, history, exits = read_offline(tracked.path / "data")
    assert runs == {("mine", note["id"], "train_sokoban/default")}
    assert sorted((entry["iteration"], entry["rollout/raw_reward"]) for entry in history) == [
        (0, 0.0), (1, 0.5), (2, 1.0)
    ]  # fmt: skip
    assert exits == [1, 0]
    assert json.loads(configured["run_id"]) == "default" and json.loads(configured["seed"]) == 0
    # MLflow has the same.
    client = MlflowClient(tracking_uri=f"sqlite:///{tracked.path}/data/mlflow.db")
    mlflow_note = json.loads((tracked.folder("06_models") / NOTE).read_text())
    assert len(client.get_metric_history(mlflow_note["mlflow_run_id"], "rollout/raw_reward")) == 3


@pytest.mark.usefixtures("offline")
def test_tables_inputs_and_files_in_wandb_offline(tmp_path):
    report = tmp_path / "report.html"
    report.write_text("<html>")
    run = WandbRun.open(TrackingOptions(experiment="mine"), tmp_path / "data", tmp_path, "train_sokoban/default")
    run.log_input(TABLE)
    run.log_table("evaluation/policies", {"policy": ["a"], "solve_rate": [0.5]})
    run.log_file(report, "report")
    run.close("FINISHED", None)
    _, configured, history, exits = read_offline(tmp_path / "data")
    assert json.loads(configured["inputs.sokoban.prompts"])["digest"] == TABLE.digest
    (shown,) = [entry for entry in history if any(name.startswith("evaluation/policies") for name in entry)]
    (table,) = (tmp_path / "data").glob("wandb/offline-run-*/files/media/table/evaluation/*.table.json")
    assert json.loads(table.read_text())["data"] == [["a", 0.5]]
    assert [path.read_text() for path in (tmp_path / "data").glob("wandb/offline-run-*/files/report.html")] == [
        "<html>"
    ]
    assert exits == [0]


def test_torn_files_end_no_command_and_leave_no_run_open(project, caplog, monkeypatch):
    """Files of the first of two runs are torn while it goes on."""
    torn = [
        project.folder("06_models") / "policy/manifest.json",
        project.folder("07_model_output") / "metrics/iter=00009.json",
        project.folder("08_reporting") / "eval_summary.json",
    ]
    opened = {}

    class Tearing(RecordedRun):
        def log(self, values):
            super().log(values)
            for path in torn:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text('{"files": ')

    def open_run(options, data_root, folder, name):
        opened[name] = Tearing()
        return WandbRun(opened[name], folder)

    def refuse(*_):
        raise OSError("no store today")

    monkeypatch.setenv("WANDB_API_KEY", "k" * 40)
    monkeypatch.setattr(tracking, "is_installed", lambda: True)
    monkeypatch.setattr(tracking, "connect", refuse)
    monkeypatch.setattr(wandb_run.WandbRun, "open", open_run)
    project.run("train_sokoban", "update_sokoban", params={"tracking": {"enabled": True}})
    assert [run.ended for run in opened.values()] == [0, 0]
    for path in torn:
        assert f"{path} is not readable JSON" in caplog.text
    assert "this command goes on untracked. OSError: no store today" in caplog.text
    # Readable files are sent.
    rows = [entry["iteration"] for entry in opened["train_sokoban/default"].logged if "rollout/raw_reward" in entry]
    assert rows == [0, 1]


@pytest.mark.parametrize("is_there", [True, False])
def test_without_the_package_or_its_service_mlflow_tracks_alone(tracked, caplog, monkeypatch, is_there):
    def refuse(*_):
        raise OSError("no service today")

    monkeypatch.setenv("WANDB_API_KEY", "k" * 40)
    monkeypatch.setattr(tracking, "is_installed", lambda: is_there)
    monkeypatch.setattr(wandb_run.WandbRun, "open", refuse)
    tracked.run("train_sokoban", params={"tracking": {"enabled": True}})
    assert ("Weights & Biases could not open the run of train_sokoban" in caplog.text) is is_there
    assert not (tracked.folder("06_models") / WANDB_NOTE).exists()
    note = json.loads((tracked.folder("06_models") / NOTE).read_text())
    client = MlflowClient(tracking_uri=f"sqlite:///{tracked.path}/data/mlflow.db")
    assert len(client.get_metric_history(note["mlflow_run_id"], "rollout/raw_reward")) == 2
    assert client.get_run(note["mlflow_run_id"]).info.status == "FINISHED"
