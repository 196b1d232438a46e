"""fork_* on a finished run: the worth of its turns, by the policies that sampled them and by others."""

from __future__ import annotations

import shutil
import signal

import pytest

from kill_hook import kill_at
from runs import finish, kedro_command

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("stored")]
FEW = {"continuations": 6, "first_continuations": 3}
ALL = {**FEW, "first_iteration": 0, "limit": "null"}


def fork(project, task="sokoban", params=None, **options):
    source = {"run": f"train_{task}", "run_id": "default", "checkpoint": options.pop("checkpoint", "latest")}
    given = {f"fork_{task}": {"source": source, **FEW, **options}, **(params or {})}
    project.run(f"fork_{task}", params=given)
    return project.load(f"fork_{task}.turn_values@pandas")


def test_the_worth_of_turns(clone):
    """Of each version's episodes by its own policy; by agents and other checkpoints, whom the audit accepts as well."""
    rows = fork(clone, first_iteration=0, limit=None)
    stored = clone.load("train_sokoban.episodes@pandas")
    trained = stored[stored["split"] == "train"]
    assert len(rows) == trained["n_turns"].sum() and rows["left_out"].isna().all()
    assert (rows["policy_version"] == rows["iteration"]).all() and set(rows["iteration"]) == {0, 1, 2}
    ended = rows.groupby("trajectory_id").last()["value_after"]
    assert ended.to_dict() == trained.set_index("trajectory_id")["reward"].to_dict()
    assert set(rows["forked_by"]) == {"sampler"} and set(rows["continuations"]) == {3, 6}
    by_agent = fork(clone, player="random_legal", limit=5)
    assert set(by_agent["iteration"]) == {2} and by_agent["trajectory_id"].nunique() == 5
    by_first = fork(clone, player="checkpoint", checkpoint="start", split="evaluation", limit=4, turns=1)
    assert set(by_first["forked_by"]) == {"train_sokoban/default@start"} and len(by_first) == 4
    assert set(clone.load("fork_sokoban.turn_values@polars").collect()["iteration"]) == {1}
    greedy = fork(clone, split="evaluation", limit=None, turns=2)
    assert set(greedy["is_greedy"]) == {False, True}
    assert set(greedy[greedy["is_greedy"]]["continuations"]) == {1}
    clone.run("audit_sokoban")
    checks = clone.load("audit_sokoban.audit")["checks"]
    (own,) = (check for check in checks if check["check"] == "turn values")
    assert (own["checked"], own["findings"]) == (len(greedy), [])


def test_a_killed_command_continues(finished_run, tmp_path):
    """After the parts that are stored, to the table of a command that was not killed."""
    killed, whole = (finished_run.clone(tmp_path / name) for name in ("killed", "whole"))
    words = [
        "--pipelines=fork_sokoban",
        "--params",
        ",".join(f"fork_sokoban.{name}={value}" for name, value in ALL.items()),
    ]
    point = kill_at("after_save:fork_sokoban.turn_values", 3)  # the first one empties the folder
    finish(kedro_command(*words, data_root=killed.root, **point), -signal.SIGKILL)
    stored = killed.load("fork_sokoban.turn_values")
    assert list(stored) == ["iter=00000/part-000", "iter=00001/part-000"]
    first = {
        path: path.stat().st_mtime_ns for path in (killed.folder("07_model_output", "fork_sokoban")).rglob("*.parquet")
    }
    again, other = (fork(project, **ALL | {"limit": None}) for project in (killed, whole))
    assert again.equals(other) and set(again["iteration"]) == {0, 1, 2}
    assert fork(killed, **ALL | {"limit": None}).equals(other)  # nothing is left to do
    assert all(path.stat().st_mtime_ns == time for path, time in first.items())


@pytest.mark.parametrize("where", [{"processes": 2}, {"rollout": {"workers": 1}}], ids=["ranks", "workers"])
def test_ranks_and_rollout_workers_fork_too(clone, where):
    """To the table of one process: seeds follow from the histories."""
    few = {"limit": 2, "turns": 2}
    alone = fork(clone, **few)
    assert alone["continuations"].sum() > 0
    shutil.rmtree(clone.folder("07_model_output", "fork_sokoban"))
    assert fork(clone, params={"train_sokoban": where}, **few).equals(alone)


def test_geometry(stored_run):
    """One response is worth what it gains over the value of its prompt."""
    project = stored_run("geo3k_multi_turn")
    rows = fork(project, "geo3k_multi_turn", limit=4)
    assert rows["left_out"].isna().all() and rows["is_solvable"].isna().all()
    assert (rows["advantage"] == rows["value_after"] - rows["value"]).all()


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"player": "nobody"}, "player=nobody: must be sampler, checkpoint, or a baseline of the evaluation (random,"),
        ({"first_continuations": 7}, "first_continuations=7 with continuations=6"),
        ({"first_iteration": 7, "last_iteration": 3}, "last_iteration=3 is before first_iteration=7"),
        ({"ids": ["none"]}, "there is no episode 'none'"),
    ],
)
def test_what_cannot_be_forked_is_said(clone, options, text):
    with pytest.raises(ValueError) as error:
        fork(clone, **options)
    assert text in str(error.value)


def test_a_policy_that_is_gone_is_said(clone):
    """Retention has deleted the checkpoint that sampled the episodes."""
    before = fork(clone, limit=2)
    shutil.rmtree(clone.folder("06_models") / "checkpoints/iter=00000")
    with pytest.raises(
        ValueError, match="policy version 1 of train_sokoban/default is stored no longer; stored are 0, 2"
    ):
        fork(clone, first_iteration=1, last_iteration=1)
    assert clone.load("fork_sokoban.turn_values@pandas").equals(before)  # nothing is replaced
