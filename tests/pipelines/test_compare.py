"""The report of a real run, and `compare` as it is typed."""

from __future__ import annotations

import re

import pytest

from geo_sokoban_pipeline.runs.storage import read_json, write_json

pytestmark = pytest.mark.slow


def test_the_report_tells_of_the_run(finished_run):
    text = (finished_run.folder("08_reporting") / "report.html").read_text(encoding="utf-8")
    for words in (
        "--pipelines=train_sokoban",  # the command
        "The same validation levels over training",
        "Training solve rate by optimal length",
        "Parts of the training reward",
        "Zero-variance groups",
        "Learning rate",
        "KL to the rollout policy",
        "reward trained on",
        "McNemar",
    ):
        assert words in text, words
    assert len(re.findall("before GRPO|after \\d+ iterations?<", text)) >= 4
    assert "No iteration" not in text and "No held-out" not in text


def test_runs_side_by_side(clone):
    for layer in ("06_models", "07_model_output", "08_reporting"):
        folder = clone.folder(layer)
        folder.rename(folder.with_name("other"))
    clone.run(params={"train_sokoban": {"loop": {"iterations": 1}}})
    manifest = clone.folder("06_models") / "checkpoints/iter=00000/manifest.json"
    stored = read_json(manifest)
    write_json(manifest, {**stored, "fingerprint": {**stored["fingerprint"], "data.cell_px": 48}})
    clone.run("compare", {"runs": ["other", "default"]})
    page = (clone.root / "08_reporting/compare/default/report.html").read_text(encoding="utf-8")
    for words in (
        "On the same 16 levels of",
        "data.cell_px",
        "iterations stored",
        "other: after GRPO, greedy",
    ):
        assert words in page, words
    assert "grpo.group_size" not in page
