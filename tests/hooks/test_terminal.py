"""What a command says about its runs."""

from __future__ import annotations

import logging
import os
import shlex
from types import SimpleNamespace

import pytest
from kedro.framework.project import configure_project, pipelines

from geo_sokoban_pipeline.formats import percent
from geo_sokoban_pipeline.hooks.terminal import TerminalHooks, write_result
from geo_sokoban_pipeline.hooks.tracked import store_uri
from geo_sokoban_pipeline.parameters import TrackingOptions
from geo_sokoban_pipeline.runs.folders import JOURNAL, RunFolders
from geo_sokoban_pipeline.runs.storage import write_json
from hooks.conftest import row

FIRST = [row("warm_start", "sampled", 0.409, 0.37, 0.45), row("warm_start", "greedy", 0.35)]
LAST = [row("final", "sampled", 0.723, 0.688, 0.757), row("final", "greedy", 0.733)]


@pytest.mark.parametrize(
    ("summary", "text"),
    [
        (
            {"policies": ["warm_start", "final"], "rows": FIRST + LAST},
            "40.9 % → 72.3 % sampled (95 % 68.8–75.7), 73.3 % greedy",
        ),
        ({"policies": ["final"], "rows": LAST}, "72.3 % sampled (95 % 68.8–75.7), 73.3 % greedy, by final"),
        (
            {"policies": ["a/b"], "rows": [{**LAST[0], "policy": "a/b"}]},
            "72.3 % sampled (95 % 68.8–75.7), by a/b",
        ),
        ({"policies": ["final"], "rows": []}, ""),
        ({}, ""),
    ],
)
def test_the_headline(summary, text):
    assert write_result(summary) == text


def test_terminal_and_report_round_alike():
    for solved in range(641):
        rate = solved / 640
        summary = {"policies": ["final"], "rows": [row("final", "sampled", rate, rate, rate)]}
        shown = percent(rate).replace("\u202f", " ")
        assert write_result(summary) == f"{shown} sampled (95 % {shown[:-2]}–{shown[:-2]}), by final"


def test_the_result_of_an_older_checkpoint_is_called_one(tmp_path, caplog):
    """The loop alone was run: neither the stored evaluation nor the stored report is of what it has made."""
    caplog.set_level(logging.INFO, "geo_sokoban_pipeline.hooks.terminal")
    checkpoints = {"final": {"iteration": 0, "policy_version": 1, "hash": "a" * 32}}
    summary = {"policies": ["warm_start", "final"], "rows": FIRST + LAST, "checkpoints": checkpoints}
    folders = RunFolders.of(tmp_path, "train_sokoban", "default")
    write_json(folders.reports / "eval_summary.json", summary)
    (folders.reports / "report.html").write_text("")
    os.utime(folders.reports / "report.html", (1, 1))
    hooks = start_hooks(tmp_path, 4, 4)
    caplog.clear()
    hooks.after_pipeline_run()
    said = [record.getMessage() for record in caplog.records]
    assert said[0] == f"held-out: {write_result(summary, 4)}" != f"held-out: {write_result(summary)}"
    assert said[0].endswith(", of the checkpoint after 1 of 4 iterations")
    assert "of an earlier command" in said[1]


def start_hooks(tmp_path, stored, iterations, *, warm=True, env="test", **parameters):
    """The hooks of a command that trains a run of which this much is stored."""
    folders = RunFolders.of(tmp_path, "train_sokoban", parameters.get("run_id", "default"))
    names = [f"checkpoints/iter={number:05d}" for number in range(max(0, stored - 3), stored)]
    for name in [*names, *(["policy"] if warm else [])]:
        write_json(folders.models / name / "manifest.json", {})
    configure_project("geo_sokoban_pipeline", preserve_logging=True)
    loader = {
        "parameters": {"train_sokoban": {"loop": {"iterations": iterations}}, **parameters},
        "globals": {"data_root": str(tmp_path)},
    }
    hooks = TerminalHooks()
    hooks.after_context_created(SimpleNamespace(config_loader=loader, project_path=tmp_path, env=env))
    hooks.before_pipeline_run(pipelines["train_sokoban"])
    return hooks


