"""`docs/your_own_reward.md`: its examples run as they stand and give what it says; its fields are all there are."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import duckdb
import pytest
import yaml

from geo_sokoban_pipeline.envs.sokoban.config import SokobanDataOptions
from geo_sokoban_pipeline.envs.sokoban.env import build_env
from geo_sokoban_pipeline.envs.sokoban.inspection import sample_level
from geo_sokoban_pipeline.grpo.scoring import group_advantages
from geo_sokoban_pipeline.rollout.episode import EpisodeResult
from geo_sokoban_pipeline.trajectories.parquet import read_trajectories
from geo_sokoban_pipeline.trajectories.types import Trajectory, table_to_trajectories
from runs import ROOT, finish, kedro_command, link_project

PAGE = (ROOT / "docs" / "your_own_reward.md").read_text(encoding="utf-8")
BLOCKS = {
    language: re.findall(rf"^```{language}\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
    for language in ("python", "yaml", "sql")
}
EXAMPLES = ("careful", "near")


def test_every_field_of_an_outcome_is_on_the_page():
    fields = {field.name for field in dataclasses.fields(EpisodeResult)} - {"measure"} | {"metrics"}
    assert fields == set(re.findall(r"^\| `(\w+)` \|", PAGE, re.MULTILINE))


def test_every_number_and_state_of_sokoban_is_on_the_page():
    env = build_env(sample_level(SokobanDataOptions()))
    env.reset()
    for text in ("<answer>Right</answer>", "<answer>Right</answer>"):
        _, _, info = env.step(text)
    section = PAGE.partition("\nSokoban:\n")[2].partition("\nGeometry:\n")[0]
    named = set(re.findall(r"[`.](\w+)`", section))
    assert {*env.final_metrics(), *env.metadata(), *info} - {"metrics"} <= named


def start_example(folder: Path, name: str, data: dict[str, Any] | None = None, **reduced: Any) -> Path:
    """Run an example's file and command as they stand on the page; return the run's output folder.

    Args:
        data: parameters of the test run, beside those of training.
        reduced: settings of the test run over those of the page: `env`, and groups of the parameters of training.
    """
    code, settings = (BLOCKS[language][EXAMPLES.index(name)] for language in ("python", "yaml"))
    if reduced:
        read = yaml.safe_load(settings)
        read["run"]["env"] = reduced.pop("env")
        read["run"]["params"] |= data or {}
        for group, values in reduced.items():
            params = read["run"]["params"][read["run"]["pipelines"]]
            params[group] = {**params.get(group, {}), **values}
        settings = yaml.safe_dump(read)
    link_project(folder)
    (folder / f"{name}.py").write_text(code, encoding="utf-8")
    (folder / f"{name}.yml").write_text(settings, encoding="utf-8")
    root = folder / "data"
    command = kedro_command(f"--config={name}.yml", data_root=root, conf_env=None, folder=folder)
    finish(command, timeout=600)
    return root / "07_model_output" / yaml.safe_load(settings)["run"]["pipelines"] / name


def trained_episodes(run: Path) -> list[Trajectory]:
    files = sorted((run / "trajectories").rglob("*.parquet"))
    return [episode for file in files for episode in table_to_trajectories(read_trajectories(file))]


@pytest.mark.slow
def test_its_sokoban_example_trains_on_the_sum_of_its_parts(tmp_path):
    run = start_example(tmp_path, "careful", env="test", optimizer={"schedule_iterations": 3}, loop={"iterations": 3})
    episodes = trained_episodes(run)
    assert len(episodes) == 3 * 4 * 4
    for episode in episodes:
        assert set(episode.reward_parts) == {"solved", "nearer", "deadlock"}
        assert episode.reward == pytest.approx(sum(episode.reward_parts.values()))
        assert episode.reward_parts["deadlock"] == -0.5 * episode.metrics["lost"]
    assert {episode.reward_parts["deadlock"] for episode in episodes} == {0.0, -0.5}
    # In force in training: the advantages are those of this reward, divided by each group's standard deviation.
    groups = [episode.iteration * 4 + episode.group_index for episode in episodes]
    expected = group_advantages([episode.reward for episode in episodes], groups)
    assert [episode.advantage for episode in episodes] == pytest.approx(expected)
    assert any(expected)
    # The page's query reads what was stored.
    query = BLOCKS["sql"][0].replace("'data/", f"'{tmp_path}/data/")
    rows = duckdb.sql(query).fetchall()
    assert [row[0] for row in rows] == [0, 1]
    assert all(0 <= share <= 1 for row in rows for share in row[1:])


@pytest.mark.slow
def test_its_geometry_example_learns_to_answer_nearer(tmp_path):
    less = {
        "warm_start": {"steps": 200, "warmup_steps": 20},
        "grpo": {"groups": 8, "group_size": 8},
        "optimizer": {"schedule_iterations": 30},
        "loop": {"iterations": 30, "eval_interval": 30},
        "evaluation": {"prompts": 8},
    }
    episodes = trained_episodes(
        start_example(tmp_path, "near", {"geo3k": {"counts": {"eval": 160}}}, env="test", **less)
    )
    assert len(episodes) == 30 * 64
    for episode in episodes:
        parts = episode.reward_parts
        assert episode.reward == pytest.approx(max(parts["right"], 0.3 * parts["near"]))
    early, late = (sum(e.reward_parts["near"] for e in episodes if e.iteration // 10 == tens) / 640 for tens in (0, 2))
    assert late > early + 0.05  # 0.24 and 0.45 on one processor; another adds in another order
