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
    ("run", "section", "message"),
    [
        (RUN, {"env": {"args": {"cell_pxx": 3}}}, r"env\.args\.cell_pxx=3: unknown .* did you mean cell_px"),
        (RUN, {"env": {"args": {"cell_px": 3}}}, r"env\.args\.cell_px=3: must be at least 8"),
        # Images of the data have another size.
        (RUN, {"env": {"args": {"cell_px": 16}}}, r"env\.args\.cell_px=16: differs from sokoban\.cell_px=32"),
        (RUN, {"env": {"args": {"rewards": {"mved": 1}}}}, r"env\.args\.rewards\.mved=1: .* mean moved"),
        (RUN, {"reward": {"args": {"agregate": "sum"}}}, r"reward\.args\.agregate.* mean aggregate"),
        (RUN, {"reward": {"args": {"aggregate": "max"}}}, r"reward\.args\.aggregate='max'"),
        (RUN, {"env": {"factory": "no_such.build"}}, r"env\.factory=no_such\.build: .*no module"),
        (RUN, {"reward": {"function": "missing.py"}}, r"reward\.function=missing\.py: .*no file"),
        (RUN, {"rollout": {"function": "no_such.play"}}, r"rollout\.function=no_such\.play: .*no module"),
        ("train_geo3k", {"env": {"args": {"grade": "x"}}}, r'env\.args\.grade="x": unknown name'),
        ("train_geo3k", {"reward": {"args": {"grader": "exact"}}}, r'reward\.args\.grader="exact": input should be'),
        ("train_geo3k", {"env": {"factory": "nowhere.build_env"}}, r"env\.factory=nowhere\.build_env"),
        (
            "train_geo3k_multi_turn",
            {"env": {"args": {"max_turns": 3, "feedback": "long"}}},
            r'env\.args\.feedback="long"',
        ),
    ],
)
def test_what_cannot_be_used_is_named(tmp_path: Path, run: str, section: dict[str, Any], message: str) -> None:
    check_plugins(run, ProjectParameters())
    given = ProjectParameters.model_validate({run: section, "sokoban": {"cell_px": 32}})
    with pytest.raises(ParameterError, match=rf"{run}\.{message}"):
        check_plugins(run, given)
    # Own code is only looked up.
    (tmp_path / "world.py").write_text("def build_env(sample, args): raise RuntimeError\n")
    own = {"env": {"factory": str(tmp_path / "world.py"), "args": {"anything": 1}}}
    check_plugins(run, ProjectParameters.model_validate({run: own}))


def test_own_code_that_cannot_be_loaded_is_told_with_its_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.py").write_text("import json\n1 / 0\n")
    with pytest.raises(ParameterError) as error:
        check_plugins(RUN, ProjectParameters.model_validate({RUN: {"reward": {"function": "own.py"}}}))
    said = "it cannot be loaded. ZeroDivisionError: division by zero, in own.py, line 2: 1 / 0"
    assert str(error.value) == f"train_sokoban.reward.function=own.py: {said}"
