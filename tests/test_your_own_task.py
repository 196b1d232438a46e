"""`docs/your_own_task.md`: its code is short, runs as it stands there, and ends with a gain."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from geo_sokoban_pipeline.runs.storage import read_json
from geo_sokoban_pipeline.trajectories.parquet import read_trajectories
from geo_sokoban_pipeline.trajectories.schema import validate_trajectories
from geo_sokoban_pipeline.trajectories.types import table_to_trajectories

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "your_own_task.md").read_text(encoding="utf-8")


def code_of(language: str) -> str:
    (found,) = re.findall(rf"^```{language}\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
    return str(found)


def test_the_code_is_as_short_as_the_readme_says():
    lines = len(code_of("python").splitlines() + code_of("yaml").splitlines())
    assert f"is a complete example in {lines} lines" in (ROOT / "README.md").read_text(encoding="utf-8")
    assert lines < 65


@pytest.mark.slow
def test_its_code_ends_with_a_gain(tmp_path):
    """In a folder that looks like the project's, a third of the iterations, which learn already."""
    (tmp_path / "src").mkdir()  # Kedro wants it inside the project, whatever it holds
    for name in ("conf", "pyproject.toml", "src/geo_sokoban_pipeline"):
        (tmp_path / name).symlink_to(ROOT / name)
    full = "loop: {iterations: 60}"
    assert code_of("yaml").count(full) == 1
    shorter = code_of("yaml").replace(full, "loop: {iterations: 20, eval_interval: 20, eval_prompts: 64}")
    (tmp_path / "cells.py").write_text(code_of("python"), encoding="utf-8")
    (tmp_path / "cells.yml").write_text(shorter, encoding="utf-8")
    data = tmp_path / "data"
    variables = {"GEO_SOKOBAN_DATA_ROOT": str(data), "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    said = ""
    for words in (("cells.py",), ("-m", "kedro", "run", "--config=cells.yml")):
        process = subprocess.run(
            [sys.executable, *words],
            check=False,
            cwd=tmp_path,
            env={**os.environ, **variables},
            capture_output=True,
            text=True,
            timeout=900,
        )
        said = process.stdout + process.stderr
        assert process.returncode == 0, said[-4000:]
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
