"""Parameters are checked before any work."""

from __future__ import annotations

from pathlib import Path

import click
import pytest

from geo_sokoban_pipeline.config import ParameterError
from geo_sokoban_pipeline.console import refuse
from geo_sokoban_pipeline.hooks.config_loader import ProjectConfigLoader
from geo_sokoban_pipeline.settings import CONFIG_LOADER_ARGS
from geo_sokoban_pipeline.tasks import TASKS

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"train_sokobann": {"a": 1}}, r"train_sokobann: unknown name\. Did you mean train_sokoban\?"),
        ({"sead": 3}, r"sead=3: unknown name\. Did you mean seed\?"),
        ({"seed": "x"}, r'seed="x": input should be a valid integer'),
        ({"train_sokoban": {"task": "geo3k"}}, r'train_sokoban\.task="geo3k": input should be .sokoban.'),
        ({"run_id": "a/b"}, r'run_id="a/b": a run id is the name of a folder'),
    ],
)
def test_wrong_parameters_stop_before_any_node(project, params, message):
    with pytest.raises(ParameterError, match=message):
        project.run("train_sokoban", params=params)
    assert project.seen == []
    assert not (project.path / "data").exists()


@pytest.mark.parametrize(("name", "value"), [("run_id", "seed2"), ("fresh", True)])
def test_what_belongs_to_one_command_is_refused_in_files(project, name, value):
    project.write_parameters({name: value})
    with pytest.raises(ParameterError, match=f"{name}={value}: stands in a configuration file"):
        project.run("train_sokoban")


def test_every_node_knows_run_id_and_fresh(project):
    project.run("train_sokoban")
    project.run("train_sokoban", params={"run_id": "2", "seed": 7, "fresh": True})
    assert project.seen == [
        {"seed": 0, "run_id": "default", "fresh": False},
        {"seed": 7, "run_id": "2", "fresh": True},
    ]


@pytest.mark.parametrize(
    ("given", "run_id"),
    [
        ({}, "default"),
        ({"run_id": "seed2"}, "seed2"),
        ({"run_id": "a", "update_geo3k": {"source": {"run_id": "b"}}}, "b"),
    ],
)
def test_sections_of_the_files_name_their_task_and_their_run(given, run_id):
    """A training section names its task, one on stored runs the task's own run of the command's run id, unless the
    command names another one.
    """
    found = ProjectConfigLoader(str(ROOT / "conf"), "test", given, **CONFIG_LOADER_ARGS)["parameters"]
    assert found["run_id"] == given.get("run_id", "default") and found["fresh"] is False
    for task in TASKS:
        assert found[f"train_{task}"]["task"] == task
        for kind in ("rollout", "update", "evaluate", "control"):
            other = run_id if f"{kind}_{task}" in given else given.get("run_id", "default")
            source = found[f"{kind}_{task}"]["source"]
            assert (source["run"], source["run_id"]) == (f"train_{task}", other)


def test_refusal_is_a_plain_message_on_the_command_line_only():
    with pytest.raises(ParameterError):
        refuse(ParameterError("a"))
    with click.Context(click.Command("run")), pytest.raises(click.ClickException, match="a"):
        refuse(ParameterError("a"))
