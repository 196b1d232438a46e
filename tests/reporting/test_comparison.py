"""The page about several runs: what differs, who is better, and when nobody can say so."""

from __future__ import annotations

import re

import pytest

from geo_sokoban_pipeline.reporting.comparison import ComparedRun, build_comparison, list_differences
from geo_sokoban_pipeline.runs.folders import RunStore, SourceError
from reporting.material import lazily, make_levels, play
from reporting.run_numbers import make_metrics, make_summary
from reporting.test_report import Page


def make_run(run_id: str, skill: float | None = None, levels: slice = slice(48), **changes) -> ComparedRun:
    """A run without curves whose final policy has this skill; None: it has no evaluation."""
    values = {
        "run": "train_sokoban",
        "run_id": run_id,
        "metrics": [{"iteration": number} for number in range(60)],
        "summary": {},
        "settings": {"seed": 0, "optimizer.learning_rate": 0.001, "grpo.clip": None},
        "time": None,
        "held_out": {},
    }
    if skill is not None:
        shown = list(enumerate(make_levels(48)))[levels]
        episodes = [play(level, skill, f"{run_id}/sampled", at) for at, level in shown]
        values["held_out"] = {"iter=00001/part-000": lazily(episodes)}
        values["summary"] = make_summary(60) | {"prompts": len(shown), "prompts_hash": run_id}
    return ComparedRun(**(values | changes))


def text_of(*runs: ComparedRun) -> str:
    page = Page(build_comparison(runs))
    assert {link[1:] for link in page.attributes("href")} <= page.ids
    return page.text.replace("\u202f", " ")


@pytest.mark.parametrize(
    ("skills", "verdict"),
    [
        ((0.2, 0.9), "On the same 48 levels, b is better than a: +"),
        ((0.9, 0.2), "On the same 48 levels, b is worse than a: \u2212"),
        ((0.5, 0.5), "On the same 48 levels, b is not significantly different from a: "),
    ],
)
def test_two_runs_are_judged_on_the_same_prompts(skills, verdict):
    assert verdict in text_of(make_run("a", skills[0]), make_run("b", skills[1]))


def test_an_evaluation_of_an_older_checkpoint_is_called_one():
    first, second = make_run("a", 0.2, slice(8)), make_run("b", 0.9, slice(8))
    first.summary["checkpoints"] = {"final": {"iteration": 0, "policy_version": 1, "hash": "a" * 32}}
    second.summary["checkpoints"] = {"final": {"iteration": 59, "policy_version": 60, "hash": "b" * 32}}
    text = text_of(first, second)
    assert "The evaluation of a is of the checkpoint after 1 of 60 iterations." in text
    assert "The evaluation of b" not in text
    policies = ["after 1 iteration, content aaaaaaaaaaaa", "after 60 iterations, content bbbbbbbbbbbb"]
    assert ("evaluated policy", policies) in list_differences([first, second])


def test_runs_of_other_prompts_are_not_compared():
    text = text_of(make_run("a", 0.5, slice(0, 20)), make_run("b", 0.9, slice(20, 48)))
    assert "b and a have no evaluation on the same levels" in text and "not evaluated on the same prompts" in text
    text = text_of(make_run("a", 0.5, slice(0, 20)), make_run("b", 0.9, slice(10, 48)))
    assert "On the same 10 levels" in text and "10 of 38" in text
    assert "evaluation prompts, content hash" in text


def test_seven_runs_of_several_tasks_are_drawn_and_those_without_an_evaluation_have_curves():
    metrics = make_metrics(20)
    runs = [make_run(f"seed{at}", 0.5, slice(24), metrics=metrics) for at in range(5)]
    runs += [make_run("seed5", 0.9, slice(24), metrics=metrics), make_run("seed0", run="train_geo3k", metrics=metrics)]
    page = Page(build_comparison(runs))
    assert {"tests", "evaluation", "curves", "settings", "runs"} <= page.ids
    for words in (
        "train_geo3k/seed0 is not comparable",
        "train_sokoban/seed5 is better",
        "no evaluation is stored",
        "Training solve rate",
    ):
        assert words in page.text
    assert not re.search(r"\bnan\b|\bNone\b", page.text)


def test_only_settings_that_differ_are_listed():
    first = make_run("a", settings={"seed": 0, "grpo.clip": None, "input.prompts": "x" * 32})
    second = make_run("b", settings={"seed": 2, "input.prompts": "x" * 32, "sokoban.inner_walls": [0, 2]})
    second = ComparedRun(**{**vars(second), "metrics": make_metrics(10)})
    assert list_differences([first, second]) == [
        ("grpo.clip", ["null", "–"]),
        ("iterations stored", ["60", "10"]),
        ("seed", ["0", "2"]),
        ("sokoban.inner_walls", ["–", "[0, 2]"]),
    ]
    other = ComparedRun(**{**vars(first), "summary": {**first.summary, "data_id": "6x6-1box-0af3"}})
    assert list_differences([first, other]) == [("data", ["–", "6x6-1box-0af3"])]
    assert "are equal" in text_of(make_run("a"), make_run("b"))


STORED = "Stored are train_geo3k/default, train_sokoban/"


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ([], f"runs=[]: give two runs or more, such as --params 'runs=[default,seed2]'. {STORED}"),
        (["default"], "runs=[default]: give two runs"),
        (["default", "train_sokoban/default"], "give two runs"),
        (["default", "seed3"], f"runs: train_sokoban/seed3 is not stored. {STORED}"),
    ],
)
def test_runs_that_cannot_be_compared(names, message, tmp_path):
    store = RunStore(tmp_path)
    with pytest.raises(SourceError, match="No training run is stored in"):
        store.find_runs(names, "train_sokoban")
    runs = [("train_sokoban", "default"), ("train_geo3k", "default"), ("train_sokoban", "seed2")]
    for run, run_id in runs:
        (tmp_path / "07_model_output" / run / run_id / "metrics").mkdir(parents=True)
    with pytest.raises(SourceError, match=re.escape(message)):
        store.find_runs(names, "train_sokoban")
    assert store.find_runs(["default", "train_geo3k/default"], "train_sokoban") == runs[:2]
