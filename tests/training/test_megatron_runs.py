"""Whole commands with the Megatron backend: the run of one process, killed at any point, continued by any layout."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from geo_sokoban_pipeline.events import Event
from geo_sokoban_pipeline.runs.storage import read_json
from kill_hook import kill_at
from runs import assert_same_run, finish, kedro_command, params, read_run
from training.setup import MEGATRON, StoredRun

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("ranks")]

ALONE = {**MEGATRON, "processes": 1, "backend": "fsdp", "megatron.tensor_parallel": 1}
LOOP = "--to-nodes=train_sokoban.train_grpo"  # no evaluation and no report
PLACE = "06_models/train_sokoban/default/checkpoints"
RATE = 1e-3  # of the optimizer, at most
# One run is disturbed at all of these, one after the other: (point, arrival in that process, who is killed).
POINTS = (
    (f"{Event.UPDATE}:*", 1, "driver"),
    # Inside the save of a checkpoint.
    (f"{Event.TENSOR}:model.safetensors", 5, "rank"),
)


def tokens(found: dict[str, Any]) -> list[list[int]]:
    """Tokens of the first iteration's episodes."""
    return [row["token_ids"] for row in found["episodes"]["trajectories/iter=00000/part-000.parquet"]]


def train_metrics(row: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in row.items() if name.startswith("train/")}


def test_an_update_on_a_stored_iteration(megatron_run: StoredRun) -> None:
    """`update_sokoban` gives the checkpoint of the run bit for bit, and without Megatron the same update."""
    root, found = megatron_run.root, megatron_run.found
    for layout in (MEGATRON, ALONE):
        _, given = params(layout)
        finish(kedro_command("--pipelines=update_sokoban", given, data_root=root))
        replayed = read_run(root, "update_sokoban")
        if layout is MEGATRON:
            assert replayed["weights"] == {
                name: value for name, value in found["weights"].items() if "checkpoints/iter=00001" in name
            }
        exactness = {"rel": 0, "abs": 0} if layout is MEGATRON else {"rel": 1e-6, "abs": 1e-6}
        rows = [train_metrics(one["metrics"]["iter=00001.json"]) for one in (replayed, found)]
        assert rows[0] == pytest.approx(rows[1], **exactness)
        made = root / PLACE.replace("train_sokoban", "update_sokoban")
        assert_near(root / PLACE / "iter=00001", made / "iter=00001")


def assert_near(wanted: Path, folder: Path) -> None:
    """Weights of two checkpoints."""
    one, other = (load_file(place / "model.safetensors") for place in (wanted, folder))
    for name, weight in one.items():
        torch.testing.assert_close(other[name], weight, rtol=0, atol=0.05 * RATE, msg=name)


def test_killed_at_named_points(megatron_run: StoredRun, tmp_path: Path) -> None:
    for point, arrival, whom in POINTS:
        process = kedro_command(*params(MEGATRON), data_root=tmp_path, **kill_at(point, arrival, whom=whom))
        output = finish(process, -signal.SIGKILL if whom == "driver" else 1)
        if whom == "rank":
            assert "ended with exit code -9 (SIGKILL). The same command continues" in " ".join(output.split())
    finish(kedro_command(*params(MEGATRON), data_root=tmp_path))
    assert any("optimizer-00002-of-00002" in name for name in megatron_run.found["weights"]), "each rank wrote its part"
    assert_same_run(megatron_run.found, read_run(tmp_path))


def test_a_run_changes_its_layout_and_back(megatron_run: StoredRun, tmp_path: Path) -> None:
    """One iteration each with offload, by two ranks of Megatron, and by one process: the run of one process."""
    alone, changing = tmp_path / "alone", tmp_path / "changing"
    finish(kedro_command(*params(ALONE, {"loop.iterations": 3}), LOOP, data_root=alone))
    wanted = read_run(alone)
    first = {"optimizer.offload": "true", "loop.iterations": 1}
    finish(kedro_command(*params(ALONE, first), LOOP, data_root=changing))
    offloaded = read_run(changing)
    rows = [run["metrics"]["iter=00000.json"] for run in (wanted, offloaded)]
    assert rows[1]["train/loss"] == pytest.approx(rows[0]["train/loss"], abs=1e-6)
    assert any(name.endswith("optimizer-00001-of-00001.safetensors") for name in offloaded["weights"])
    assert tokens(wanted) == tokens(offloaded) == tokens(megatron_run.found) and len(tokens(wanted)) == 16
    output = finish(kedro_command(*params(MEGATRON), LOOP, data_root=changing))
    assert "continues with another layout" in " ".join(output.split())
    manifest = read_json(changing / PLACE / "iter=00001/manifest.json")
    assert (manifest["layout"]["backend"], manifest["layout"]["megatron.tensor_parallel"]) == ("megatron", 2)
    assert not any(name.startswith(("backend", "megatron")) for name in manifest["fingerprint"])
    finish(kedro_command(*params(ALONE, {"loop.iterations": 3}), LOOP, data_root=changing))

    newest = [root / PLACE / "iter=00002" for root in (alone, changing)]
    assert_near(*newest)
    states, manifests = ([read_json(one / f"{name}.json") for one in newest] for name in ("trainer_state", "manifest"))
    assert states[0] == states[1]
    assert manifests[0]["sampler"] == manifests[1]["sampler"]
    moments = [load_file(one / "optimizer.safetensors") for one in newest]
    assert moments[0].keys() == moments[1].keys()
    for key, moment in moments[0].items():
        assert (moments[1][key] - moment).norm() <= 1e-3 * moment.norm() + 1e-12, key
    rates = [read_run(root)["metrics"]["iter=00002.json"]["train/lr-pg_0"] for root in (alone, changing)]
    assert rates[0] == rates[1]
