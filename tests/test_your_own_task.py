"""`docs/your_own_task.md` is short, and its code runs as it stands there."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from geo_sokoban_pipeline.schemas import validate_trajectories
from geo_sokoban_pipeline.storage import read_json
from geo_sokoban_pipeline.trajectories import table_to_trajectories
from geo_sokoban_pipeline.trajectory_files import read_trajectories

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "your_own_task.md").read_text(encoding="utf-8")


def code_of(language: str) -> str:
    (found,) = re.findall(rf"^```{language}\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
    return str(found)


def test_the_page_is_short():
    assert len(PAGE.splitlines()) < 60


@pytest.mark.slow
def test_its_code_trains(tmp_path):
    """In a folder that looks like the project's, with `--env=test`, which is small."""
    (tmp_path / "src").mkdir()  # Kedro wants it inside the project, whatever it holds
    for name in ("conf", "pyproject.toml", "src/geo_sokoban_pipeline"):
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / "cells.py").write_text(code_of("python"), encoding="utf-8")
    (tmp_path / "cells.yml").write_text(code_of("yaml"), encoding="utf-8")
    data = tmp_path / "data"
    variables = {"GEO_SOKOBAN_DATA_ROOT": str(data), "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    for words in (("cells.py",), ("-m", "kedro", "run", "--config=cells.yml", "--env=test")):
        process = subprocess.run(
            [sys.executable, *words],
            check=False,
            cwd=tmp_path,
            env={**os.environ, **variables},
            capture_output=True,
            text=True,
            timeout=600,
        )
        assert process.returncode == 0, process.stdout[-2000:] + process.stderr[-2000:]
    outputs = data / "07_model_output" / "train_geo3k" / "cells" / "trajectories"
    tables = [read_trajectories(path) for path in sorted(outputs.rglob("*.parquet"))]
    episodes = [episode for table in tables for episode in table_to_trajectories(table)]
    for table in tables:
        validate_trajectories(table)
    assert len(episodes) == 3 * 16  # of --env=test
    assert {episode.label for episode in episodes} <= {str(number) for number in range(10)}
    replies = {episode.metrics["turns"] for episode in episodes}
    assert replies <= {1.0, 2.0}
    for episode in episodes:
        price = 0.2 * (episode.metrics["turns"] - 1)
        if episode.status == "completed":
            assert episode.reward == pytest.approx(episode.metrics["success"] - price)
    rows = read_json(data / "08_reporting" / "train_geo3k" / "cells" / "eval_summary.json")["rows"]
    shares = {(row["policy"], row["mode"]): row["solve_rate"] for row in rows}
    assert shares["label", "-"] == 1.0  # whoever knows the answer is right in this environment, too
    assert ("final", "sampled") in shares
