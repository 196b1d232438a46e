"""Tasks: what is known of each, and by what an episode is known."""

from __future__ import annotations

import pytest

from geo_sokoban_pipeline.envs.base import prompt_key
from geo_sokoban_pipeline.parameters import ProjectParameters
from geo_sokoban_pipeline.tasks import TASKS, task_of


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
    ("row", "key"),
    [
        ({"id": "a", "level_hash": "l"}, "l"),
        ({"id": "a", "problem_hash": "p"}, "p"),
        ({"id": "a", "level_hash": None}, "a"),
        ({"id": 7}, "7"),
    ],
)
def test_prompt_key(row, key):
    assert prompt_key(row) == key
