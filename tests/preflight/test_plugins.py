"""What the parameters name is looked up, and its arguments tried, before a run does any work."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from geo_sokoban_pipeline.config.base import ParameterError
from geo_sokoban_pipeline.parameters import ProjectParameters
from geo_sokoban_pipeline.preflight.first_checks import check_plugins

RUN = "train_sokoban"


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"env": {"args": {"cell_pxx": 3}}}, r"train_sokoban\.env\.args\.cell_pxx=3: unknown .* did you mean cell_px"),
        ({"env": {"args": {"cell_px": 3}}}, r"train_sokoban\.env\.args\.cell_px=3: must be at least 8"),
        ({"env": {"args": {"rewards": {"mved": 1}}}}, r"train_sokoban\.env\.args\.rewards\.mved=1: .* mean moved"),
        ({"reward": {"args": {"agregate": "sum"}}}, r"train_sokoban\.reward\.args\.agregate.* mean aggregate"),
        ({"reward": {"args": {"aggregate": "max"}}}, r"train_sokoban\.reward\.args\.aggregate='max'"),
        ({"env": {"factory": "no_such.build"}}, r"train_sokoban\.env\.factory=no_such\.build: .*no module"),
        ({"reward": {"function": "missing.py"}}, r"train_sokoban\.reward\.function=missing\.py: .*no file"),
        ({"rollout": {"function": "no_such.play"}}, r"train_sokoban\.rollout\.function=no_such\.play: .*no module"),
    ],
)
def test_what_cannot_be_used_is_named(section: dict[str, Any], message: str) -> None:
    with pytest.raises(ParameterError, match=message):
        check_plugins(RUN, ProjectParameters.model_validate({RUN: section}))


def test_images_of_two_sizes_are_refused() -> None:
    parameters = {"sokoban": {"cell_px": 32}, RUN: {"env": {"args": {"cell_px": 16}}}}
    with pytest.raises(ParameterError, match=r"env\.args\.cell_px=16: differs from sokoban\.cell_px=32"):
        check_plugins(RUN, ProjectParameters.model_validate(parameters))


def test_own_code_is_only_looked_up(tmp_path: Path) -> None:
    file = tmp_path / "world.py"
    file.write_text("def build_env(sample, args): raise RuntimeError\n")
    section = {"env": {"factory": str(file), "args": {"anything": 1}}}
    check_plugins(RUN, ProjectParameters.model_validate({RUN: section}))


def test_own_code_that_cannot_be_loaded_is_told_with_its_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.py").write_text("import json\n1 / 0\n")
    with pytest.raises(ParameterError) as error:
        check_plugins(RUN, ProjectParameters.model_validate({RUN: {"reward": {"function": "own.py"}}}))
    said = "it cannot be loaded. ZeroDivisionError: division by zero, in own.py, line 2: 1 / 0"
    assert str(error.value) == f"train_sokoban.reward.function=own.py: {said}"


def test_other_pipelines_are_not_looked_at() -> None:
    check_plugins("evaluate_sokoban", ProjectParameters())
