"""Runs: what is stored, what the same command does again, and what it refuses."""

from __future__ import annotations

import signal

import pytest
import torch
from safetensors.torch import load_file

from geo_sokoban_pipeline.config.grpo import SourceOptions
from geo_sokoban_pipeline.evaluation.audit import audit_files
from geo_sokoban_pipeline.events import Event
from geo_sokoban_pipeline.runs.fingerprint import FingerprintError
from geo_sokoban_pipeline.runs.folders import RunStore, SourceError
from geo_sokoban_pipeline.runs.storage import file_digest
from geo_sokoban_pipeline.trajectories.schema import validate_trajectories
from kill_hook import kill_at
from pipelines.conftest import LONGER
from runs import assert_same_run, finish, kedro_command, read_run
from task_options import TinyPolicyOptions

pytestmark = pytest.mark.slow

WIDTH = TinyPolicyOptions().hidden
MODELS = "06_models/train_sokoban/default"
IMITATE = "geo_sokoban_pipeline.training.sft.run_sft"
UPDATE = "geo_sokoban_pipeline.training.grpo_loop.update_policy"
PLAY = "geo_sokoban_pipeline.evaluation.summary.rollout_prompts"


# What a finished run has stored


def test_every_file_is_of_an_allowed_format(finished_run):
    assert audit_files(finished_run.root) == []
    kinds = {path.suffix for path in finished_run.root.rglob("*") if path.is_file()}
    assert {".parquet", ".safetensors", ".json", ".html", ".db", ".jinja", ".lock"} == kinds


def test_names_of_the_design_are_in_the_catalog(finished_run):
    stored = {"trajectories": 3, "eval_trajectories": 4, "held_out_trajectories": 2, "metrics": 3, "checkpoints": 3}
    assert {name: len(finished_run.load(f"train_sokoban.{name}")) for name in stored} == stored
    state = finished_run.load("train_sokoban.resume_state")
    assert (state["iteration"], state["complete"]) == (2, {"iterations": 3})
    for name in ("base_policy", "policy", "final_policy"):
        assert finished_run.load(f"train_sokoban.{name}").manifest["files"]


def test_trajectories_load_as_tables_and_as_a_frame(finished_run):
    parts = finished_run.load("train_sokoban.trajectories")
    assert list(parts) == [f"iter={k:05d}/part-000" for k in range(3)]
    tables = {name: read() for name, read in parts.items()}
    for k, table in enumerate(tables.values()):
        validate_trajectories(table)
        assert set(table.column("policy_version").to_pylist()) == {k}
    frame = finished_run.load("train_sokoban.trajectories@pandas")
    assert len(frame) == sum(table.num_rows for table in tables.values()) == 48
    assert "images" not in frame.columns
    assert isinstance(frame["token_ids"][0], list) and isinstance(frame["turns"][0][0], dict)


def test_stored_policies_load_with_plain_transformers(finished_run):
    from transformers import AutoModelForImageTextToText

    models = finished_run.root / MODELS
    folders = [models / "final_policy", *sorted((models / "checkpoints").glob("iter=*"))[-1:]]
    for folder in folders:
        model = AutoModelForImageTextToText.from_pretrained(folder)
        assert type(model).__name__ == "Qwen3VLForConditionalGeneration"


def test_start_is_quiet(finished_run):
    assert "report: " in finished_run.output
    assert "preview_fn" not in finished_run.output
    assert "contain '.'" not in finished_run.output
    assert not [line for line in finished_run.output.splitlines() if "Warning:" in line]


# The same command again


def test_a_finished_run_is_only_evaluated_and_reported_again(clone, count_calls):
    imitated, updated, played = count_calls(IMITATE), count_calls(UPDATE), count_calls(PLAY)
    before, stored = clone.stamps(), read_run(clone.root)
    report = clone.folder("08_reporting") / "report.html"
    report.unlink()
    clone.run()
    assert (imitated, updated) == ([], []) and played
    assert report.is_file()
    assert_same_run(stored, read_run(clone.root))
    after = clone.stamps()
    changed = {name for name in before if before[name] != after[name]}
    # The final policy is linked again from its checkpoint, the mark is written again; nothing is trained.
    assert all("/final_policy/" in name or name.endswith("COMPLETE.json") for name in changed), changed


def test_more_iterations_extend_a_run(finished_run, longer_run):
    assert longer_run.load("train_sokoban.resume_state")["complete"] == {"iterations": 4}
    first, extended = (read_run(run.root) for run in (finished_run, longer_run))
    for kind, folder in (("episodes", "trajectories"), ("weights", "checkpoints/iter=00002")):
        assert all(extended[kind][name] == stored for name, stored in first[kind].items() if name.startswith(folder))
    assert len(longer_run.load("train_sokoban.trajectories")) == len(longer_run.load("train_sokoban.metrics")) == 4
    checkpoints = longer_run.load("train_sokoban.checkpoints")
    best = checkpoints["iter=00003"]["manifest"]["best"]["iteration"]
    assert list(checkpoints) == [f"iter={k:05d}" for k in sorted({best, 1, 2, 3})]  # keep_last is 3


