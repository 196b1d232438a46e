"""`docs/your_own_reward.md`: its examples run as they stand and give what it says; its fields are all there are."""

from __future__ import annotations

import dataclasses
import os
import re
import subprocess
import sys

import pytest

from geo_sokoban_pipeline.envs.sokoban.env import build_env
from geo_sokoban_pipeline.options.sokoban import SokobanDataOptions
from geo_sokoban_pipeline.preflight.trial import sample_level
from geo_sokoban_pipeline.rollout.outcome import Outcome
from geo_sokoban_pipeline.trajectories import table_to_trajectories
from geo_sokoban_pipeline.trajectory_files import read_trajectories
from runs import ROOT

PAGE = (ROOT / "docs" / "your_own_reward.md").read_text(encoding="utf-8")
BLOCKS = {
    language: re.findall(rf"^```{language}\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
    for language in ("python", "yaml")
}
EXAMPLES = ("short", "near")


def test_every_field_of_an_outcome_is_on_the_page():
    fields = {field.name for field in dataclasses.fields(Outcome)} - {"measure"} | {"metrics"}
    assert fields == set(re.findall(r"^\| `(\w+)` \|", PAGE, re.MULTILINE))


def test_every_number_and_state_of_sokoban_is_on_the_page():
    env = build_env(sample_level(SokobanDataOptions()))
    env.reset()
    for text in ("<answer>Right</answer>", "<answer>Right</answer>"):
        _, _, info = env.step(text)
    section = PAGE.partition("\nSokoban:\n")[2].partition("\nGeometry:\n")[0]
    named = set(re.findall(r"[`.](\w+)`", section))
    assert {*env.final_metrics(), *env.metadata(), *info} - {"metrics"} <= named


@pytest.mark.slow
@pytest.mark.parametrize(("example", "run"), [("short", "train_sokoban"), ("near", "train_geo3k")])
def test_its_examples_train(tmp_path, example, run):
    (tmp_path / "src").mkdir()
    for name in ("conf", "pyproject.toml", "src/geo_sokoban_pipeline"):
        (tmp_path / name).symlink_to(ROOT / name)
    for ending, language in (("py", "python"), ("yml", "yaml")):
        (tmp_path / f"{example}.{ending}").write_text(BLOCKS[language][EXAMPLES.index(example)], encoding="utf-8")
    data = tmp_path / "data"
    variables = {"GEO_SOKOBAN_DATA_ROOT": str(data), "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    process = subprocess.run(
        [sys.executable, "-m", "kedro", "run", f"--config={example}.yml"],
        check=False,
        cwd=tmp_path,
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert process.returncode == 0, process.stdout[-2000:] + process.stderr[-2000:]
    files = sorted((data / "07_model_output" / run / example / "trajectories").rglob("*.parquet"))
    episodes = [one for file in files for one in table_to_trajectories(read_trajectories(file))]
    assert len(episodes) == 30 * 64
    for episode in episodes:
        parts = episode.reward_parts
        expected = sum(parts.values()) if example == "short" else max(parts["right"], 0.3 * parts["near"])
        assert episode.reward == pytest.approx(expected)
    if example == "near":  # what the page says
        means = [sum(e.reward_parts["near"] for e in episodes if e.iteration // 10 == tens) / 640 for tens in (0, 2)]
        said = [float(number) / 100 for number in re.findall(r"(\d+) %", PAGE.partition("the first ten")[2])[:2]]
        # Another processor adds in another order, and other samples follow; the gain is there.
        assert means == pytest.approx(said, abs=0.08)
        assert means[1] > means[0] + 0.05
