"""The rules of an episode: slime's worked examples, the limits, the statuses, slime's rules."""

from __future__ import annotations

import json

import pytest
from pydantic import ValidationError

from geo_sokoban_pipeline.config.rollout import RolloutOptions, RolloutRules
from geo_sokoban_pipeline.rollout.episode import EpisodeRequest
from geo_sokoban_pipeline.rollout.rollout import rollout
from rollout.scripted import PROMPT, CharacterPolicy, ScriptedEngine, made, make_settings, play_scripted

FOUR, THREE = ("abcd", "stop"), ("efg", "stop")
# An observation of two characters makes a delta of ten tokens; the prompt has nine.
LIMITS = [
    {"max_context_tokens": 1000},
    {"max_response_tokens": 1000, "rules": {"budget_counts_prompt": True}},
    {"max_response_tokens": 991},
]


def mask_of(episode):
    """Mask after the prompt as runs, such as `1×4 0×10 1×3`."""
    runs = []
    for value in episode.loss_mask[episode.prompt_length :].tolist():
        if runs and runs[-1][0] == value:
            runs[-1][1] += 1
        else:
            runs.append([value, 1])
    return " ".join(f"{value}×{count}" for value, count in runs)


@pytest.mark.parametrize("limits", LIMITS)
def test_four_tokens_and_done(limits):
    (episode,), engine = play_scripted([FOUR], make_settings({"ends_after": 1}, **limits))
    assert (episode.status, mask_of(episode)) == ("completed", "1×4")
    assert engine.asked == [(9, 991)]
    assert [turn.role for turn in episode.turns] == ["user", "assistant"]
    assert episode.response == "abcd"


@pytest.mark.parametrize("limits", LIMITS)
def test_two_responses_with_an_observation_between(limits):
    (episode,), engine = play_scripted([FOUR, THREE], make_settings({"ends_after": 2}, **limits))
    assert episode.status == "completed"
    assert mask_of(episode) == "1×4 0×10 1×3"
    assert len(episode.token_ids) - episode.prompt_length == 17
    assert episode.rollout_log_probs[episode.loss_mask == 1].tolist() == [-0.5] * 7
    assert not episode.rollout_log_probs[episode.loss_mask == 0].any()
    assert engine.asked == [(9, 991), (23, 977)]
    assert episode.response == "abcd<user>ok<>efg"


def test_max_turns_keeps_the_last_observation():
    (episode,), engine = play_scripted([FOUR, THREE], make_settings(max_turns=2))
    assert (episode.status, mask_of(episode)) == ("completed", "1×4 0×10 1×3 0×10")
    assert made[0].heard == ["abcd", "efg"]
    assert len(engine.requests) == 2


@pytest.mark.parametrize(("reason", "status", "reward"), [("length", "truncated", 1.0), ("abort", "aborted", None)])
def test_a_response_that_was_cut_never_reaches_the_environment(reason, status, reward):
    (episode,), _ = play_scripted([("abcd", reason)], make_settings())
    assert (episode.status, episode.finish_reason, episode.reward) == (status, reason, reward)
    assert made[0].heard == []
    assert mask_of(episode) == "1×4"


def test_no_limits_send_none():
    (episode,), engine = play_scripted([FOUR], make_settings({"ends_after": 1}))
    assert engine.asked == [(9, None)]
    assert json.loads(episode.sampling)["max_context_tokens"] is None


@pytest.mark.parametrize(
    ("limits", "status", "mask", "asked"),
    [
        # The prompt alone fills the context: nothing is asked.
        ({"max_context_tokens": 9}, "truncated", "", []),
        # The response fills it: the environment is not stepped.
        ({"max_context_tokens": 13}, "truncated", "1×4", [(9, 4)]),
        # The observation passes it: it stays.
        ({"max_context_tokens": 20}, "truncated", "1×4 0×10", [(9, 11)]),
        ({"max_context_tokens": 23}, "truncated", "1×4 0×10", [(9, 14)]),
        # The last response fills it exactly: truncated, although the environment would have ended the episode.
        ({"max_context_tokens": 26}, "truncated", "1×4 0×10 1×3", [(9, 17), (23, 3)]),
        ({"max_response_tokens": 14}, "truncated", "1×4 0×10", [(9, 14)]),
        ({"max_tokens_per_turn": 6}, "completed", "1×4 0×10 1×3", [(9, 6), (23, 6)]),
        ({"max_tokens_per_turn": 6, "max_context_tokens": 27}, "completed", "1×4 0×10 1×3", [(9, 6), (23, 4)]),
        ({"max_response_tokens": 30, "max_context_tokens": 30}, "completed", "1×4 0×10 1×3", [(9, 21), (23, 7)]),
    ],
)
def test_budgets(limits, status, mask, asked):
    (episode,), engine = play_scripted([FOUR, THREE], make_settings({"ends_after": 2}, **limits))
    assert (episode.status, mask_of(episode), engine.asked) == (status, mask, asked)
    assert len(made[0].heard) == (2 if status == "completed" else mask.count("0×10"))


