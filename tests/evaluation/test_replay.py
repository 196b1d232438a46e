"""Replay: what the rollout has stored comes out again, however an episode ended; regrading keeps nothing of the old."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from geo_sokoban_pipeline.config.grpo import GrpoOptions
from geo_sokoban_pipeline.evaluation.regrading import regrade_episodes
from geo_sokoban_pipeline.evaluation.replay import Replayer, prompts_by_key
from geo_sokoban_pipeline.grpo.scoring import apply_scores, assistant_turns, score_groups
from geo_sokoban_pipeline.rollout.episode import RolloutSettings
from geo_sokoban_pipeline.tasks import task_or_plain
from geo_sokoban_pipeline.trajectories.types import Trajectory
from rollout.scripted import PROMPT, CharacterPolicy, Response, make_settings, play_scripted

TASK = task_or_plain("talk")
STOP = ("abcd", "stop")


def replayer(settings: RolloutSettings, **reward: Any) -> Replayer:
    policy: Any = CharacterPolicy()
    graded = settings.reward.model_copy(update=reward)
    return Replayer(policy, settings.env, graded, settings.rollout, TASK)


def prompts(count: int = 1) -> dict[str, Any]:
    return prompts_by_key([{"id": f"r{number}", "prompt": PROMPT} for number in range(count)], TASK)


@pytest.mark.parametrize("last", [STOP, ("ab", "length"), ("ab", "abort"), ("", "abort")])
@pytest.mark.parametrize("turns", [1, 2, 3])
def test_an_episode_comes_out_again_however_its_last_response_ended(turns: int, last: Response) -> None:
    settings = make_settings({"ends_after": turns})
    (episode,), _ = play_scripted([STOP] * (turns - 1) + [last], settings)
    assert len(assistant_turns(episode)) == turns and episode.finish_reason == last[1]
    assert replayer(settings).differences([episode], prompts()) == []


def by_turns(outcome: Any, args: dict[str, Any]) -> dict[str, float]:
    """Reward: what the turns earned, and a bonus for each of them."""
    bonus = args["bonus"] * len(outcome.responses)
    return {"reward": 0.25 * len(outcome.responses) + bonus, "final_bonus": bonus}


@pytest.mark.parametrize("new", ["turn", "episode"])
@pytest.mark.parametrize("old", ["turn", "episode"])
def test_regraded_episodes_are_those_that_were_scored_so_at_once(old: str, new: str) -> None:
    """Of the old reward and the old credit nothing is left, whichever credit the run had."""
    settings = make_settings(reward=f"{__file__}:by_turns")
    rows = [{"id": f"r{number}", "prompt": PROMPT, "env": {"ends_after": 1 + number % 3}} for number in range(4)]
    grpo = {credit: GrpoOptions(credit=credit, filter="none") for credit in (old, new)}

    def scored(bonus: float, credit: str) -> list[Trajectory]:
        reward = settings.reward.model_copy(update={"args": {"bonus": bonus}})
        given = {number: [STOP] * row["env"]["ends_after"] for number, row in enumerate(rows)}
        episodes, _ = play_scripted(given, replace(settings, reward=reward), rows)
        apply_scores(episodes, score_groups(episodes, grpo[credit], TASK, {}))
        return episodes

    stored = scored(1.0, old)
    again = replayer(settings, args={"bonus": -0.5})
    found, metrics = regrade_episodes(stored, again, prompts_by_key(rows, TASK), grpo[new])
    for one, other in zip(found, scored(-0.5, new), strict=True):
        assert one.turns == other.turns
        assert (one.reward, one.reward_parts, one.metrics) == (other.reward, other.reward_parts, other.metrics)
        assert (one.advantage, one.trained, one.drop_reason) == (other.advantage, other.trained, other.drop_reason)
    # Turns: 1, 2, 3, 1. What was above the mean is below it now.
    assert metrics == {
        "regrade/episodes": 4.0,
        "regrade/changed_rewards": 4.0,
        "regrade/changed_signs": 4.0,
        "regrade/changed_trained": 0.0,
        "regrade/old_reward": 1.25 * 1.75,
        "regrade/new_reward": -0.25 * 1.75,
    }