# Other settings


@pytest.mark.parametrize(
    ("changes", "lines"),
    [
        # Stored are the values of conf/test, or else the defaults of the options.
        ({"train_sokoban": {"grpo": {"groups_per_step": 4}}}, ["grpo.groups_per_step: stored 2, now 4"]),
        (
            {"seed": 1, "train_sokoban": {"warm_start": {"steps": 5}}},
            ["seed: stored 0, now 1", "warm_start.steps: stored 24, now 5"],
        ),
        (
            {"sokoban": {"max_solution": 5}},
            ["data.id: stored 6x6-1box-generate-", "data.max_solution: stored 4, now 5"],
        ),
        ({"train_sokoban": {"policy": {"tiny": {"hidden": 32}}}}, [f"policy.tiny.hidden: stored {WIDTH}, now 32"]),
    ],
)
def test_other_settings_stop_before_any_work(finished_run, changes, lines):
    before = {path: path.stat().st_mtime_ns for path in finished_run.root.rglob("*") if path.suffix != ".lock"}
    with pytest.raises(FingerprintError) as error:
        finished_run.run(params=changes)
    for line in [*lines, "run_id=<new>", "fresh=true"]:
        assert line in str(error.value)
    assert len(str(error.value).splitlines()) == len(lines) + 2
    assert before == {path: path.stat().st_mtime_ns for path in finished_run.root.rglob("*") if path.suffix != ".lock"}


OUT_OF_MEMORY = {
    "optimizer": {"max_tokens": 256, "logit_chunk": 32, "vision_patches": 40, "gradient_checkpointing": True},
    "rollout": {"max_conversations": 4},
    "policy": {"attention": "eager"},
}
SHARDED = {"processes": 2, "threads": 1, "sharding": "full"}


@pytest.mark.parametrize(
    ("changes", "lines"),
    [
        (OUT_OF_MEMORY, ["optimizer.max_tokens: stored 8192, now 256", "policy.attention: stored sdpa, now eager"]),
        (SHARDED, ["processes: stored 1, now 2", "sharding: stored none, now full"]),
    ],
    ids=["out of memory", "sharded"],
)
def test_a_run_goes_on_with_another_layout(longer_run, clone, caplog, changes, lines):
    """As one that was out of memory must: the same weights, but for the last bits, and the log says so."""
    options = {**LONGER["train_sokoban"], **changes}
    clone.run(params={"train_sokoban": options}, to_nodes=["train_sokoban.train_grpo"])
    assert caplog.text.count("another layout") == 1
    assert all(line in caplog.text for line in lines)
    folders = [one.folder("06_models") / "checkpoints/iter=00003" for one in (longer_run, clone)]
    one, two = (load_file(folder / "model.safetensors") for folder in folders)
    for name, weight in one.items():
        torch.testing.assert_close(weight, two[name], rtol=0, atol=1e-5)


ALL_LAYERS = ("06_models", "07_model_output", "08_reporting")


def contents(project):
    """Digests of all that is stored of the run, but for its lock and its history."""
    found = (path for layer in ALL_LAYERS for path in project.folder(layer).rglob("*") if path.is_file())
    return {
        str(path.relative_to(project.root)): file_digest(path)
        for path in found
        if path.name not in ("run.lock", "commands.json")
    }


@pytest.mark.parametrize(
    ("moment", "commits"),
    [("before_node:train_sokoban.warm_start", False), (f"{Event.COLLECT}:1", True)],
)
def test_a_killed_command_with_fresh_costs_no_run(clone, moment, commits):
    """Before the new run's first checkpoint the old one is put back, after it the new one stays."""
    before = contents(clone)
    short = "fresh=true,seed=3,train_sokoban.warm_start.steps=1,train_sokoban.loop.eval_interval=0"
    command = kedro_command("--pipelines=train_sokoban", f"--params={short}", data_root=clone.root, **kill_at(moment))
    finish(command, expected=-signal.SIGKILL)
    assert not (clone.folder("06_models") / "final_policy").exists()
    store = RunStore(clone.root)
    if commits:
        newest = store.policy(SourceOptions(run="train_sokoban", checkpoint="latest")).manifest
        assert (newest["iteration"], newest["fingerprint"]["seed"]) == (0, 3)
        assert not list(clone.root.rglob(".replaced*")) and not list(clone.root.rglob("replaced.json"))
        return
    with pytest.raises(SourceError):
        store.policy(SourceOptions(run="train_sokoban", checkpoint="final"))
    clone.run("report_sokoban")  # any command that reads the run
    assert contents(clone) == before
    store.policy(SourceOptions(run="train_sokoban", checkpoint="final"))
