"""MLflow after a finished training, and after an evaluation of it: inputs, tables, where policies come from."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from geo_sokoban_pipeline.hooks.tracking import NOTE
from geo_sokoban_pipeline.runs.fingerprint import hash_files
from geo_sokoban_pipeline.runs.storage import read_json, read_manifest

pytestmark = pytest.mark.slow
MODELS = Path("06_models/train_sokoban/default")


def found_run(root: Path, uri: str, models: Path = MODELS):
    from mlflow.tracking import MlflowClient

    client = MlflowClient(tracking_uri=uri)
    return client, client.get_run(read_json(root / models / NOTE)["mlflow_run_id"])


def read_table(client, run, name: str, folder: Path) -> list[dict]:
    stored = json.loads(Path(client.download_artifacts(run.info.run_id, name, str(folder))).read_text())
    return [dict(zip(stored["columns"], row, strict=True)) for row in stored["data"]]


def test_a_training_names_its_prompts_and_policies(finished_run, longer_run, tmp_path):
    """Also where it was continued: the newest policy is named, and the tables are those of the last evaluation."""
    client, run = found_run(longer_run.root, f"sqlite:///{finished_run.root / 'mlflow.db'}")
    inputs = {found.dataset.name: found for found in run.inputs.dataset_inputs}
    assert sorted(inputs) == ["sokoban.eval_prompts", "sokoban.prompts", "sokoban.validation_prompts"]
    checkpoint = read_manifest(max((longer_run.root / MODELS / "checkpoints").glob("iter=*")))
    made_with = checkpoint["fingerprint"]
    assert inputs["sokoban.prompts"].dataset.digest == made_with["input.prompts"]
    assert inputs["sokoban.validation_prompts"].dataset.digest == made_with["input.validation_prompts"]
    contexts = {name: found.tags[0].value for name, found in inputs.items()}
    assert contexts["sokoban.eval_prompts"] == "evaluation"
    source = json.loads(inputs["sokoban.prompts"].dataset.source)["uri"]
    assert Path(source.removeprefix("file://")).is_file()

    tags = run.data.tags
    hashes = {name: hash_files(read_manifest(longer_run.root / MODELS / name)["files"])
              for name in ("base_policy", "policy", "final_policy")}  # fmt: skip
    assert [tags[f"policy.{name}"] for name in ("start", "warm_start", "final")] == list(hashes.values())
    assert tags["policy.start.source"] == "tiny"
    assert tags["policy.warm_start.started_from"] == hashes["base_policy"]
    assert tags["policy.final.started_from"] == tags["policy.checkpoint.started_from"] == hashes["policy"]
    assert tags["policy.final.iteration"] == tags["policy.checkpoint.iteration"] == str(checkpoint["iteration"])

    summary = read_json(longer_run.folder("08_reporting") / "eval_summary.json")
    policies = read_table(client, run, "evaluation/policies.json", tmp_path)
    assert [(row["policy"], row["mode"], row["solve_rate"]) for row in policies] == [
        (row["policy"], row["mode"], row["solve_rate"]) for row in summary["rows"]
    ]
    episodes = read_table(client, run, "evaluation/episodes.json", tmp_path)
    of_run = longer_run.load("train_sokoban.held_out_trajectories")
    assert len(episodes) == sum(part().num_rows for part in of_run.values())
    assert {row["policy"] for row in episodes} == {"warm_start", "final"}
    greedy = [row["success"] for row in episodes if row["policy"] == "final" and row["greedy"]]
    (rate,) = [row["solve_rate"] for row in summary["rows"] if (row["policy"], row["mode"]) == ("final", "greedy")]
    assert sum(greedy) / len(greedy) == pytest.approx(rate)


def test_an_evaluation_names_the_run_that_it_evaluates(finished_run, clone):
    uri = f"sqlite:///{clone.root / 'mlflow.db'}"
    clone.run("evaluate_sokoban", params={"tracking": {"enabled": True, "uri": uri}})
    _, run = found_run(clone.root, uri, Path("06_models/evaluate_sokoban/default"))
    tags = run.data.tags
    assert (tags["source.run"], tags["source.run_id"]) == ("train_sokoban", "default")
    assert "checkpoint 2 (latest)" in tags["source"]
    newest = read_manifest(max((clone.root / MODELS / "checkpoints").glob("iter=*")))
    assert tags["source.policy"] == hash_files(newest["files"])
    assert tags["source.mlflow_run_id"] == read_json(finished_run.root / MODELS / NOTE)["mlflow_run_id"]
    assert {found.dataset.name for found in run.inputs.dataset_inputs} == {"sokoban.prompts", "sokoban.eval_prompts"}
