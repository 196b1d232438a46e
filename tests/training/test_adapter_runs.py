"""Whole runs with an adapter: killed anywhere they continue bit for bit, and every command takes their policies."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from geo_sokoban_pipeline.evaluation.audit import audit_files
from geo_sokoban_pipeline.events import Event
from geo_sokoban_pipeline.policies.lora import open_weights
from geo_sokoban_pipeline.runs.storage import read_json
from kill_hook import kill_at
from runs import Project, assert_same_run, finish, kedro_command, params, read_run

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("resumed")]

OPTIONS: dict[str, Any] = {
    "policy.adapter.rank": 4,
    "grpo.kl_coefficient": 0.01,
    "loop.iterations": 2,
    "evaluation.blank_images": "false",
}
COMMAND = params(OPTIONS)
# One run is killed at all of these, one after the other: (point, arrival in that process).
POINTS = (
    (f"{Event.SFT_STEP}:*", 2),
    (f"{Event.UPDATE}:0", 1),
    (f"{Event.TENSOR}:adapter_model.safetensors", 3),
    ("after_save:train_sokoban.metrics", 3),
    ("after_save:train_sokoban.checkpoints", 2),
)


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Project:
    """A run that nobody disturbs."""
    root = tmp_path_factory.mktemp("adapter")
    finish(kedro_command(*COMMAND, data_root=root))
    return Project(root)


def checkpoint(project: Project, number: int, run: str = "train_sokoban") -> Path:
    return project.folder("06_models", run) / "checkpoints" / f"iter={number:05d}"


def test_killed_at_named_points(project: Project, tmp_path: Path) -> None:
    for point, arrival in POINTS:
        finish(kedro_command(*COMMAND, data_root=tmp_path, **kill_at(point, arrival)), -signal.SIGKILL)
    Project(tmp_path).succeed(*COMMAND)
    found = read_run(project.root)
    assert {name for name in found["weights"] if name.startswith("checkpoints/iter=00001")} == {
        f"checkpoints/iter=00001/{name}.safetensors" for name in ("adapter_model", "optimizer")
    }
    assert_same_run(found, read_run(tmp_path))


def test_the_final_policy_is_merged_and_an_adapter(project: Project) -> None:
    """The policy after the warm start, which is the base of the loop, has the first adapter in its weights."""
    models = project.folder("06_models")
    base, start, final = (models / name for name in ("base_policy", "policy", "final_policy"))
    config = read_json(final / "adapter" / "adapter_config.json")
    assert Path(config["base_model_name_or_path"]) == start
    wanted = dict(open_weights(checkpoint(project, 1)).read())
    found = load_file(final / "model.safetensors")
    assert all(torch.equal(found[name], weight) for name, weight in wanted.items())
    first, second = (load_file(folder / "model.safetensors") for folder in (base, start))
    adapted = {f"{layer}.weight" for layer in config["target_modules"]}
    for one, other in ((first, second), (second, found)):
        assert {name for name, weight in one.items() if not torch.equal(weight, other[name])} == adapted
    assert (final / "adapter" / "adapter_model.safetensors").samefile(
        checkpoint(project, 1) / "adapter_model.safetensors"
    )


def test_an_update_is_replayed_bit_for_bit(project: Project) -> None:
    for number in (0, 1):
        words = params(OPTIONS)[1] + f",update_sokoban.source.iteration={number}"
        project.succeed("--pipelines=update_sokoban", words)
        for file in ("adapter_model.safetensors", "optimizer.safetensors"):
            made = checkpoint(project, number, "update_sokoban") / file
            assert made.read_bytes() == (checkpoint(project, number) / file).read_bytes()


def test_an_update_needs_the_adapter_of_its_run(project: Project) -> None:
    result = project.command("--pipelines=update_sokoban")
    assert result.exit_code != 0 and "policy.adapter is not set" in f"{result.exception}{result.output}"


def test_checkpoints_are_evaluated_and_audited(project: Project) -> None:
    """The adapter over its base solves what the merged policy solves."""
    few = {**OPTIONS, "evaluation.prompts": 4, "evaluation.greedy": "false"}
    rows = []
    for name in ("final", "1", str(checkpoint(project, 1))):
        words = params(few)[1] + f",evaluate_sokoban.source.checkpoint={name}"
        project.succeed("--pipelines=evaluate_sokoban", words)
        summary = project.load("evaluate_sokoban.eval_summary")
        rows.append([{**row, "policy": ""} for row in summary["rows"]])
    assert rows[0] == rows[1] == rows[2]
    assert audit_files(project.folder("06_models")) == []
    project.succeed("--pipelines=audit_sokoban", COMMAND[1])


def test_a_run_starts_from_the_sum(project: Project, tmp_path: Path) -> None:
    source = {"policy.source": "folder", "policy.path": checkpoint(project, 1), "warm_start.steps": 0}
    other = Project(tmp_path)
    other.succeed(*params(source), "--to-nodes=train_sokoban.prepare_policy")
    made = load_file(other.folder("06_models") / "base_policy" / "model.safetensors")
    wanted = dict(open_weights(checkpoint(project, 1)).read())
    assert all(torch.equal(made[name], weight) for name, weight in wanted.items())
