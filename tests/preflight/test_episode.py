"""Own code before a run: found, callable as the run calls it, and one episode of it makes a valid row."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from geo_sokoban_pipeline.envs.inspection import guard
from geo_sokoban_pipeline.policies.policy import Policy
from geo_sokoban_pipeline.preflight.first_checks import check_plugins
from geo_sokoban_pipeline.preflight.model import inspect_model
from geo_sokoban_pipeline.preflight.own_code import EpisodeShape, check_signatures, try_episode
from preflight.conftest import says
from task_options import PolicyOptions

RUN = "train_sokoban"
FILES = {
    "few.py": "def build_env(sample): ...\ndef reward(outcome): ...\ndef build_teacher(name): ...\n"
    "def rollout(engine): ...\n",
    "number.py": "build_env = reward = build_teacher = rollout = 3\n",
    "broken.py": "def build_env(sample, args): raise OSError('no display')\n"
    "def reward(outcome, args): raise KeyError('dist')\n"
    "def build_teacher(name, patience, noise): raise RuntimeError('no expert today')\n",
    "odd.py": "def reward(outcome, args): return {'reward': float('nan')}\n",
}
SECTIONS = {
    "env.factory": ("env", "factory"),
    "reward.function": ("reward", "function"),
    "rollout.function": ("rollout", "function"),
}


@pytest.fixture
def files(tmp_path: Path) -> Path:
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    return tmp_path


def changes(parameter: str, spec: str) -> dict[str, Any]:
    if parameter == "warm_start.teacher.factory":
        return {"warm_start": {"teacher": {"factory": spec}}}
    section, name = SECTIONS[parameter]
    return {section: {name: spec}}


@pytest.fixture(scope="module")
def encoding() -> Policy:
    shape = inspect_model(PolicyOptions())[1]
    assert shape is not None and shape.encoding.model is None
    return shape.encoding


@pytest.fixture(scope="module")
def rows(sokoban_rows: Any) -> list[dict[str, Any]]:
    return sokoban_rows(32)


@pytest.mark.parametrize("parameter", [*SECTIONS, "warm_start.teacher.factory"])
@pytest.mark.parametrize(
    ("spec", "text"),
    [
        ("no_such_module.name", "no module 'no_such_module'"),
        ("few.py", "cannot be called with"),
        ("number.py", "is an int"),
    ],
)
def test_unusable_own_code(make_subject: Any, files: Path, parameter: str, spec: str, text: str) -> None:
    options = make_subject(
        train_sokoban=changes(parameter, str(files / spec) if spec.endswith(".py") else spec)
    ).options
    checks = {check.name: check for check in check_signatures(RUN, options)}
    assert len(checks) == 4
    says([checks.pop(f"{RUN}.{parameter}")], "failure", text)
    assert {other.state for other in checks.values()} == {"ok"}


def test_one_episode_says_what_it_costs(make_subject: Any, encoding: Policy, rows: list[dict[str, Any]]) -> None:
    options = make_subject().options
    (check,), shape = try_episode(encoding, rows, options, 0)
    assert check.state == "ok"
    assert shape.image_tokens == 9 and shape.patches == 36  # 96×96 pixels
    assert shape.prompt > shape.observation > shape.image_tokens
    assert 0 < shape.response <= options.rollout.max_tokens_per_turn
    assert shape.longest(options) == shape.prompt + 10 * (8 + shape.observation)
    # The longest prompt counts, not that of the episode that is played.
    short = rows[0] | {"solution_length": 99}  # this one is played
    wordy = rows[1] | {"prompt": f"{rows[1]['prompt']} and think about it before you move" * 3, "solution_length": 1}
    wordy["prompt"] = wordy["prompt"].replace("<image>", "", 2)
    assert try_episode(encoding, [short, wordy, *rows[2:8]], options, 0)[1].prompt > shape.prompt + 20
    with pytest.raises(RuntimeError, match="cannot be encoded"):
        try_episode(encoding, [short, rows[1] | {"images": ["no image"]}], options, 0)


OWN_TASK = """
class World:
    def reset(self): return {"obs_str": "begin"}, {}
    def step(self, text): return {"obs_str": f"you said {text}"}, False, {}
    def format_observation(self, observation):
        return {"role": "user", "content": [{"type": "text", "text": observation["obs_str"]}]}
    def close(self): pass
def build_env(sample, args): return World()
def reward(outcome, args): return {"reward": 0.5}
"""


def test_an_own_environment_needs_no_expert_without_a_warm_start(
    make_subject: Any, tmp_path: Path, encoding: Policy
) -> None:
    (tmp_path / "world.py").write_text(OWN_TASK)
    spec, rows = str(tmp_path / "world.py"), [{"id": "one", "prompt": "Say something", "images": None}]
    own = {"env": {"factory": spec, "args": {}}, "reward": {"function": spec, "args": {}}}
    without = {"steps": 0, "teacher": {"factory": "no_such.teacher"}}
    options = make_subject(train_sokoban={**own, "warm_start": without}).options
    assert {check.state for check in check_signatures(RUN, options)} == {"ok"}
    check_plugins(RUN, make_subject(train_sokoban={**own, "warm_start": without}).parameters)
    (check,), shape = try_episode(encoding, rows, options, 0)
    assert (check.state, check.found.startswith("one plain response: 1 turns")) == ("ok", True)
    assert shape.response == 0 and shape.observation > 0
    with pytest.raises(AttributeError, match="board"):  # the expert of Sokoban looks at its board
        try_episode(encoding, rows, make_subject(train_sokoban=own).options, 0)


@pytest.mark.parametrize(
    ("rollout", "longest"),
    [
        ({"max_tokens_per_turn": None}, None),
        ({"max_tokens_per_turn": 8, "max_turns": 3}, 30 + 3 * (8 + 20)),
        ({"max_tokens_per_turn": None, "max_response_tokens": 100}, 30 + 100 + 20),
        ({"max_tokens_per_turn": 8, "max_context_tokens": 64}, 64),
    ],
)
def test_longest_episode(make_subject: Any, rollout: dict[str, Any], longest: int | None) -> None:
    shape = EpisodeShape(prompt=30, observation=20, response=6, patches=36, image_tokens=9, image_bytes=400)
    assert shape.longest(make_subject(train_sokoban={"rollout": rollout}).options) == longest


@pytest.mark.parametrize(
    ("parameter", "file", "text"),
    [
        ("env.factory", "broken.py", "OSError: no display"),
        ("reward.function", "broken.py", "KeyError: 'dist'"),
        ("reward.function", "odd.py", "reward=nan; numbers must be finite"),
        ("warm_start.teacher.factory", "broken.py", "no expert today"),
    ],
)
def test_own_code_that_raises(
    make_subject: Any, files: Path, encoding: Policy, rows: list[dict[str, Any]], parameter: str, file: str, text: str
) -> None:
    options = make_subject(train_sokoban=changes(parameter, str(files / file))).options
    says(guard("own code", "one episode", lambda: try_episode(encoding, rows, options, 0)[0]), "failure", text)
