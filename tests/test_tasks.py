"""Tasks: what is known of each, and by what an episode is known."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from geo_sokoban_pipeline.parameters import ProjectParameters
from geo_sokoban_pipeline.tasks import TASKS, task_of
from runs import ROOT


@pytest.mark.parametrize("task", TASKS.values(), ids=list(TASKS))
def test_every_task_has_its_sections(task):
    fields = ProjectParameters.model_fields
    assert fields[task.name].annotation is task.data_config
    assert fields[task.run].annotation is task.train_config
    assert task.train_config().task == task.name
    for kind in ("rollout", "update", "evaluate", "control", "check"):
        assert f"{kind}_{task.name}" in fields


def test_an_unknown_task_names_the_known_ones():
    with pytest.raises(ValueError, match="task='chess': must be one of sokoban, geo3k, geo3k_multi_turn"):
        task_of("chess")


@pytest.mark.parametrize(
    ("task", "row", "difficulty"),
    [
        ("sokoban", {"solution_length": 3, "family": "x"}, 3),
        ("sokoban", {}, None),
        ("geo3k", {"solution_length": 3, "family": "linear_pair"}, "linear_pair"),
        ("geo3k_multi_turn", {"family": None}, None),
    ],
)
def test_difficulty(task, row, difficulty):
    assert task_of(task).difficulty_of(row) == difficulty


@pytest.mark.parametrize(
    ("task", "row", "key"),
    [
        ("sokoban", {"id": "a", "level_hash": "l"}, "l"),
        ("geo3k_multi_turn", {"id": "a", "problem_hash": "p"}, "p"),
        ("sokoban", {"id": "a", "level_hash": None}, "a"),
        ("geo3k", {"id": 7}, "7"),
    ],
)
def test_key_of_a_prompt(task, row, key):
    assert task_of(task).key_of(row) == key


@pytest.fixture
def project(tmp_path: Path) -> Path:
    shutil.copytree(ROOT / "conf", tmp_path / "conf")
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    for name in ("src/geo_sokoban_pipeline", "docs"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / "notebooks").mkdir()
    return tmp_path


def type_command(folder: Path, *words: str) -> tuple[int, str]:
    """Exit code and all output of a command that is typed in a folder."""
    process = subprocess.run(
        [sys.executable, "-m", *words],
        check=False,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src"), "KEDRO_DISABLE_TELEMETRY": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    return process.returncode, process.stdout + process.stderr


@pytest.mark.parametrize(
    ("text", "messages"),
    [
        (
            "dots: nowhere.TASK",
            ["dots: 'nowhere.TASK': there is no module 'nowhere'", "Correct this entry, or remove it."],
        ),
        ("dots: json.TASK", ["dots: 'json.TASK': json has no 'TASK'", "Correct this entry, or remove it."]),
        ("dots: [", ["it is not readable YAML", "`name: path/to/task.py`"]),
        ("- dots", ["it must hold lines `name: package.module.OBJECT`"]),
        ("Dots: json.TASK", ["a name has lower-case letters"]),
        ("dots: nothing.py", ["there is no file", "nothing.py", "Correct this entry, or remove it."]),
        ("dots: task.py", ["ModuleNotFoundError: No module named 'nowhere'", "task.py, line 1: import nowhere"]),
        ("dots: task.py:OTHER", ["ModuleNotFoundError"]),
        ("dots: json.loads", ["no task: it lacks name, title, words, data_config"]),
    ],
)
def test_a_wrong_entry_ends_a_command_in_one_line(project, text, messages):
    (project / "task.py").write_text("import nowhere\n", encoding="utf-8")
    file = project / "conf" / "base" / "tasks.yml"
    file.write_text(text, encoding="utf-8")
    code, output = type_command(project, "kedro", "run", "--pipelines=data_dots")
    last = output.strip().splitlines()[-1]
    assert code == 1 and "Traceback" not in output
    assert all(message in last for message in (f"Error: {file}: ", *messages))


def test_the_file_belongs_to_the_configuration_of_the_command(project, tmp_path_factory):
    """It is found where Kedro finds the project, and in the folder of --conf-source."""
    file = project / "conf" / "base" / "tasks.yml"
    file.write_text("dots: docs/examples/dots/task.py\n", encoding="utf-8")
    code, output = type_command(project / "notebooks", "kedro", "registry", "list")
    assert code == 0 and "train_dots" in output

    elsewhere = tmp_path_factory.mktemp("elsewhere") / "settings"
    shutil.copytree(project / "conf", elsewhere)
    (elsewhere / "base" / "tasks.yml").write_text("dots: nowhere.TASK\n", encoding="utf-8")
    for words in ((f"--conf-source={elsewhere}",), ("--conf-source", str(elsewhere))):
        for command in (("kedro", "run"), ("geo_sokoban_pipeline",)):
            code, output = type_command(project, *command, *words, "--pipelines=data_dots")
            assert code == 1 and f"Error: {elsewhere / 'base' / 'tasks.yml'}: dots: 'nowhere.TASK'" in output
            assert "Traceback" not in output