@pytest.mark.parametrize(
    ("stored", "iterations", "warm", "lines", "left"),
    [
        (0, 150, False, [], "Nothing of the training is stored yet; the same command starts again."),
        (0, 150, True, ["continues after the warm start"], "The warm start is stored; the same command goes on"),
        (23, 150, True, ["continues after 23 of 150 iterations"], "23 of 150 iterations are stored; the same command"),
        (150, 150, True, ["all 150 iterations are stored, nothing to train"], "150 of 150 iterations are stored"),
        (
            150,
            50,
            True,
            ["150 iterations are stored, loop.iterations=50 asks for fewer. Nothing"],
            "50 of 50",
        ),
        (150, 400, True, ["continues after 150 of 400 iterations"], "150 of 400 iterations are stored"),
    ],
)
def test_from_where_a_run_goes_on(tmp_path, caplog, stored, iterations, warm, lines, left):
    caplog.set_level(logging.INFO, "geo_sokoban_pipeline.hooks.terminal")
    hooks = start_hooks(tmp_path, stored, iterations, warm=warm)
    said = [record.getMessage() for record in caplog.records if record.name.endswith("hooks.terminal")]
    assert len(said) == len(lines)
    for text, line in zip(said, lines, strict=True):
        assert text.startswith(f"train_sokoban/default: {line}")
    (told,) = hooks.tell_interrupted()
    assert told.startswith(f"train_sokoban/default: stopped. {left}")


@pytest.mark.parametrize(
    ("stored", "warm", "aside", "left"),
    [
        (0, False, True, "The next command puts the run back"),
        (0, True, True, "The next command puts the run back"),
        (0, True, False, "The warm start is stored; the same command without fresh=true goes on from there."),
        (2, True, True, "2 of 5 iterations are stored; the same command without fresh=true goes on from there."),
        (2, True, False, "2 of 5 iterations are stored; the same command without fresh=true goes on from there."),
        (0, False, False, "Nothing of the training is stored yet; the same command starts again."),
    ],
)
def test_what_is_left_of_an_interrupted_replacement(tmp_path, stored, warm, aside, left):
    hooks = start_hooks(tmp_path, stored, 5, warm=warm, fresh=True)
    if aside:
        write_json(RunFolders.of(tmp_path, "train_sokoban", "default").models / JOURNAL, {"state": "aside"})
    (told,) = hooks.tell_interrupted()
    assert told.startswith(f"train_sokoban/default: stopped. {left}")


@pytest.mark.parametrize("env", ["test", None])
@pytest.mark.parametrize("uri", [None, "sqlite:////x y/m.db", "http://127.0.0.1:5000"])
@pytest.mark.parametrize(("root", "run_id"), [("runs #1 50%25 ü?'x", "1.10"), ("runs", "default")])
def test_ways_on_can_be_pasted_and_mean_the_run(tmp_path, monkeypatch, caplog, env, uri, root, run_id):
    caplog.set_level(logging.INFO, "geo_sokoban_pipeline.hooks.terminal")
    monkeypatch.setenv("GEO_SOKOBAN_DATA_ROOT", root)
    monkeypatch.chdir(tmp_path)
    place = tmp_path / root
    reports = RunFolders.of(place, "train_sokoban", run_id).reports
    for path in (place / "notebooks/01_explore_trajectories.ipynb", reports / "report.html"):
        write_json(path, {})
    start_hooks(place, 3, 3, env=env, run_id=run_id, tracking={"uri": uri}).after_pipeline_run()
    lines = [record.getMessage() for record in caplog.records if record.name.endswith("hooks.terminal")]
    ways = [shlex.split(line, comments=True) for line in lines if line.startswith("  ")]
    assert len(ways) == 5
    for words, kind in zip(ways, ("evaluate", "control", "browse"), strict=False):
        on = [*([] if env is None else ["--env=test"]), *([] if run_id == "default" else ["--params", "run_id=1.10"])]
        assert words == [f"GEO_SOKOBAN_DATA_ROOT={root}", "kedro", "run", f"--pipelines={kind}_sokoban", *on]
    variables = dict(word.split("=", 1) for word in ways[3] if word.startswith("GEO_SOKOBAN_"))
    chosen = {} if env is None else {"GEO_SOKOBAN_ENV": "test"}
    run = {"GEO_SOKOBAN_RUN": "train_sokoban", "GEO_SOKOBAN_RUN_ID": run_id}
    assert variables == {"GEO_SOKOBAN_DATA_ROOT": root, **chosen, **run}
    assert ways[3][-3:-1] == ["jupyter", "lab"] and os.path.exists(ways[3][-1])
    if uri is not None and uri.startswith("http"):
        assert ways[4] == [uri]
    else:
        start = ["MLFLOW_SERVER_ENABLE_JOB_EXECUTION=false", "mlflow", "ui", "--workers", "1", "--backend-store-uri"]
        assert ways[4] == [*start, uri or store_uri(TrackingOptions(), place)]
