"""Replay and token parity: stored episodes come out again, and regrading keeps nothing of the old."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageOps

from geo_sokoban_pipeline.config.grpo import GrpoOptions
from geo_sokoban_pipeline.config.rollout import RolloutOptions, SamplingOptions
from geo_sokoban_pipeline.evaluation.audit import check_token_parity
from geo_sokoban_pipeline.evaluation.replay import Replayer, prompts_by_key, regrade_episodes
from geo_sokoban_pipeline.evaluation.rollouts import rollout_prompts
from geo_sokoban_pipeline.grpo.scoring import apply_scores, assistant_turns, score_groups
from geo_sokoban_pipeline.policies.policy import Policy
from geo_sokoban_pipeline.rollout.engines.factory import build_engine
from geo_sokoban_pipeline.rollout.engines.transformers import TransformersEngine
from geo_sokoban_pipeline.rollout.episode import EpisodeRequest, RolloutSettings
from geo_sokoban_pipeline.rollout.rollout import rollout
from geo_sokoban_pipeline.tasks import task_or_plain
from geo_sokoban_pipeline.trajectories.types import Trajectory
from rollout.scripted import PROMPT, CharacterPolicy, Response, TalkEnv, make_settings, play_scripted
from task_options import EnvOptions, RewardOptions, TrainOptions

TASK = task_or_plain("talk")
STOP = ("abcd", "stop")


def replayer(settings: RolloutSettings) -> Replayer:
    policy: Any = CharacterPolicy()
    return Replayer(policy, settings.env, settings.reward, settings.rollout, TASK)


@pytest.mark.parametrize("last", [STOP, ("ab", "length"), ("ab", "abort"), ("", "abort")])
@pytest.mark.parametrize("turns", [1, 2, 3])
def test_an_episode_comes_out_again_however_its_last_response_ended(turns: int, last: Response) -> None:
    settings = make_settings({"ends_after": turns})
    (episode,), _ = play_scripted([STOP] * (turns - 1) + [last], settings)
    assert len(assistant_turns(episode)) == turns and episode.finish_reason == last[1]
    rows = prompts_by_key([{"id": "r0", "prompt": PROMPT}], TASK)
    assert replayer(settings).differences([episode], rows) == []


def test_pictures_are_compared_by_their_pixels(
    tiny_policy: Policy, train_options: TrainOptions, sokoban_rows: Callable[..., list[dict[str, Any]]]
) -> None:
    """Not by their bytes: another version of the library may compress or store them otherwise."""
    (row,) = sokoban_rows(1, max_solution=3)
    limits = train_options.rollout.model_copy(update={"max_turns": 2})
    options = train_options.model_copy(update={"rollout": limits})
    engine = build_engine(tiny_policy, limits)
    sampling = {"sampling": limits.sampling, "samples": 1, "iteration": 0}
    (episode,) = rollout_prompts("final", 0, options, [row], tiny_policy, engine, **sampling)
    again = Replayer(tiny_policy, options.env, options.reward, limits, task_or_plain("sokoban"))
    rows = prompts_by_key([row], task_or_plain("sokoban"))

    def changed(change: Callable[[Image.Image], Image.Image]) -> list[Any]:
        first = io.BytesIO()
        change(Image.open(io.BytesIO(episode.images[0]))).save(first, "PNG")
        return list(again.differences([replace(episode, images=[first.getvalue(), *episode.images[1:]])], rows))

    assert changed(lambda image: image.convert("RGBA")) == []
    assert len(changed(ImageOps.invert)) == 1


class WorthEnv(TalkEnv):
    """A turn earns what the arguments say, and the policy sees nothing of it."""

    def __init__(self, ends_after: int, worth: float) -> None:
        super().__init__(ends_after)
        self.worth = worth

    def step(self, text: str) -> Any:
        observation, is_over, info = super().step(text)
        return observation, is_over, {**info, "turn_reward": self.worth}

    def final_metrics(self) -> dict[str, float]:
        return {"earned": self.worth * len(self.heard)}


def build_env(sample: dict[str, Any], args: dict[str, Any]) -> WorthEnv:
    if not sample["turns"]:
        raise RuntimeError("no turns")
    return WorthEnv(sample["turns"], args["worth"])


def by_turns(outcome: Any, args: dict[str, Any]) -> dict[str, float]:
    """Reward: what the turns earned, and a bonus for each of them."""
    bonus = args["bonus"] * len(outcome.responses)
    return {"reward": sum(info["turn_reward"] for info in outcome.infos) + bonus, "final_bonus": bonus}


@pytest.mark.parametrize("new", ["turn_return", "dr_grpo"])
@pytest.mark.parametrize("old", ["turn_return", "dr_grpo"])
def test_regraded_episodes_are_those_that_were_scored_so_at_once(old: str, new: str) -> None:
    """Of the old reward and the old advantages nothing is left, whichever the run had."""
    rows = [{"id": f"r{number}", "prompt": PROMPT, "turns": turns} for number, turns in enumerate((1, 2, 3, 1, 2, 0))]
    given = {number: [STOP] * row["turns"] for number, row in enumerate(rows)}
    given[4] = [STOP, ("ab", "abort")]  # the last one has failed
    grpo = {name: GrpoOptions(advantage=name, filter="none") for name in (old, new)}

    def settings(worth: float, bonus: float) -> RolloutSettings:
        env = EnvOptions(factory=f"{__file__}:build_env", args={"worth": worth})
        reward = RewardOptions(function=f"{__file__}:by_turns", args={"bonus": bonus})
        return replace(make_settings(), env=env, reward=reward)

    def scored(worth: float, bonus: float, advantage: str) -> list[Trajectory]:
        episodes, _ = play_scripted(given, settings(worth, bonus), rows)
        apply_scores(episodes, score_groups(episodes, grpo[advantage], TASK, {}))
        return episodes

    stored, wanted = scored(0.25, 1.0, old), scored(0.75, -2.0, new)
    found, metrics = regrade_episodes(stored, replayer(settings(0.75, -2.0)), prompts_by_key(rows, TASK), grpo[new])
    for one, other in zip(found, wanted, strict=True):
        assert one.turns == other.turns
        assert (one.reward, one.reward_parts, one.metrics) == (other.reward, other.reward_parts, other.metrics)
        assert (one.advantage, one.trained, one.drop_reason) == (other.advantage, other.trained, other.drop_reason)
    assert [episode.trained for episode in found] == [True, True, True, True, False, False]
    assert found[5].status == "failed"
    # 1.25 a turn before, −1.25 now: what was above the mean is below it.
    assert metrics == {
        "regrade/episodes": 6.0,
        "regrade/changed_rewards": 4.0,
        "regrade/changed_signs": 4.0,
        "regrade/changed_trained": 0.0,
        "regrade/old_reward": 1.25 * 1.75,
        "regrade/new_reward": -1.25 * 1.75,
    }


# Token parity: episodes as they were played agree with the template, and each difference is named with its turn.


def play_policy(policy: Policy, observation: str) -> Trajectory:
    """Three responses of a random policy, with an observation between two."""
    settings = RolloutSettings(
        EnvOptions(factory="rollout.scripted.build_env", args={"ends_after": 3, "observation": observation}),
        RewardOptions(function="rollout.scripted.one_per_response"),
        RolloutOptions(max_turns=3, max_tokens_per_turn=40, max_failed_share=0.0),
        SamplingOptions(),
        iteration=0,
        task="talk",
    )
    task = EpisodeRequest("run/g0/s0", {"id": "row", "prompt": "Which way?"}, 0, 0, 0)
    (episode,) = rollout(TransformersEngine(policy), policy, [task], settings)
    return episode


@pytest.fixture(scope="module")
def ender(tiny_policy: Policy) -> Policy:
    """The tiny policy, biased to end its responses itself."""
    import torch

    policy = copy.deepcopy(tiny_policy)
    bias = torch.zeros(policy.model.config.text_config.vocab_size)
    bias[policy.codec.end_id] = 8.0
    policy.model.lm_head.bias = torch.nn.Parameter(bias, requires_grad=False)
    return policy


@pytest.mark.parametrize(
    "observation",
    [
        "You are here.",
        "",
        "\ue0001\ue001 You are here.",  # the mark by which the audit finds response 1, in every later observation
        "<|im_end|> and <|im_start|>assistant",
    ],
    ids=["plain", "empty", "marks of the audit", "marks of the template"],
)
def test_what_was_played_agrees_with_the_template(ender: Policy, observation: str) -> None:
    episode = play_policy(ender, observation)
    assert [turn.role for turn in episode.turns] == ["user", "assistant"] * 3
    assert check_token_parity([episode], ender.codec) == []


@pytest.mark.parametrize(
    ("turn", "what"), [(0, "ids"), (1, "response text"), (2, "ids"), (4, "ids"), (5, "response text")]
)
def test_a_difference_is_named_with_its_turn_and_both_sides(ender: Policy, turn: int, what: str) -> None:
    whole = play_policy(ender, "You are here.")
    episode = copy.deepcopy(whole)
    span = episode.turns[turn]
    if what == "ids":
        episode.token_ids[span.token_end - 1] += 1
        stored, expected = (one.token_ids[span.token_start : span.token_end].tolist() for one in (episode, whole))
    else:
        expected, stored = span.text, f"{span.text}, or not"
        span.text = stored
    problem = f"turn {turn}: {what}: stored {stored!r}, expected {expected!r}"
    assert check_token_parity([whole, episode], ender.codec) == [("run/g0/s0", problem)]


def test_each_turn_that_differs_is_an_entry(ender: Policy) -> None:
    episode = play_policy(ender, "You are here.")
    swapped = copy.deepcopy(episode)
    for number in (0, 2):
        swapped.token_ids[swapped.turns[number].token_start] += 1
    swapped.turns[3].text += "!"
    found = check_token_parity([episode, swapped], ender.codec)
    assert [problem.partition(":")[0] for _, problem in found] == ["turn 0", "turn 2", "turn 3"]
    # Without a separator behind the response's end an episode is another one.
    found = check_token_parity([episode], ender.codec, turn_separator=False)
    assert [problem.partition(":")[0] for _, problem in found] == ["turn 2", "turn 4"]
    assert np.array_equal(episode.token_ids, play_policy(ender, "You are here.").token_ids)
