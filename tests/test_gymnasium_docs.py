"""`docs/gymnasium.md` and its examples: whole tasks in environments of gymnasium, and runs that are killed there."""

from __future__ import annotations

import re
import shutil
import signal
from pathlib import Path

import pytest

from geo_sokoban_pipeline.events import Event
from geo_sokoban_pipeline.runs.storage import read_json
from kill_hook import kill_at
from runs import ROOT, assert_same_run, finish, kedro_command, link_project, read_run

pytest.importorskip("gymnasium", reason="the extra gym is not installed")
pytestmark = pytest.mark.slow
PAGE = (ROOT / "docs" / "gymnasium.md").read_text(encoding="utf-8")
POINTS = ((f"{Event.SFT_STEP}:*", 12), ("after_save:train_lake.trajectories", 3))  # the first is the order to rewind
TINY = """
lake:
  counts: {train: 16, validation: 4, eval: 6}
train_lake:
  warm_start:
    {steps: 24, episodes_per_step: 4, learning_rate: 0.003, warmup_steps: 2, validate_every: 12, validation_episodes: 4}
  rollout: {max_turns: 4}
  grpo: {groups: 2, group_size: 8, groups_per_step: 2, filter: none}
  optimizer: {warmup_iterations: 1, schedule_iterations: 2}
  loop: {iterations: 2, eval_interval: 1, eval_prompts: 4, keep_last: 2}
"""


def code_of(language: str) -> str:
    """The page's last block of a language."""
    *_, found = re.findall(rf"^```{language}\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
    return str(found)


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A folder that looks like the project's, with a configuration of its own."""
    shutil.copytree(ROOT / "conf", tmp_path / "conf")
    return link_project(tmp_path, conf=False)


def test_a_run_in_a_slippery_lake_continues_bit_for_bit(project: Path) -> None:
    (project / "lake.py").write_text(code_of("python"), encoding="utf-8")
    (project / "conf" / "base" / "tasks.yml").write_text("lake: lake.py\n", encoding="utf-8")
    (project / "conf" / "base" / "parameters" / "lake.yml").write_text(code_of("yaml"), encoding="utf-8")
    (project / "conf" / "test" / "parameters" / "lake.yml").write_text(TINY, encoding="utf-8")

    def start(root: str, **environment: str) -> object:
        return kedro_command("--pipelines=train_lake", folder=project, data_root=project / root, **environment)

    finish(start("whole"))
    for point, arrival in POINTS:
        finish(start("killed", **kill_at(point, arrival)), -signal.SIGKILL)
    finish(start("killed"))
    whole = read_run(project / "whole", "train_lake")
    assert_same_run(whole, read_run(project / "killed", "train_lake"))

    # The ice slips: the same actions on the same lake lead elsewhere, and the seed of the episode decides where to.
    episodes = [row for name, rows in whole["episodes"].items() if name.startswith("trajectories") for row in rows]
    ends: dict[tuple[str, str], set[bytes]] = {}
    for row in episodes:
        turns = [turn for turn in row["turns"] if turn["role"] == "assistant"]
        if len(row["images"]) > 1 and turns[0]["action"]:
            ends.setdefault((row["task_id"], turns[0]["action"]), set()).add(row["images"][1]["bytes"])
    assert any(len(images) > 1 for images in ends.values())
    assert len({row["seed"] for row in episodes}) == len(episodes)


def test_minigrid_is_trained_to_its_report(project: Path) -> None:
    """With the example's configuration beside that of the project."""
    shutil.copytree(ROOT / "docs" / "examples" / "minigrid" / "conf", project / "conf", dirs_exist_ok=True)
    finish(kedro_command("--pipelines=train_minigrid", folder=project, data_root=project / "data"))
    reports = project / "data" / "08_reporting" / "train_minigrid" / "default"
    rows = {(row["policy"], row["mode"]): row for row in read_json(reports / "eval_summary.json")["rows"]}
    best, random = rows["shortest", "-"], rows["random", "-"]
    assert (best["solve_rate"], best["over_fewest"]) == (1.0, 1.0)
    assert random["solve_rate"] < 1 and (random["over_fewest"] or 2) > 1
    assert {policy for policy, _ in rows} >= {"warm_start", "final", "final_blank"}
    assert sum(cell["episodes"] for cell in best["by_fewest"]) == best["episodes"]
    page = (reports / "report.html").read_text(encoding="utf-8")
    assert "shortest way" in page and "actions ÷ fewest" in page and "Sokoban" not in page
