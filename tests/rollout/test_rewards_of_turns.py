"""Turns that a reward names and states that an environment names, up to the advantages that are trained."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from builders import CONTEXT
from geo_sokoban_pipeline.config.grpo import GrpoOptions
from geo_sokoban_pipeline.grpo.scoring import EpisodeScore, apply_scores, assistant_turns, score_groups
from geo_sokoban_pipeline.tasks import task_or_plain
from geo_sokoban_pipeline.trajectories.types import Trajectory, table_to_trajectories, trajectories_to_table
from rollout.scripted import Response, TalkEnv, make_settings, play_scripted

TASK = task_or_plain("talk")
EACH = "turns must be one number for each of 2 stepped responses; it is "
RETURNS = {"normalize": "none", "advantage_clip": None, "filter": "none"}


class StateEnv(TalkEnv):
    """Two turns; after the first one it is in the state that its row gives."""

    def __init__(self, states: list[Any]) -> None:
        super().__init__(ends_after=len(states))
        self.states = states

    def step(self, text: str) -> Any:
        observation, is_over, info = super().step(text)
        state = self.states[len(self.heard) - 1]
        return observation, is_over, info if state is None else {**info, "state_key": state}


def build_env(sample: dict[str, Any], args: dict[str, Any]) -> TalkEnv:
    return StateEnv(sample["states"])


def lengths(outcome: Any, args: dict[str, Any]) -> dict[str, Any]:
    """A turn earns its number of characters, whatever the environment says."""
    turns = [len(text) for text, _ in zip(outcome.responses, outcome.infos, strict=False)]
    return {"reward": sum(turns), "turns": turns}


def play_group(states: list[list[Any]], responses: list[list[Response]]) -> list[Trajectory]:
    """One group, an episode for each list of states."""
    settings = make_settings(factory=f"{__name__}.build_env", reward=f"{__name__}.lengths")
    episodes, _ = play_scripted(dict(enumerate(responses)), settings, [{"states": one} for one in states])
    assert [episode.error for episode in episodes] == [None] * len(states)
    return episodes


def score(episodes: list[Trajectory], **advantage_args: Any) -> list[EpisodeScore | None]:
    options = GrpoOptions.model_validate({**RETURNS, "advantage_args": {"gamma": 1.0, **advantage_args}})
    scores = score_groups(episodes, options, TASK, {})
    apply_scores(episodes, scores)
    return scores.episodes


def turns_of(episodes: list[Trajectory], name: str) -> list[list[float]]:
    return [[getattr(turn, name) for turn in assistant_turns(episode)] for episode in episodes]


def test_turns_are_trained_on_what_the_reward_gave_them() -> None:
    cut_off = [("abc", "stop"), ("a", "length")]  # its last response is not stepped
    episodes = play_group([[None, None]] * 2, [[("ab", "stop"), ("abcd", "stop")], cut_off])
    score(episodes)
    assert [episode.reward for episode in episodes] == [6.0, 3.0]
    assert turns_of(episodes, "reward") == [[0.25, 0.25], [0.25, None]]  # the environment's own
    assert turns_of(episodes, "credit") == [[2.0, 4.0], [3.0, 0.0]]
    assert turns_of(episodes, "advantage") == [[1.5, 2.0], [-1.5, -2.0]]


@pytest.mark.parametrize("as_given", [str, int, lambda one: [[int(one)]], lambda one: np.array([int(one)])])
def test_states_of_the_environment_are_compared(as_given: Callable[[str], Any]) -> None:
    """All see the same text: only the state after the first response tells them apart."""
    states = ["1", "1", "2", "2"]
    responses: list[list[Response]] = [[("a", "stop"), ("b" * length, "stop")] for length in (1, 3, 10, 20)]
    episodes = play_group([[as_given(state), None] for state in states], responses)
    scores = score(episodes, baseline="state")
    assert [second for _, second in turns_of(episodes, "advantage")] == [-1.0, 1.0, -5.0, 5.0]
    stored = table_to_trajectories(trajectories_to_table(episodes, CONTEXT))
    for one, other in zip(score(stored, baseline="state"), scores, strict=True):  # as an audit computes them again
        assert np.array_equal(one.turn_advantages, other.turn_advantages)
    # Without them, all second turns are in one state.
    plain = play_group([[None, None]] * 4, responses)
    score(plain, baseline="state")
    assert [second for _, second in turns_of(plain, "advantage")] == [-7.5, -5.5, 1.5, 11.5]


@pytest.mark.parametrize(
    ("turns", "said"),
    [
        ("[0.5, 0.5]", None),
        ("numpy.array([2, -1])", None),
        ("None", None),
        ("[0.5]", f"{EACH}a list of 1"),
        ("[1.0, 0.0, 0.0]", f"{EACH}a list of 3"),
        ("1.0", f"{EACH}a float"),
        ("'01'", f"{EACH}a str of 2"),
        ("['a', 'b']", "'turns[0]' must be a number; it is a str"),
        ("[float('nan'), 1.0]", "gave turns[0]=nan; numbers must be finite."),
        ("[0.5, 0.75]", "turns add up to 1.25, but the reward is 1"),
    ],
)
def test_turns_that_a_reward_may_give(tmp_path: Path, turns: str, said: str | None) -> None:
    own = tmp_path / "own.py"
    own.write_text(f"import numpy\ndef reward(outcome, args): return {{'reward': 1.0, 'turns': {turns}}}\n")
    settings = make_settings({"ends_after": 2}, reward=f"{own}:reward")
    (episode,), _ = play_scripted([("go", "stop")] * 2, settings)
    if said is None:
        assert (episode.error, episode.reward, episode.reward_parts) == (None, 1.0, {})
    else:
        assert episode.error is not None
        assert episode.error.startswith(f"ValueError: reward.function={own}:reward") and episode.error.endswith(said)
