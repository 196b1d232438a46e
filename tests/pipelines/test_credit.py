"""credit_* on a finished run: estimators, the user's among them, against what continuations have measured."""

from __future__ import annotations

import json
import signal

import pytest

from geo_sokoban_pipeline.config.credit import CEILING, RECIPE, standard_advantages
from kill_hook import kill_at
from runs import finish, kedro_command

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("stored")]
MINE = """
def advantage(episodes, args):
    mean = episodes.reward.mean()
    return [args["scale"] * (reward - mean) for reward in episodes.reward]
"""
BROKEN = "def advantage(episodes, args):\n    return None\n"


def test_estimators_of_a_run(finished_run, tmp_path):
    """A command that was killed makes the same tables; a row of the user's stands beside the registered ones."""
    killed, whole = (finished_run.clone(tmp_path / name) for name in ("killed", "whole"))
    for name, text in (("mine", MINE), ("broken", BROKEN)):
        (tmp_path / f"{name}.py").write_text(text, encoding="utf-8")
    options = {
        "estimators": {
            "mine": {"advantage": f"{tmp_path / 'mine.py'}", "advantage_args": {"scale": 2.0}},
            "broken": {"advantage": f"{tmp_path / 'broken.py'}"},
        },
    }
    words = ["--pipelines=credit_sokoban", "--params", f"credit_sokoban={json.dumps(options)}"]
    point = kill_at("after_save:credit_sokoban.turn_values", 3)  # the first one empties the folder
    finish(kedro_command(*words, data_root=killed.root, **point), -signal.SIGKILL)
    assert list(killed.load("credit_sokoban.turn_values")) == ["iter=00003/part-000", "iter=00003/part-001"]
    for project in (killed, whole):
        project.run("credit_sokoban", params={"credit_sokoban": options})
    tables = [project.load("credit_sokoban.turn_values@pandas") for project in (killed, whole)]
    assert tables[0].equals(tables[1]) and tables[0]["left_out"].isna().all()
    assert set(tables[0]["run"]) == {"credit_sokoban"} and set(tables[0]["run_id"]) == {"default"}
    found, again = (project.load("credit_sokoban.credit") for project in (killed, whole))
    assert found == again
    assert (found["prompts"], found["groups"], found["policy_version"]) == (4, 20, 3)
    episodes = whole.load("credit_sokoban.trajectories@pandas")
    assert set(episodes["iteration"]) == {3, 4, 5, 6, 7} and len(episodes) == found["episodes"]
    assert (episodes.groupby(["task_id", "iteration"]).size() == len(episodes) / 20).all()  # each prompt in each
    first = tables[0].groupby("iteration").size()
    assert first[3] == found["whole_turns"] == episodes[episodes["iteration"] == 3]["n_turns"].sum()
    assert first.sum() == found["measured_turns"] > first[3]
    assert found["estimators"].keys() == {*standard_advantages(), "mine", RECIPE, CEILING}
    assert found["left_out"].keys() == {"broken"} and "must return" in found["left_out"]["broken"]
    assert "against the true ones" in whole.load("credit_sokoban.report")
    # Nothing of it is a part of the run.
    assert set(whole.load("train_sokoban.trajectories@pandas")["iteration"]) == {0, 1, 2}


def test_geometry(stored_run):
    """One response: its true advantage is its reward less the value of the prompt."""
    project = stored_run("geo3k")
    project.run("credit_geo3k")
    found = project.load("credit_geo3k.credit")
    assert found["prompts"] == 4 and found["estimators"]["rloo"]["zeros"]["value"] is not None
