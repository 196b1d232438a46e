"""study_geo3k with `--env=test`, as a command: a run and its control, tables in the docs."""

from __future__ import annotations

import shutil

import pytest

from geo_sokoban_pipeline.runs.storage import read_json
from runs import ROOT, finish, kedro_command

pytestmark = pytest.mark.slow


def test_study_of_geometry(tmp_path):
    """`default` is the study of the task that the pipeline is named after."""
    docs, data = tmp_path / "project" / "docs", tmp_path / "data"
    docs.mkdir(parents=True)
    shutil.copyfile(ROOT / "docs" / "learning.md", docs / "learning.md")
    shutil.copyfile(ROOT / "README.md", docs.parent / "README.md")
    words = ("--pipelines=study_geo3k", f"--params=study.name=default,study.docs={docs}")
    finish(kedro_command(*words, data_root=data), timeout=900)
    results = read_json(data / "08_reporting" / "studies" / "geo3k" / "results.json")
    (seed,) = results["seeds"]
    players = {(row["player"], row["mode"]) for row in seed["rows"]}
    assert {("final", "greedy"), ("final_shuffled", "sampled"), ("most_frequent", "-"), ("teacher", "-")} <= players
    assert {("control_optimal", "sampled"), ("label", "-")} <= players
    assert results["task"] == "geo3k" and results["levels"]["shared_problems"] == 0
    page = (docs / "learning.md").read_text(encoding="utf-8").partition("<!-- study:geo3k:begin -->")[2]
    assert "| **after GRPO, sampled** |" in page.partition("<!-- study:geo3k:end -->")[0]
    assert (docs / "img" / "learning_geo3k.svg").is_file()
    readme = (docs.parent / "README.md").read_text(encoding="utf-8").partition("<!-- readme:geo3k:begin -->")[2]
    assert "after GRPO" in readme.partition("<!-- readme:geo3k:end -->")[0]
