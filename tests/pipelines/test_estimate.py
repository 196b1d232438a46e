"""The estimate as a command: a table and a stored file, from parameters alone."""

from __future__ import annotations

import socket
from typing import Any

import pytest

from geo_sokoban_pipeline.config.launcher_env import VARIABLES
from geo_sokoban_pipeline.runs.storage import read_json
from runs import FullSize


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise AssertionError("an estimate needs no network")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    for variable in VARIABLES:
        monkeypatch.delenv(variable.name, raising=False)


@pytest.mark.usefixtures("no_network")
def test_an_estimate_is_printed_and_stored(tmp_path: Any) -> None:
    project = FullSize(tmp_path / "data")
    words = "estimate_sokoban.gpu=H200,estimate_sokoban.gpu_hour_price=2"
    result = project.succeed("--pipelines=estimate_sokoban", f"--params={words}")
    found = read_json(project.folder("08_reporting", "estimate_sokoban") / "estimate.json")
    assert (found["run"], found["model"], found["gpu"], found["is_predicted"]) == ("train_sokoban", "2B", "H200", True)
    assert found["hours"] == pytest.approx(800 * found["iteration"] / 3600)
    assert found["price"] == pytest.approx(2 * found["gpus"] * found["hours"])
    for text in (f"Estimate of train_sokoban, 2B on {found['gpus']} × H200: predicted, not measured", found["verdict"]):
        assert text in " ".join(result.output.replace("│", " ").split())  # a long cell is wrapped
    files = {path.name for path in project.root.rglob("*") if path.is_file()}
    assert files == {"estimate.json", "run.lock"}


def test_a_model_of_unknown_size_is_one_line(tmp_path: Any) -> None:
    project = FullSize(tmp_path / "data")
    line = project.refused("--pipelines=estimate_geo3k", "--params=train_geo3k.policy.path=me/own")
    assert "give one of about its size as estimate_<task>.model" in line
