"""Tasks: what is known of each, and by what an episode is known."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from geo_sokoban_pipeline.envs.base import Task
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


class OwnTask(Task):
    """An own task that declares nothing about copies."""

    name = title = "own"


WALLS = {"level_hash": "l1", "layout_hash": "w1", "id": "a"}
SHAPES = {"prompt": "<image>How many?", "images": ["data:,1"], "id": "a", "index": 3}
TEXT = {"prompt": "Guess.", "answer": "7", "limits": [1, 9], "id": "a"}


@pytest.mark.parametrize(
    ("task", "row", "change", "same"),
    [
        (TASKS["sokoban"], WALLS, {"id": "b", "level_hash": "l2"}, True),  # another level between the same walls
        (TASKS["sokoban"], WALLS, {"layout_hash": "w2"}, False),
        (TASKS["geo3k"], {"problem_hash": "p1", "id": "a"}, {"id": "b"}, True),
        (TASKS["geo3k"], {"problem_hash": "p1", "id": "a"}, {"problem_hash": "p2"}, False),
        (OwnTask(), SHAPES, {"id": "b", "index": 4}, True),  # what the policy sees first decides
        (OwnTask(), SHAPES, {"images": ["data:,2"]}, False),
        (OwnTask(), SHAPES, {"prompt": "<image>Which?"}, False),
        (OwnTask(), TEXT, {"id": "b", "limits": np.array([1, 9])}, True),
        (OwnTask(), TEXT, {"answer": "8"}, False),  # the text alone says nothing
    ],
)
def test_copies_of_a_prompt_are_one_cluster(task, row, change, same):
    assert (task.cluster_of(row) == task.cluster_of({**row, **change})) == same
