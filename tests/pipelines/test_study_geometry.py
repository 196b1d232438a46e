"""study_geo3k with `--env=test`, as a command: runs and controls of the chosen task, tables in the docs."""

from __future__ import annotations

import shutil

import pytest

from geo_sokoban_pipeline.runs.storage import read_json
from runs import ROOT, finish, kedro_command

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(("name", "task"), [("default", "geo3k"), ("geo3k_multi_turn", "geo3k_multi_turn")])
def test_study_of_geometry(tmp_path, name, task):
    docs = tmp_path / "project" / "docs"
    docs.mkdir(parents=True)
    shutil.copyfile(ROOT / "docs" / "learning.md", docs / "learning.md")
    shutil.copyfile(ROOT / "README.md", docs.parent / "README.md")
    data = tmp_path / "data"
    words = ("--pipelines=study_geo3k", f"--params=study.name={name},study.docs={docs}")
    finish(kedro_command(*words, data_root=data), timeout=900)
    results = read_json(data / "08_reporting" / "studies" / task / "results.json")
    (seed,) = results["seeds"]
    imitated = {"geo3k": "optimal", "geo3k_multi_turn": "teacher"}[task]
    players = {(row["player"], row["mode"]) for row in seed["rows"]}
    assert {("final", "greedy"), ("final_shuffled", "sampled"), ("most_frequent", "-"), ("teacher", "-")} <= players
    assert {(f"control_{imitated}", "sampled"), ("label", "-")} <= players
    assert results["task"] == task and results["levels"]["shared_problems"] == 0
    page = (docs / "learning.md").read_text(encoding="utf-8").partition(f"<!-- study:{task}:begin -->")[2]
    assert "| **after GRPO, sampled** |" in page.partition(f"<!-- study:{task}:end -->")[0]
    assert (docs / "img" / f"learning_{task}.svg").is_file()
    readme = (docs.parent / "README.md").read_text(encoding="utf-8").partition(f"<!-- readme:{task}:begin -->")[2]
    assert "after GRPO" in readme.partition(f"<!-- readme:{task}:end -->")[0]


def test_a_study_of_another_task_is_refused(project):
    result = project.command("--pipelines=study_geo3k", "--params=study.name=long,study.docs=null")
    assert result.exit_code == 1
    assert "study.name=long: this pipeline has the studies geo3k, geo3k_multi_turn." in result.output