def test_the_separator_belongs_to_the_observation():
    settings = make_settings({"ends_after": 2})
    rollout = settings.rollout.model_copy(update={"rules": RolloutRules()})
    settings = type(settings)(**{**vars(settings), "rollout": rollout})
    (episode,), _ = play_scripted([FOUR, THREE], settings)
    assert mask_of(episode) == "1×4 0×11 1×3"
    assert episode.response == "abcd\n<user>ok<>efg"


def test_turns_partition_the_tokens():
    (episode,), _ = play_scripted([FOUR, THREE], make_settings(max_turns=2))
    assert [(turn.role, turn.text) for turn in episode.turns] == [
        ("user", PROMPT), ("assistant", "abcd"), ("user", "ok"), ("assistant", "efg"), ("user", "ok"),
    ]  # fmt: skip
    borders = [(turn.token_start, turn.token_end) for turn in episode.turns]
    assert borders == [(0, 9), (9, 13), (13, 23), (23, 26), (26, 36)]
    assert [turn.reward for turn in episode.turns] == [None, 0.25, None, 0.25, None]


@pytest.mark.parametrize(("versions", "spans"), [([3, 3], [(3, 9, 26)]), ([3, 4], [(3, 9, 13), (4, 23, 26)])])
def test_weight_spans_say_who_wrote_what(versions, spans):
    engine = ScriptedEngine([FOUR, THREE])
    engine.versions = versions.__getitem__
    task = EpisodeRequest("t", {"id": "r", "prompt": PROMPT}, 0, 0, 0)
    (episode,) = rollout(engine, CharacterPolicy(), [task], make_settings({"ends_after": 2}))
    assert episode.weight_spans == spans
    assert episode.policy_version == 3


def exact(env=None, **limits):
    return make_settings(env, preset="slime_exact", **limits)


@pytest.mark.parametrize(
    ("responses", "env", "limits", "status", "mask", "heard"),
    [
        ([FOUR, THREE], {"ends_after": 2}, {}, "completed", "1×4 0×10 1×3", 2),
        # The environment acts on a truncated or aborted response too, and may end the episode by it.
        ([("abcd", "length")], {}, {}, "truncated", "1×4", 1),
        ([("abcd", "length")], {"ends_after": 1}, {}, "completed", "1×4", 1),
        ([("abcd", "abort")], {}, {}, "aborted", "1×4", 1),
        # Truncated at max_turns, not completed.
        ([FOUR, THREE], {}, {"max_turns": 2}, "truncated", "1×4 0×10 1×3 0×10", 2),
        # An observation that would pass the budget is left out.
        ([FOUR], {}, {"max_context_tokens": 20}, "truncated", "1×4", 1),
        ([FOUR], {}, {"max_context_tokens": 13}, "truncated", "1×4", 1),
        # Without a context limit the prompt counts against the response's.
        ([FOUR], {}, {"max_response_tokens": 13}, "truncated", "1×4", 1),
    ],
)
def test_slime_exact(responses, env, limits, status, mask, heard):
    (episode,), _ = play_scripted(responses, exact(env, **limits))
    assert (episode.status, mask_of(episode), len(made[0].heard)) == (status, mask, heard)


def test_the_original_fallback_subtracts_the_prompt_and_all_that_follows():
    """Worked example 13.3: the reference algorithm without a context limit."""
    settings = make_settings({"ends_after": 2}, max_response_tokens=1000, rules={"budget_counts_prompt": True})
    (episode,), engine = play_scripted([FOUR, THREE], settings)
    assert engine.asked == [(9, 991), (23, 977)]
    assert episode.status == "completed"


@pytest.mark.parametrize(
    ("limits", "asked"),
    [
        # The original Sokoban example: sampled tokens alone count against the response's limit.
        ({"max_response_tokens": 100, "max_context_tokens": 1000}, [(9, 100), (23, 96)]),
        ({"max_response_tokens": 1000, "max_context_tokens": 100}, [(9, 91), (23, 77)]),
    ],
)
def test_slime_exact_counts_sampled_tokens_and_writes_no_separator(limits, asked):
    (episode,), engine = play_scripted([FOUR, THREE], exact({"ends_after": 2}, **limits))
    assert engine.asked == asked
    assert "\n" not in episode.response


@pytest.mark.parametrize("wrong", [{"max_turns": None}, {"max_turns": 0}, {"partial_rollout": True}])
def test_preconditions(wrong):
    """Worked example 13.3: no turn limit and partial rollouts are refused, here before anything starts."""
    with pytest.raises(ValidationError, match=next(iter(wrong))):
        RolloutOptions(**wrong)
