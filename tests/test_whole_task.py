"""A whole task outside the package: `docs/examples/dots` is trained to its report with no change in `src`."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from geo_sokoban_pipeline.runs.storage import read_json
from geo_sokoban_pipeline.tasks import TASKS
from geo_sokoban_pipeline.trajectories.parquet import read_trajectories
from geo_sokoban_pipeline.trajectories.schema import validate_trajectories
from geo_sokoban_pipeline.trajectories.types import table_to_trajectories

ROOT = Path(__file__).parents[1]
EXAMPLE = ROOT / "docs" / "examples" / "dots"


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A folder that looks like the project's, with the example's configuration beside that of the project."""
    for name in ("pyproject.toml", "src/geo_sokoban_pipeline", "docs/examples"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).symlink_to(ROOT / name)
    shutil.copytree(ROOT / "conf", tmp_path / "conf")
    shutil.copytree(EXAMPLE / "conf", tmp_path / "conf", dirs_exist_ok=True)
    return tmp_path


def visible(page: str) -> str:
    """Text of a page without scripts, styles and parameters."""
    text = re.sub(r"<(script|style|svg).*?</\1>", " ", page, flags=re.DOTALL)
    return re.sub(r"<[^>]*>", " ", text)


def run(project: Path, *words: str) -> str:
    variables = {
        "GEO_SOKOBAN_DATA_ROOT": str(project / "data"),
        "PYTHONPATH": str(ROOT / "src"),
        "OMP_NUM_THREADS": "1",
    }
    process = subprocess.run(
        [sys.executable, *words],
        check=False,
        cwd=project,
        env={**os.environ, **variables, "OMP_NUM_THREADS": "1", "KEDRO_DISABLE_TELEMETRY": "1"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert process.returncode == 0, (process.stdout + process.stderr)[-4000:]
    return process.stdout + process.stderr


@pytest.mark.slow
def test_a_fourth_task_is_trained_to_its_report(project: Path) -> None:
    run(project, "-m", "kedro", "run", "--env=test", "--pipelines=train_dots")
    reports = project / "data" / "08_reporting" / "train_dots" / "default"

    summary = read_json(reports / "eval_summary.json")
    rows = {(row["policy"], row["mode"]): row for row in summary["rows"]}
    assert {"warm_start", "final", "final_blank", "random number", "always one"} == {policy for policy, _ in rows}
    for row in rows.values():
        assert sum(cell["episodes"] for cell in row["by_dots"]) == row["episodes"] == 16
    # Whoever always says one is right where there is one dot, and else off by all the others.
    ones = rows["always one", "-"]
    assert ones["off"] == sum((cell["dots"] - 1) * cell["episodes"] for cell in ones["by_dots"]) / 16
    assert [cell["solve_rate"] for cell in ones["by_dots"]] == [float(cell["dots"] == 1) for cell in ones["by_dots"]]

    files = sorted((project / "data" / "07_model_output" / "train_dots").glob("*/trajectories/*/*.parquet"))
    tables = [read_trajectories(path) for path in files]
    assert len(tables) == 2
    for table in tables:
        validate_trajectories(table)
        assert {episode.task for episode in table_to_trajectories(table)} == {"dots"}
        assert {episode.difficulty for episode in table_to_trajectories(table)} <= {"1", "2", "3", "4"}

    page = (reports / "report.html").read_text(encoding="utf-8")
    assert "random number" in page and "Accuracy by dots" in page
    # Words of other tasks.
    assert not re.search(
        r"\b(optimal|solver|moves?|levels?|deadlock\w*|boards?|box(es)?|problems?|tool)\b", visible(page)
    )


def test_the_registry_names_what_it_cannot_use(project: Path) -> None:
    """A name is registered once, and the object has that name."""
    script = (
        "from geo_sokoban_pipeline.tasks import TASKS, check_registry\n"
        "try: check_registry(); print(list(TASKS))\n"
        "except ValueError as e: print(e)"
    )
    file = project / "conf" / "base" / "tasks.yml"
    assert run(project, "-c", script).strip() == str([*TASKS, "dots"])
    for text, message in (
        ("sokoban: docs/examples/dots/task.py", "sokoban: there is a task of that name already"),
        ("points: docs/examples/dots/task.py", "is a task named 'dots'; give both one name"),
        ("dots: docs/examples/dots/nothing.py", "there is no file"),
    ):
        file.write_text(text, encoding="utf-8")
        assert message in run(project, "-c", script)
