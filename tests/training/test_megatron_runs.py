"""Whole commands with the Megatron backend: the run of `fsdp`, killed at any point, and continued by either backend."""

from __future__ import annotations

import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from geo_sokoban_pipeline.events import Event
from geo_sokoban_pipeline.runs.storage import read_json
from kill_hook import kill_at
from runs import assert_same_run, finish, kedro_command, read_run

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("ranks")]

SMALL = (
    "train_sokoban.warm_start.steps=6,train_sokoban.warm_start.play_every=0,train_sokoban.loop.eval_interval=0,"
    "train_sokoban.evaluation.prompts=2,train_sokoban.evaluation.blank_images=false,train_sokoban.threads=1"
)
MEGATRON = "train_sokoban.backend=megatron,train_sokoban.megatron.tensor_parallel=2,train_sokoban.processes=2"
RATE = 1e-3  # of the optimizer, at most
# One run is disturbed at all of these, one after the other: (point, arrival in that process, who is killed).
POINTS = (
    # Inside the save of the warm start's moments: each rank writes its part.
    (f"{Event.TENSOR}:optimizer-00001-of-00002.safetensors", 9, "driver"),
    (f"{Event.UPDATE}:*", 1, "driver"),
    # Inside the save of a checkpoint.
    (f"{Event.TENSOR}:model.safetensors", 5, "rank"),
)


def command(data_root: Path, params: str, iterations: int, **environment: str) -> Any:
    words = ("--pipelines=train_sokoban", f"--params={SMALL},{params},train_sokoban.loop.iterations={iterations}")
    return kedro_command(*words, data_root=data_root, **environment)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Data root of a run of two iterations, with warm start and evaluation."""
    root = tmp_path_factory.mktemp("undisturbed")
    finish(command(root, MEGATRON, 2))
    return root


def test_the_first_iteration_is_that_of_fsdp(undisturbed: Path, tmp_path: Path) -> None:
    finish(command(tmp_path, "train_sokoban.processes=2", 1))
    expected, found = read_run(tmp_path)["episodes"], read_run(undisturbed)["episodes"]
    name = "trajectories/iter=00000/part-000.parquet"
    ids = [[row["token_ids"] for row in run[name]] for run in (expected, found)]
    assert ids[0] == ids[1] and len(ids[0]) == 16
    manifest = read_json(undisturbed / "06_models/train_sokoban/default/checkpoints/iter=00001/manifest.json")
    assert (manifest["layout"]["backend"], manifest["layout"]["megatron.tensor_parallel"]) == ("megatron", 2)
    assert not any(name.startswith(("backend", "megatron")) for name in manifest["fingerprint"])


def test_an_update_on_a_stored_iteration(undisturbed: Path) -> None:
    """`update_sokoban` gives the checkpoint of the run bit for bit, and without Megatron the same update."""
    place = "checkpoints/iter=00001"
    stored = undisturbed / "06_models/train_sokoban/default" / place
    row = read_run(undisturbed)["metrics"]["iter=00001.json"]
    for layout in (MEGATRON, "train_sokoban.processes=1"):
        words = ("--pipelines=update_sokoban", f"--params={SMALL},{layout}")
        finish(kedro_command(*words, data_root=undisturbed))
        replayed, made = read_run(undisturbed, "update_sokoban"), undisturbed / "06_models/update_sokoban/default"
        if layout == MEGATRON:
            expected = {name: value for name, value in read_run(undisturbed)["weights"].items() if place in name}
            assert replayed["weights"] == expected
        found = replayed["metrics"]["iter=00001.json"]
        train = {name: value for name, value in row.items() if name.startswith("train/")}
        exactness = {"rel": 0, "abs": 0} if layout == MEGATRON else {"rel": 1e-6, "abs": 1e-6}
        assert {name: found[name] for name in train} == pytest.approx(train, **exactness)
        weights = [load_file(folder / "model.safetensors") for folder in (stored, made / place)]
        for name, weight in weights[0].items():
            torch.testing.assert_close(weights[1][name], weight, rtol=0, atol=0.05 * RATE, msg=name)


def test_killed_at_named_points(undisturbed: Path, tmp_path: Path) -> None:
    for point, arrival, whom in POINTS:
        process = command(tmp_path, MEGATRON, 2, **kill_at(point, arrival, whom=whom))
        output, _ = process.communicate(timeout=300)
        expected = -signal.SIGKILL if whom == "driver" else 1
        assert process.returncode == expected, f"{point} was not reached:\n{output[-3000:]}"
        if whom == "rank":
            assert "ended with exit code -9 (SIGKILL). The same command continues" in " ".join(output.split())
    finish(command(tmp_path, MEGATRON, 2))
    expected, found = read_run(undisturbed), read_run(tmp_path)
    assert any("optimizer-00002-of-00002" in name for name in expected["weights"]), "each rank wrote its part"
    assert_same_run(expected, found)


def test_a_run_changes_its_backend_and_back(tmp_path: Path) -> None:
    """One iteration each by one process, two of Megatron, and one process again: the run of one process."""
    alone, changing = tmp_path / "alone", tmp_path / "changing"
    finish(command(alone, "train_sokoban.processes=1", 1))
    shutil.copytree(alone, changing)
    finish(command(alone, "train_sokoban.processes=1", 3))
    output = finish(command(changing, MEGATRON, 2))
    assert "continues with another layout" in " ".join(output.split())
    finish(command(changing, "train_sokoban.processes=1", 3))

    newest = "06_models/train_sokoban/default/checkpoints/iter=00002"
    one, other = (load_file(root / newest / "model.safetensors") for root in (alone, changing))
    for name, weight in one.items():
        torch.testing.assert_close(other[name], weight, rtol=0, atol=0.05 * RATE, msg=name)
    states = [read_json(root / newest / "trainer_state.json") for root in (alone, changing)]
    manifests = [read_json(root / newest / "manifest.json") for root in (alone, changing)]
    assert states[0] == states[1]
    assert manifests[0]["sampler"] == manifests[1]["sampler"]
    moments = [load_file(root / newest / "optimizer.safetensors") for root in (alone, changing)]
    assert moments[0].keys() == moments[1].keys()
    for key, moment in moments[0].items():
        assert (moments[1][key] - moment).norm() <= 1e-3 * moment.norm() + 1e-12, key
    rates = [read_run(root)["metrics"]["iter=00002.json"]["train/lr-pg_0"] for root in (alone, changing)]
    assert rates[0] == rates[1]
