"""`docs/your_own_task.md`: its code is short, runs as it stands there, and ends with a gain."""

from __future__ import annotations

import json
import os
import re
import runpy
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

from forked import ForkedCommand
from geo_sokoban_pipeline.envs.images import png_data_uri
from geo_sokoban_pipeline.policies.tiny import build_tiny_policy
from geo_sokoban_pipeline.runs.storage import read_json
from geo_sokoban_pipeline.tasks import TASKS
from geo_sokoban_pipeline.training.demonstrations import Demonstrator
from geo_sokoban_pipeline.trajectories.parquet import read_trajectories
from geo_sokoban_pipeline.trajectories.schema import validate_trajectories
from geo_sokoban_pipeline.trajectories.types import table_to_trajectories
from runs import ROOT, finish, kedro_command, link_project

PAGE = (ROOT / "docs" / "your_own_task.md").read_text(encoding="utf-8")


def code_of(language: str, example: int = 0) -> str:
    """Code of the first example of the page, or of the second one."""
    return str(re.findall(rf"^```{language}\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)[example])


def test_each_turn_of_the_second_example_has_its_image(tmp_path: Path) -> None:
    """Its environment, its expert and its settings, in the code that makes demonstrations."""
    script = tmp_path / "lamp.py"
    script.write_text(code_of("python", 1), encoding="utf-8")
    own = runpy.run_path(str(script))
    row = own["make_row"]((0, 0), (2, 1))
    columns = json.dumps({name: row[name] for name in ("walker", "lamp")})
    prompt = {**row, "id": "a", "prompt": row["problem"], "images": [png_data_uri(row["images"])], "columns": columns}

    settings = yaml.safe_load(code_of("yaml", 1).replace("lamp.py", str(script)))["run"]["params"]["train_geo3k"]
    settings["warm_start"]["teacher"]["noise"] = 0.0
    options = TASKS["geo3k"].train_config.model_validate(settings)
    policy = build_tiny_policy(options.policy.tiny, 0)
    sample = Demonstrator([prompt], policy, options, 0, "training").demonstrate(0)
    seen = [policy.reader.read(own["draw"](place, (2, 1))).png for place in ((0, 0), (1, 0), (2, 0), (0, 1), (1, 1))]
    shown = [image.png for image in sample.images]
    assert len(shown) == 3  # three steps, the lamp is reached after the last one
    assert shown[0] == seen[0] and len(set(shown)) == 3 and set(shown) <= set(seen)

    env = own["build_env"](prompt, {"turns": 2})
    assert [env.step(f"\\boxed{{{move}}}")[1] for move in "UR"] == [False, True]  # a wall, a step, no third turn
    result = SimpleNamespace(metrics=env.final_metrics(), responses=["U", "R"])
    assert own["reward"](result, {"price": 0.05}) == pytest.approx(-0.1)


@pytest.mark.slow
def test_its_code_ends_with_a_gain(tmp_path):
    """In a folder that looks like the project's, a third of the iterations, which learn already."""
    link_project(tmp_path)
    full = "loop: {iterations: 60}"
    assert code_of("yaml").count(full) == 1
    shorter = code_of("yaml").replace(full, "loop: {iterations: 20, eval_interval: 20, eval_prompts: 64}")
    (tmp_path / "cells.py").write_text(code_of("python"), encoding="utf-8")
    (tmp_path / "cells.yml").write_text(shorter, encoding="utf-8")
    data = tmp_path / "data"
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    finish(ForkedCommand(["cells.py"], tmp_path, environment))
    command = kedro_command("--config=cells.yml", data_root=data, conf_env=None, folder=tmp_path)
    said = finish(command, timeout=900)
    assert "warm start: SFT on an expert that takes one of each row's candidates" in said
    assert "no group to train on" not in said

    reports = data / "08_reporting" / "train_geo3k" / "cells"
    page = re.sub(r"(?s)<(script|style).*?</\1>|<[^>]*>", " ", (reports / "report.html").read_text(encoding="utf-8"))
    assert not re.search(r"(?i)famil|most frequent answer|\(plausible|plausible of", f"{page} {said}")  # of geometry
    rows = read_json(reports / "eval_summary.json")["rows"]
    found = {(row["policy"], row["mode"]): row for row in rows}
    before, after = found["warm_start", "sampled"], found["final", "sampled"]
    assert before["episodes"] > 350
    assert after["solve_rate"] >= before["solve_rate"] + 0.15
    assert after["low"] > before["high"]
    assert found["label", "-"]["solve_rate"] == 1.0  # whoever knows the answer is right in this environment, too

    outputs = data / "07_model_output" / "train_geo3k" / "cells" / "trajectories"
    tables = [read_trajectories(path) for path in sorted(outputs.rglob("*.parquet"))]
    for table in tables:
        validate_trajectories(table)
    episodes = [episode for table in tables[-2:] for episode in table_to_trajectories(table)]
    assert {episode.label for episode in episodes} <= {str(number) for number in range(9)}
    assert {episode.metrics["turns"] for episode in episodes} == {1.0, 2.0}
    for episode in episodes:
        price = 0.2 * (episode.metrics["turns"] - 1)
        if episode.status == "completed":
            assert episode.reward == pytest.approx(episode.metrics["success"] - price)
