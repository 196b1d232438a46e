"""What own rewards and environments may return, what they may not, and what is said of it."""

from __future__ import annotations

import threading

import pytest

from rollout.scripted import make_settings, play_scripted

STOP = ("go", "stop")

MUST = ": must return a dict with the key 'reward' (float), or a float; "


def reward_of(tmp_path, body):
    """A file with a reward of this body, or with this code."""
    file = tmp_path / "own.py"
    file.write_text(f"def reward(outcome, args):\n    {body}\n" if body.startswith(("return", "import")) else body)
    return f"{file}:reward"


def play(tmp_path, body):
    settings = make_settings({"ends_after": 1}, reward=reward_of(tmp_path, body))
    (episode,), _ = play_scripted([STOP], settings)
    return episode


JUDGES = """
class Judge:
    async def __call__(self, outcome, args): return 0.5
async def inner(outcome, args): return 0.5
"""


@pytest.mark.parametrize(
    ("body", "reward", "parts"),
    [
        ("return 0.5", 0.5, {}),
        ("return True", 1.0, {}),
        ("import numpy; return numpy.float32(0.5)", 0.5, {}),
        ("import torch; return torch.tensor(0.5)", 0.5, {}),
        ("return {'reward': 2, 'length': 3}", 2.0, {"length": 3.0}),
        ("import collections; return collections.Counter(reward=2)", 2.0, {}),
        (f"{JUDGES}reward = Judge()", 0.5, {}),
        (f"{JUDGES}def reward(outcome, args): return inner(outcome, args)", 0.5, {}),
    ],
)
def test_numbers_and_dicts(tmp_path, body, reward, parts):
    episode = play(tmp_path, body)
    assert (episode.status, episode.reward, episode.reward_parts) == ("completed", reward, parts)


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("return 'good'", f"{MUST}it returned a str"),
        ("return '1.0'", f"{MUST}it returned a str"),
        ("return None", f"{MUST}it returned None"),
        ("return [1.0, 2.0]", f"{MUST}it returned a list"),
        ("return {}", f"{MUST}its dict has no key"),
        ("return {'score': 1.0}", f"{MUST}its dict has 'score'"),
        ("return {'reward': None}", ": 'reward' must be a number; it is None"),
        ("return {'reward': float('nan')}", " gave reward=nan; numbers must be finite."),
        ("return {'reward': 1.0, 'why': 'short'}", ": 'why' must be a number; it is a str"),
    ],
)
def test_other_values_get_a_sentence(tmp_path, body, said):
    spec = f"{tmp_path}/own.py:reward"
    assert play(tmp_path, body).error == f"ValueError: reward.function={spec}{said}"


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("return outcome.env['success']", "KeyError: 'success'"),
        ("async def reward(outcome, args):\n    return outcome.infos[7]\n", "IndexError: list index out of range"),
    ],
)
def test_an_error_is_told_with_its_file_and_line(tmp_path, monkeypatch, body, said):
    monkeypatch.chdir(tmp_path)
    line = body.splitlines()[-1].strip()
    assert play(tmp_path, body).error == f"{said}, in own.py, line 2: {line}"


ASYNC = """
import asyncio
together = asyncio.Event()
begun = []

async def reward(outcome, args):
    begun.append(len(outcome.responses))
    if len(begun) == 3:
        together.set()
    await asyncio.wait_for(together.wait(), 20)
    return {"reward": float(len(outcome.responses)), "begun": len(begun)}
"""


def test_rewards_that_are_async_wait_side_by_side(tmp_path):
    """Each waits until all have begun, so one after the other would never end."""
    settings = make_settings(reward=reward_of(tmp_path, ASYNC))
    rows = [{"env": {"ends_after": count}} for count in (1, 2, 3)]
    episodes, _ = play_scripted({n: [STOP] * 3 for n in range(3)}, settings, rows)
    assert [(episode.error, episode.reward) for episode in episodes] == [(None, 1.0), (None, 2.0), (None, 3.0)]
    assert {episode.reward_parts["begun"] for episode in episodes} == {3.0}
    assert len([thread for thread in threading.enumerate() if thread.name == "own code"]) == 1


SETUP = """
class World:
    def reset(self): return {{}}, {{}}
    def step(self, text): {step}
    def format_observation(self, observation): return {{"role": "user", "content": []}}
    def final_metrics(self): return {metrics}
    {close}
def build_env(sample, args): {build}
"""
STEP = "step must return (observation, done, info), info being a dict; it returned "
BUILD = "must return an environment with reset, step, format_observation, close; it returned "
WHOLE = {"step": "return {}, True, {}", "metrics": "{}", "close": "def close(self): pass", "build": "return World()"}


@pytest.mark.parametrize(
    ("parts", "said"),
    [
        ({"build": "return None"}, f"{BUILD}None without reset, step, format_observation, close"),
        ({"close": ""}, f"{BUILD}a World without close"),
        ({"step": "return {}, True"}, f"{STEP}a tuple of 2"),
        ({"step": "return None"}, f"{STEP}None"),
        ({"step": "return {}, True, None"}, f"{STEP}None as info"),
        ({"metrics": "{'success': 'yes'}"}, "'success' must be a number; it is a str"),
        ({"metrics": "{'success': 0.75}"}, None),
    ],
)
def test_environments_that_return_something_else_get_a_sentence(tmp_path, parts, said):
    """A sound one: its reward sees the numbers of the episode."""
    file = tmp_path / "world.py"
    reward = "def reward(outcome, args): return outcome.metrics['success']\n"
    file.write_text(SETUP.format(**WHOLE | parts) + reward)
    settings = make_settings(factory=str(file), reward=f"{file}:reward")
    (episode,), _ = play_scripted([STOP], settings)
    source = "final_metrics of the environment" if "metrics" in parts else f"env.factory={file}"
    assert episode.error == (f"ValueError: {source}: {said}" if said else None)
    if said is None:
        assert (episode.reward, episode.metrics) == (0.75, {"turns": 1.0, "success": 0.75})
