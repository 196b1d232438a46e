"""Token parity: episodes as they were played agree with the template, and each difference is named with its turn."""

from __future__ import annotations

import copy

import numpy as np
import pytest

from geo_sokoban_pipeline.config.rollout import RolloutOptions, SamplingOptions
from geo_sokoban_pipeline.evaluation.audit import check_token_parity
from geo_sokoban_pipeline.policies.policy import Policy
from geo_sokoban_pipeline.rollout.engines.transformers import TransformersEngine
from geo_sokoban_pipeline.rollout.episode import EpisodeRequest, RolloutSettings
from geo_sokoban_pipeline.rollout.rollout import rollout
from geo_sokoban_pipeline.trajectories.types import Trajectory
from task_options import EnvOptions, RewardOptions


def play(policy: Policy, observation: str) -> Trajectory:
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
    episode = play(ender, observation)
    assert [turn.role for turn in episode.turns] == ["user", "assistant"] * 3
    assert check_token_parity([episode], ender.codec) == []


@pytest.mark.parametrize(
    ("turn", "what"), [(0, "ids"), (1, "response text"), (2, "ids"), (4, "ids"), (5, "response text")]
)
def test_a_difference_is_named_with_its_turn_and_both_sides(ender: Policy, turn: int, what: str) -> None:
    whole = play(ender, "You are here.")
    episode = copy.deepcopy(whole)
    span = episode.turns[turn]
    if what == "ids":
        episode.token_ids[span.token_end - 1] += 1
        stored, expected = (one.token_ids[span.token_start : span.token_end].tolist() for one in (episode, whole))
    else:
        expected, stored = span.text, f"{span.text}, or not"
        span.text = stored
    (error,) = check_token_parity([whole, episode], ender.codec)
    assert (error.trajectory_id, error.turn) == ("run/g0/s0", turn)
    assert error.problem == f"{what}: stored {stored!r}, expected {expected!r}"


def test_each_turn_that_differs_is_an_entry(ender: Policy) -> None:
    episode = play(ender, "You are here.")
    swapped = copy.deepcopy(episode)
    for number in (0, 2):
        swapped.token_ids[swapped.turns[number].token_start] += 1
    swapped.turns[3].text += "!"
    assert [error.turn for error in check_token_parity([episode, swapped], ender.codec)] == [0, 2, 3]
    # Without a separator behind the response's end an episode is another one.
    assert [e.turn for e in check_token_parity([episode], ender.codec, turn_separator=False)] == [2, 4]
    assert np.array_equal(episode.token_ids, play(ender, "You are here.").token_ids)
