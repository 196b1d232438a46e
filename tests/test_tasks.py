"""Tasks: what is known of each, and by what an episode is known."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

import numpy as np
import pytest

from forked import ForkedCommand
from geo_sokoban_pipeline.envs.base import Task
from geo_sokoban_pipeline.parameters import ProjectParameters
from geo_sokoban_pipeline.runs.storage import read_json
from geo_sokoban_pipeline.tasks import TASKS, task_of
from geo_sokoban_pipeline.trajectories.parquet import read_trajectories
from geo_sokoban_pipeline.trajectories.schema import validate_trajectories
from geo_sokoban_pipeline.trajectories.types import table_to_trajectories
from runs import ROOT, finish, kedro_command, link_project


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
    ("task", "row", "difficulty", "key"),
    [
        ("sokoban", {"id": "a", "level_hash": "l", "solution_length": 3, "family": "x"}, 3, "l"),
        ("sokoban", {"id": "a", "level_hash": None}, None, "a"),
        ("geo3k", {"id": 7, "solution_length": 3, "family": "linear_pair"}, "linear_pair", "7"),
        ("geo3k_multi_turn", {"id": "a", "problem_hash": "p", "family": None}, None, "p"),
    ],
)
def test_difficulty_and_key_of_a_prompt(task, row, difficulty, key):
    assert (task_of(task).difficulty_of(row), task_of(task).key_of(row)) == (difficulty, key)


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A folder that looks like the project's, with a configuration of its own."""
    shutil.copytree(ROOT / "conf", tmp_path / "conf")
    return link_project(tmp_path, conf=False)


def typed(folder: Path, *words: str) -> tuple[int | None, str]:
    """Exit code and all output of a `ForkedCommand` in a folder."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "KEDRO_DISABLE_TELEMETRY": "1"}
    command = ForkedCommand(words, folder, environment)
    output, _ = command.communicate(timeout=300)
    return command.returncode, output


WRONG = {
    "dots: nowhere.TASK": ["dots: 'nowhere.TASK': there is no module 'nowhere'", "Correct this entry, or remove it."],
    "dots: json.TASK": ["dots: 'json.TASK': json has no 'TASK'"],
    "dots: [": ["it is not readable YAML", "`name: path/to/task.py`"],
    "- dots": ["it must hold lines `name: package.module.OBJECT`"],
    "Dots: json.TASK": ["a name has lower-case letters"],
    "dots: nothing.py": ["there is no file", "nothing.py", "Correct this entry, or remove it."],
    "dots: task.py": ["ModuleNotFoundError: No module named 'nowhere'", "task.py, line 1: import nowhere"],
    "dots: task.py:OTHER": ["ModuleNotFoundError"],
    "dots: json.loads": ["no task: it lacks name, title, words, data_config"],
    "sokoban: docs/examples/dots/task.py": ["sokoban: there is a task of that name already, from the package"],
    "points: docs/examples/dots/task.py": ["is a task named 'dots'; give both one name"],
}
CHECK = """
import os, sys
from pathlib import Path
from geo_sokoban_pipeline.tasks import TASKS, check_registry
for text in sys.argv[2:]:  # the registry is read once a process
    Path(sys.argv[1]).write_text(text)
    if os.fork() == 0:
        try: check_registry(); print(list(TASKS), flush=True)
        except ValueError as error: print(error, flush=True)
        os._exit(0)
    os.wait()
"""


def test_the_registry_names_what_it_cannot_use(project):
    (project / "task.py").write_text("import nowhere\n", encoding="utf-8")
    file, right = project / "conf" / "base" / "tasks.yml", "dots: docs/examples/dots/task.py"
    (project / "check.py").write_text(CHECK, encoding="utf-8")
    _, output = typed(project, "check.py", str(file), right, *WRONG)
    first, *lines = output.splitlines()
    assert first == str([*TASKS, "dots"])
    for line, (text, messages) in zip(lines, WRONG.items(), strict=True):
        assert line.startswith(f"{file}: ") and all(message in line for message in messages), text


def test_the_file_belongs_to_the_configuration_of_the_command(project, tmp_path_factory):
    """It is found where Kedro finds the project, and in the folder of --conf-source; a wrong entry is one line."""
    (project / "conf" / "base" / "tasks.yml").write_text("dots: docs/examples/dots/task.py\n", encoding="utf-8")
    (project / "notebooks").mkdir()
    code, output = typed(project / "notebooks", "kedro", "registry", "list")
    assert code == 0 and "train_dots" in output
    elsewhere = tmp_path_factory.mktemp("elsewhere") / "settings"
    shutil.copytree(project / "conf", elsewhere)
    (elsewhere / "base" / "tasks.yml").write_text("dots: nowhere.TASK\n", encoding="utf-8")
    for words in (
        ["kedro", "run", f"--conf-source={elsewhere}"],
        ["geo_sokoban_pipeline", "--conf-source", str(elsewhere)],
    ):
        code, output = typed(project, *words, "--pipelines=data_dots")
        assert code == 1 and "Traceback" not in output
        assert output.splitlines()[-1].startswith(f"Error: {elsewhere}/base/tasks.yml: dots: 'nowhere.TASK'")


@pytest.mark.slow
def test_a_whole_task_outside_the_package_is_trained_to_its_report(project: Path) -> None:
    """With the example's configuration beside that of the project."""
    shutil.copytree(ROOT / "docs" / "examples" / "dots" / "conf", project / "conf", dirs_exist_ok=True)
    finish(kedro_command("--pipelines=train_dots", folder=project, data_root=project / "data"))
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
        r"\b(optimal|solver|moves?|levels?|deadlock\w*|boards?|box(es)?|problems?|tool)\b",
        re.sub(r"<(script|style|svg).*?</\1>|<[^>]*>", " ", page, flags=re.DOTALL),
    )


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
