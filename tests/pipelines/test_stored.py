"""rollout_*, update_* and evaluate_* on a finished run: each half of the loop gives what the loop gave."""

from __future__ import annotations

import pytest

from geo_sokoban_pipeline.config.grpo import SourceOptions
from geo_sokoban_pipeline.evaluation.audit import audit_files
from geo_sokoban_pipeline.runs.folders import RunStore
from geo_sokoban_pipeline.runs.storage import read_json
from runs import read_run

pytestmark = pytest.mark.slow

MODELS = "06_models/train_sokoban/default"
OWN = ("trajectory_id", "timings")  # columns that tell which run collected an episode, and how fast


def source(**values):
    return {"source": {"run": "train_sokoban", "run_id": "default", **values}}


def weights(folder):
    return {name: (folder / name).read_bytes() for name in ("model.safetensors", "optimizer.safetensors")}


@pytest.mark.parametrize("iteration", [None, 0])
def test_update_replays_an_iteration_bit_for_bit(clone, iteration):
    k = 2 if iteration is None else iteration
    given = {} if iteration is None else {"iteration": iteration}
    # The seed of this command is another one: what is replayed has its own.
    clone.run("update_sokoban", params={"update_sokoban": source(**given), "seed": 5})
    made = clone.folder("06_models", "update_sokoban") / "checkpoints" / f"iter={k:05d}"
    expected = clone.root / MODELS / "checkpoints" / f"iter={k:05d}"
    assert weights(made) == weights(expected)
    (row,) = clone.load("update_sokoban.metrics")
    stored = clone.load("train_sokoban.metrics")[k]
    trained = {name: value for name, value in row.items() if name.startswith("train/")}
    assert trained and trained == {name: stored[name] for name in trained}
    assert audit_files(clone.folder("06_models", "update_sokoban")) == []


def test_an_update_in_several_passes_has_the_order_of_its_run(clone):
    """The order of the later passes follows from the seed of the run, not from that of the command."""
    options = {"update_sokoban": source(iteration=1), "train_sokoban": {"grpo": {"passes": 3, "groups_per_step": 1}}}
    made = []
    for seed in (0, 5):
        clone.run("update_sokoban", params={**options, "seed": seed})
        made.append(weights(clone.folder("06_models", "update_sokoban") / "checkpoints" / "iter=00001"))
    assert made[0] == made[1] != weights(clone.root / MODELS / "checkpoints" / "iter=00001")


@pytest.mark.parametrize("checkpoint", ["start", 1])
def test_rollout_repeats_the_iteration_after_a_checkpoint(clone, checkpoint):
    iteration = 0 if checkpoint == "start" else checkpoint + 1
    before = read_run(clone.root)
    clone.run("rollout_sokoban", params={"rollout_sokoban": source(checkpoint=checkpoint)})
    name = f"trajectories/iter={iteration:05d}/part-000.parquet"
    made = read_run(clone.root, "rollout_sokoban")["episodes"]
    assert list(made) == [name, f"episodes/{name}"]
    # Log-probs that the update adds are no part of the rollout; with the default settings there are none.
    assert before["episodes"][name][0]["old_log_probs"] is None
    for one, other in zip(made[name], before["episodes"][name], strict=True):
        assert {k: v for k, v in one.items() if k not in OWN} == {k: v for k, v in other.items() if k not in OWN}
        assert one["trajectory_id"].split("/", 1)[1] == other["trajectory_id"].split("/", 1)[1]
    assert read_run(clone.root) == before


def test_rollout_of_several_iterations(clone):
    options = {**source(checkpoint="latest"), "iterations": 2}
    clone.run("rollout_sokoban", params={"rollout_sokoban": options, "train_sokoban": {"grpo": {"groups": 2}}})
    parts = clone.load("rollout_sokoban.trajectories")
    tables = {name: read() for name, read in parts.items()}
    assert list(tables) == ["iter=00003/part-000", "iter=00004/part-000"]
    assert {version for table in tables.values() for version in table.column("policy_version").to_pylist()} == {3}
    assert [row["iteration"] for row in clone.load("rollout_sokoban.metrics")] == [3, 4]
    # Called again, it plays the same episodes into the same place.
    again = read_run(clone.root, "rollout_sokoban")
    clone.run("rollout_sokoban", params={"rollout_sokoban": options, "train_sokoban": {"grpo": {"groups": 2}}})
    assert read_run(clone.root, "rollout_sokoban") == again


def test_evaluate_any_policy(clone):
    """Checkpoint 2 has four names; its manifest says which one is the best."""
    folder = clone.root / MODELS / "checkpoints" / "iter=00002"
    names = ("best", "start", "latest", "final", 2, str(folder))
    store = RunStore(clone.root)
    found = {name: store.policy(SourceOptions(run="train_sokoban", checkpoint=name)) for name in names}
    weights_of = {name: (one.path / "model.safetensors").read_bytes() for name, one in found.items()}
    assert all(weights_of[name] == weights(folder)["model.safetensors"] for name in names[2:])
    best = folder.with_name(f"iter={read_json(folder / 'manifest.json')['best']['iteration']:05d}")
    assert weights_of["best"] == weights(best)["model.safetensors"]
    assert weights_of["start"] == (clone.root / MODELS / "policy" / "model.safetensors").read_bytes()
    few = {"evaluation": {"prompts": 3, "blank_images": False, "greedy": False}}
    rows = []
    for checkpoint in ("final", str(folder)):
        clone.run("evaluate_sokoban", {"evaluate_sokoban": source(checkpoint=checkpoint), "train_sokoban": few})
        summary = clone.load("evaluate_sokoban.eval_summary")
        assert summary["source"]["checkpoint"] == checkpoint
        assert (summary["prompts"], len(summary["rows"])) == (3, 6)
        # A folder is named by itself alone: it may be of another run.
        assert summary["policies"] == [checkpoint if "/" in checkpoint else f"default@{checkpoint}"]
        rows.append([{**row, "policy": ""} for row in summary["rows"]])
    assert rows[0] == rows[1]
    assert (clone.folder("08_reporting", "evaluate_sokoban") / "report.html").stat().st_size > 10_000
