"""The task of `docs/examples/reasoning`: a question in one split, the data set's own scorer, a whole run on text."""

from __future__ import annotations

import runpy
import shutil
from pathlib import Path

import pytest
import yaml

from geo_sokoban_pipeline.runs.storage import read_json
from runs import ROOT, finish, kedro_command, link_project

pytest.importorskip("reasoning_gym", reason="the extra `reasoning` is not installed")
EXAMPLE = ROOT / "docs" / "examples" / "reasoning"
SETTINGS = yaml.safe_load((EXAMPLE / "conf" / "base" / "parameters" / "reasoning.yml").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def own():
    return runpy.run_path(str(EXAMPLE / "task.py"))


def test_questions_occur_once_and_are_scored_by_their_data_set(own):
    tables = own["make_prompts"](SETTINGS["reasoning"] | {"counts": {"train": 60, "validation": 6, "eval": 30}})
    assert [len(table) for table in tables] == [60, 6, 30]
    rows = [row for table in tables for row in table.to_dict("records")]
    assert len({row["prompt"] for row in rows}) == 96 and not any(row["images"] for row in rows)
    names = {row["dataset"] for row in rows}
    assert names == set(SETTINGS["reasoning"]["datasets"]) and len(names) == 3
    for row in rows:
        for answer, score in ((row["answer"], 1.0), ("no idea", 0.0)):
            env = own["build_env"](row, {})
            env.reset()
            assert env.step(answer)[1] and env.final_metrics()["score"] == pytest.approx(score, abs=0.011)
            assert env.final_metrics()["success"] == score


def test_too_few_questions_are_an_error_that_names_the_set(own):
    with pytest.raises(ValueError, match=r"reasoning\.datasets\.count_bits: it gives 3 different questions, not 9"):
        own["ask"]("count_bits", {"min_n": 1, "max_n": 3}, 0, 9)


@pytest.mark.slow
def test_a_whole_run_on_text(tmp_path: Path):
    link_project(tmp_path, conf=False)
    shutil.copytree(ROOT / "conf", tmp_path / "conf", symlinks=True)
    shutil.copytree(EXAMPLE / "conf", tmp_path / "conf", dirs_exist_ok=True)
    for pipeline in ("train", "audit"):
        command = kedro_command(
            f"--pipelines={pipeline}_reasoning", data_root=tmp_path / "data", conf_env="test", folder=tmp_path
        )
        finish(command)
    rows = read_json(tmp_path / "data" / "08_reporting" / "train_reasoning" / "default" / "eval_summary.json")["rows"]
    assert {row["policy"] for row in rows} == {"warm_start", "final", "guess"}
    assert {cell["dataset"] for row in rows for cell in row["by_dataset"]} == set(SETTINGS["reasoning"]["datasets"])
