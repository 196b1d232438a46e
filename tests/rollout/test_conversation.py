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
@pytest.mark.parametrize(
    ("responses", "mask", "asked", "text"),
    [
        ([FOUR], "1×4", [(9, 991)], "abcd"),
        ([FOUR, THREE], "1×4 0×10 1×3", [(9, 991), (23, 977)], "abcd<user>ok<>efg"),
    ],
)
def test_responses_with_observations_between(limits, responses, mask, asked, text):
    (episode,), engine = play_scripted(responses, make_settings({"ends_after": len(responses)}, **limits))
    assert (episode.status, mask_of(episode), engine.asked) == ("completed", mask, asked)
    assert episode.rollout_log_probs[episode.loss_mask == 1].tolist() == [-0.5] * episode.loss_mask.sum()
    assert not episode.rollout_log_probs[episode.loss_mask == 0].any()
    assert episode.response == text


def test_max_turns_keeps_the_last_observation_and_turns_partition_the_tokens():
    (episode,), engine = play_scripted([FOUR, THREE], make_settings(max_turns=2))
    assert (episode.status, mask_of(episode)) == ("completed", "1×4 0×10 1×3 0×10")
    assert made[0].heard == ["abcd", "efg"]
    assert len(engine.requests) == 2
    assert [(turn.role, turn.text) for turn in episode.turns] == [
        ("user", PROMPT), ("assistant", "abcd"), ("user", "ok"), ("assistant", "efg"), ("user", "ok"),
    ]  # fmt: skip
    borders = [(turn.token_start, turn.token_end) for turn in episode.turns]
    assert borders == [(0, 9), (9, 13), (13, 23), (23, 26), (26, 36)]
    assert [turn.reward for turn in episode.turns] == [None, 0.25, None, 0.25, None]


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
    settings = make_settings({"ends_after": 2}, rules={"turn_separator": True})
    (episode,), _ = play_scripted([FOUR, THREE], settings)
    assert mask_of(episode) == "1×4 0×11 1×3"
    assert episode.response == "abcd\n<user>ok<>efg"


@pytest.mark.parametrize(("versions", "spans"), [([3, 3], [(3, 9, 26)]), ([3, 4], [(3, 9, 13), (4, 23, 26)])])
def test_weight_spans_say_who_wrote_what(versions, spans):
    engine = ScriptedEngine([FOUR, THREE])
    engine.versions = versions.__getitem__
    task = EpisodeRequest("t", {"id": "r", "prompt": PROMPT}, 0, 0, 0)
    (episode,) = rollout(engine, CharacterPolicy(), [task], make_settings({"ends_after": 2}))
    assert episode.weight_spans == spans
    assert episode.policy_version == 3


ACT, TWO = "step_before_finish_check", {"ends_after": 2}
SAMPLED = {"max_response_tokens": 16, "max_context_tokens": 1000}


@pytest.mark.parametrize(
    ("rule", "responses", "env", "limits", "status", "mask", "heard"),
    [
        (None, [FOUR, THREE], {"ends_after": 2}, {}, "completed", "1×4 0×10 1×3", 2),
        # The environment acts on a truncated or aborted response too, and may end the episode by it.
        (ACT, [("abcd", "length")], {}, {}, "truncated", "1×4", 1),
        (ACT, [("abcd", "length")], {"ends_after": 1}, {}, "completed", "1×4", 1),
        (ACT, [("abcd", "abort")], {}, {}, "aborted", "1×4", 1),
        # Truncated at max_turns, not completed.
        ("truncate_at_max_turns", [FOUR, THREE], {}, {"max_turns": 2}, "truncated", "1×4 0×10 1×3 0×10", 2),
        # An observation that would pass the budget is left out.
        ("drop_overflowing_observation", [FOUR], {}, {"max_context_tokens": 20}, "truncated", "1×4", 1),
        (None, [FOUR], {}, {"max_context_tokens": 13}, "truncated", "1×4", 1),
        # Without a context limit the prompt counts against the response's.
        (None, [FOUR], {}, {"max_response_tokens": 13}, "truncated", "1×4", 1),
        ("budget_counts_prompt", [FOUR, THREE], TWO, {"max_response_tokens": 20}, "truncated", "1×4 0×10", 1),
        # Sampled tokens alone count against the response's limit.
        ("budget_counts", [FOUR, THREE], TWO, SAMPLED, "completed", "1×4 0×10 1×3", 2),
    ],
)
def test_slime_exact(rule, responses, env, limits, status, mask, heard):
    """All rules together, and each one where it decides alone."""
    rules = RolloutRules.slime_exact()
    assert all(getattr(rules, name) != getattr(RolloutRules(), name) for name in RolloutRules.model_fields)
    assert RolloutOptions(preset="slime_exact", rules=RolloutRules()).effective_rules == rules
    ways = [{"preset": "slime_exact"}] if rule != "budget_counts_prompt" else []
    for way in [*ways, *([] if rule is None else [{"rules": {rule: getattr(rules, rule)}}])]:
        (episode,), _ = play_scripted(responses, make_settings(env, **limits, **way))
        assert (episode.status, mask_of(episode), len(made[0].heard)) == (status, mask, heard)
    if rule is not None:
        (episode,), _ = play_scripted(responses, make_settings(env, **limits))
        assert (episode.status, mask_of(episode), len(made[0].heard)) != (status, mask, heard)


@pytest.mark.parametrize(
    ("limits", "asked"),
    [
        # The original Sokoban example: sampled tokens alone count against the response's limit.
        ({"max_response_tokens": 100, "max_context_tokens": 1000}, [(9, 100), (23, 96)]),
        ({"max_response_tokens": 1000, "max_context_tokens": 100}, [(9, 91), (23, 77)]),
    ],
)
def test_slime_exact_counts_sampled_tokens_and_writes_no_separator(limits, asked):
    (episode,), engine = play_scripted([FOUR, THREE], make_settings({"ends_after": 2}, preset="slime_exact", **limits))
    assert engine.asked == asked
    assert "\n" not in episode.response


@pytest.mark.parametrize("wrong", [{"max_turns": None}, {"max_turns": 0}, {"partial_rollout": True}])
def test_preconditions(wrong):
    """Worked example 13.3: no turn limit and partial rollouts are refused, here before anything starts."""
    with pytest.raises(ValidationError, match=next(iter(wrong))):
        RolloutOptions(**wrong)
