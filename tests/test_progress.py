"""Lines that long work writes where there is no terminal."""

from __future__ import annotations

import itertools
import logging
import time
from functools import partial

import pytest

from builders import CONTEXT, make_trajectories
from geo_sokoban_pipeline import console
from geo_sokoban_pipeline.config.grpo import ExportPipelineOptions, SourceOptions
from geo_sokoban_pipeline.config.policy import PolicyOptions
from geo_sokoban_pipeline.console import quieten_libraries
from geo_sokoban_pipeline.evaluation.audit import audit_stored_files
from geo_sokoban_pipeline.pipelines.train.nodes import prepare_policy
from geo_sokoban_pipeline.trajectories.exports import write_export
from geo_sokoban_pipeline.trajectories.inspect_log import write_logs
from geo_sokoban_pipeline.trajectories.parquet import write_trajectories
from geo_sokoban_pipeline.trajectories.types import trajectories_to_table


@pytest.mark.parametrize(
    ("name", "total", "done", "first", "seconds", "units", "lines"),
    [
        ("solve levels", 40, 0, 1.0, 1.0, 19, ["solve levels 5/40, 35 s left", "solve levels 15/40, 25 s left"]),
        # The first unit, which loads, is no pace.
        ("GRPO", 100, 20, 60.0, 2.0, 10,
         ["GRPO 21/100", "GRPO 26/100, 2 min 28 s left", "GRPO 31/100, 2 min 18 s left"]),
    ],
)  # fmt: skip
def test_lines_come_after_five_seconds_and_then_every_ten(
    monkeypatch, caplog, name, total, done, first, seconds, units, lines
):
    clock = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(console, "on_terminal", lambda: False)
    caplog.set_level(logging.INFO)
    with console.track(name, total, done) as work:
        for spent in (first, *[seconds] * units):
            clock[0] += spent
            work.advance()
    assert [record.getMessage() for record in caplog.records] == lines


def test_a_terminal_shows_the_time_left_of_units_of_minutes(monkeypatch, capsys):
    clock = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(console, "on_terminal", lambda: True)
    with console.track("GRPO", 4) as work:
        for note in ("loss 0.2", "loss 0.1"):
            clock[0] += 300
            work.advance(note=note)
    assert "2/4 10 min 00 s left loss 0.1" in capsys.readouterr().out


def test_libraries_say_the_name_of_a_node_and_no_more(caplog):
    quieten_libraries()
    caplog.set_level(logging.INFO)
    node, runner = logging.getLogger("kedro.pipeline.node"), logging.getLogger("kedro.runner.sequential_runner")
    node.info("Running node: %s", "train_grpo: train_grpo([a;b]) -> [c]", extra={"markup": False})
    node.error("Node %s failed with error: \n%s", "train_grpo: train_grpo([a;b]) -> [c]", "out of memory")
    runner.info("Using synchronous mode for loading and saving data. Use the --async flag")
    runner.info("Completed node: %s", "train_sokoban.train_grpo")
    runner.info("Completed 3 out of 9 tasks")
    runner.warning("There are 4 nodes that have not run.\nYou can resume the pipeline run")
    said = [record.getMessage() for record in caplog.records]
    assert said == ["Running node: train_grpo", "Node train_grpo failed", "Completed 3 out of 9 tasks"]


OPTIONS = ExportPipelineOptions(source=SourceOptions(run="train_sokoban"), tables=("chat",), solved=False)
COMMANDS = {
    "audit": lambda folder, parts: audit_stored_files({}, {"outputs": folder}),
    "export": lambda folder, parts: write_export(parts, folder / "export", OPTIONS, {}),
    "logs of Inspect": lambda folder, parts: write_logs(parts, folder / "inspect", "train_sokoban/default", {}),
    "policy": lambda folder, parts: prepare_policy(None, PolicyOptions(), 0),
}


@pytest.mark.parametrize("name", COMMANDS)
def test_long_commands_say_how_far_they_are(name, tmp_path, monkeypatch, caplog):
    (tmp_path / "export").mkdir()
    parts = [tmp_path / f"iter={number}" / "part-000.parquet" for number in range(2)]
    for path in parts:
        write_trajectories(path, trajectories_to_table(make_trajectories(2), CONTEXT))
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(console.time, "monotonic", partial(next, itertools.count(0, 6)))  # each unit takes six seconds
    COMMANDS[name](tmp_path, parts)
    lines = [record.getMessage() for record in caplog.records if record.name == console.__name__]
    assert [count for line in lines for count in ("1/2", "2/2") if count in line] == ["1/2", "2/2"]
