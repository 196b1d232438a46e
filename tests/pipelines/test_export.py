"""export_* on a finished run, and docs/exports.md followed to the letter: the tokens are those of the rollout."""

from __future__ import annotations

import json
import os
import re
import subprocess
import zipfile
from typing import Any

import pytest
import torch

from local_hub import run_hub
from runs import ROOT

pytestmark = pytest.mark.slow
PAGE = (ROOT / "docs" / "exports.md").read_text(encoding="utf-8")
COLLATE, SFT = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)
TRL = ROOT / ".venv-trl/bin/python"
STEP = """
import json
with torch.no_grad():
    expected = model(**collate(list(rows.select(range(8))))).loss.item()
rows = rows.select(range(8))  # one batch of all rows, in whatever order
before = {name: weight.detach().clone() for name, weight in model.named_parameters()}
"""
RESULT = """
changed = sum(not torch.equal(before[name], weight) for name, weight in model.named_parameters())
print(json.dumps([expected, trainer.state.log_history[-1]["train_loss"], changed, len(before)]))
"""
OPTIONS = "export_sokoban.solved=false,export_sokoban.last_iteration=0,export_sokoban.tables=[tokens]"


@pytest.fixture
def place(clone, tmp_path):
    """A project folder after an export, as the page takes it."""
    clone.succeed("--pipelines=export_sokoban", f"--params={OPTIONS}")
    (tmp_path / "place").mkdir()
    (tmp_path / "place" / "data").symlink_to(clone.root)
    return tmp_path / "place"


def test_the_page_gives_the_log_probs_of_the_rollout(clone, place, tmp_path, monkeypatch):
    """The first iteration was played by the policy after the warm start, so its own loss there is known."""
    import datasets

    monkeypatch.chdir(place)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(datasets.config, "DOWNLOADED_DATASETS_PATH", tmp_path / "downloads")
    names: dict[str, Any] = {}
    exec(COLLATE, names)
    model, rows, collate = names["model"], list(names["rows"]), names["collate"]
    stored = clone.load("train_sokoban.trajectories")["iter=00000/part-000"]().to_pylist()
    assert [row["trajectory_id"] for row in rows] == [row["trajectory_id"] for row in stored]
    batch = collate(rows)
    logits = model(**{name: value for name, value in batch.items() if name != "labels"}).logits[:, :-1]
    logits[..., model.generation_config.suppress_tokens] = -torch.inf  # they are never sampled
    wanted = batch["labels"][:, 1:]
    found = logits.log_softmax(-1).gather(-1, wanted.clamp(min=0).unsqueeze(-1))[..., 0]
    for row, line, mask in zip(stored, found, wanted != -100, strict=True):
        rolled_out = torch.tensor(row["rollout_log_probs"])[torch.tensor(row["loss_mask"]) == 1]
        assert torch.allclose(line[mask], rolled_out, atol=1e-4)
    # What the library computes from the labels is the mean over the same tokens.
    whole = model(**batch).loss
    assert torch.isfinite(whole)
    assert names["loss"].requires_grad


@pytest.mark.skipif(not TRL.exists(), reason="`make bench-peer` has not made .venv-trl")
def test_trl_trains_one_step_on_the_page(place, tmp_path):
    """SFTTrainer's own loss is that of the collator's labels, and its step moves the weights."""
    environment = {**os.environ, "HF_HOME": str(tmp_path / "hub"), "CUDA_VISIBLE_DEVICES": ""}
    words = [str(TRL), "-c", COLLATE + STEP + SFT + RESULT]
    done = subprocess.run(words, cwd=place, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    expected, loss, changed, weights = json.loads(done.stdout.splitlines()[-1])
    assert loss == pytest.approx(expected, rel=1e-4)
    assert changed > weights / 2


def test_logs_of_inspect_beside_the_tables(clone):
    chosen = {"solved": False, "tables": ["chat"], "inspect": ["train", "evaluation"], "last_iteration": 1}
    clone.run("export_sokoban", params={"export_sokoban": chosen})
    logs = clone.folder("07_model_output", "export_sokoban") / "export" / "inspect"
    assert sorted(path.name for path in logs.iterdir()) == [
        "evaluation-00000-greedy.eval",
        "evaluation-00000.eval",
        "evaluation-00001-greedy.eval",
        "evaluation-00001.eval",
        "train-00000.eval",
        "train-00001.eval",
    ]
    with zipfile.ZipFile(logs / "evaluation-00001-greedy.eval") as archive:
        header = json.loads(archive.read("header.json"))
    (row,) = [
        row
        for row in clone.load("train_sokoban.eval_summary")["rows"]
        if (row["policy"], row["mode"]) == ("final", "greedy")
    ]
    success = next(score for score in header["results"]["scores"] if score["name"] == "success")
    assert success["metrics"]["mean"]["value"] == pytest.approx(row["solve_rate"])
    assert header["eval"]["model"] == "train_sokoban/default@3"


def test_an_export_is_uploaded_on_request_alone(clone, tmp_path, monkeypatch):
    """What the repository holds is what the folder holds, and `datasets` opens it."""
    import datasets

    whole = {"solved": False, "push": "me/episodes"}
    with run_hub(tmp_path / "hub", monkeypatch) as hub:
        clone.run("export_sokoban", params={"export_sokoban": {"solved": False}})
        assert hub.made == {}
        tables = {name: read() for name, read in clone.load("export_sokoban.export").items()}
        for options in (whole, {**whole, "tables": ["chat"]}):
            clone.run("export_sokoban", params={"export_sokoban": options})
        assert hub.commits == {"me/episodes": 2}
        uploaded = hub.files("me/episodes")
    assert sorted(tables) == ["chat", "pairs", "tokens"]
    episodes = sum(part().num_rows for part in clone.load("train_sokoban.trajectories").values())
    assert tables["tokens"].num_rows == tables["chat"].num_rows == episodes
    assert 0 < tables["pairs"].num_rows <= episodes // 2
    folder = clone.folder("07_model_output", "export_sokoban") / "export"
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert uploaded == {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}
    assert "tokens/train-00000-of-00001.parquet" not in uploaded
    cache = str(tmp_path / "cache")
    found = datasets.load_dataset(str(tmp_path / "hub/me/episodes"), "chat", split="train", cache_dir=cache)
    assert found.num_rows == clone.load("export_sokoban.export")["chat"]().num_rows


def test_no_token_stops_an_export_before_its_work(clone, tmp_path, monkeypatch):
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub.constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    line = clone.refused("--pipelines=export_sokoban", "--params=export_sokoban.push=me/episodes")
    assert "push=me/episodes: there is no token of the hub" in line
    assert not clone.folder("07_model_output", "export_sokoban").joinpath("export").exists()
