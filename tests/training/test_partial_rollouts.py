"""Partial rollouts: an aborted response of one turn continues token for token, each part with its own weights."""

from __future__ import annotations

import numpy as np
import pytest

from geo_sokoban_pipeline.rollout.engines.base import Result, join_results
from geo_sokoban_pipeline.rollout.episode import EpisodeRequest, responses_of
from geo_sokoban_pipeline.rollout.rollout import rollout
from geo_sokoban_pipeline.training.collecting import PartialRollouts
from rollout.scripted import PROMPT, CharacterPolicy, ScriptedEngine, make_settings

SETTINGS = {"max_turns": 1, "max_tokens_per_turn": 9}


def play(engine, pasts=((), ()), enough=None):
    tasks = [
        EpisodeRequest(f"t{n}", {"id": f"r{n}", "prompt": PROMPT}, n, 0, 10 + n, past) for n, past in enumerate(pasts)
    ]
    return rollout(engine, CharacterPolicy(), tasks, make_settings({"ends_after": 1}, **SETTINGS), enough=enough)


def test_an_aborted_response_is_gone_on_with():
    engine = ScriptedEngine({0: [("abcdef", "stop")], 1: [("xyz", "stop")]})
    first = play(engine, enough=lambda over: True)
    assert [episode.status for episode in first] == ["aborted", "completed"]
    partial = PartialRollouts()
    partial.keep(first, {0: 40, 1: 41})
    (group,) = partial.take(5)
    assert (group.prompt, group.seeds, partial.groups) == (40, [10], [])
    ((past,),) = group.pasts
    assert "".join(map(chr, past.token_ids)) == "abc"

    later = ScriptedEngine({0: [("DEF", "stop")]})
    later.versions = lambda answered: 5
    (episode,) = play(later, [(past,)])
    assert "".join(map(chr, episode.token_ids)) == PROMPT + "abcDEF"
    assert (episode.status, episode.reward, episode.turns[-1].text) == ("completed", 1.0, "abcDEF")
    start = episode.prompt_length
    assert episode.weight_spans == [(3, start, start + 3), (5, start + 3, start + 6)]
    (request,) = later.requests
    assert (len(request.token_ids), request.max_new_tokens, request.sampled) == (start + 3, 6, 3)


def test_a_whole_response_of_a_broken_group_is_not_asked_for_again():
    done = Result(-1, np.array([97, 98], np.int32), np.full(2, -0.5, np.float32), "stop", 3)
    engine = ScriptedEngine({})
    (episode,) = play(engine, [(done,)])
    assert (engine.requests, episode.status, episode.turns[-1].text) == ([], "completed", "ab")


def test_nothing_sampled_is_no_past():
    engine = ScriptedEngine({0: [("a", "stop")], 1: [("xyz", "stop")]})
    aborted, whole = play(engine, enough=lambda over: True)
    assert aborted.status == "aborted"
    assert [(len(part.token_ids), part.finish_reason) for part in responses_of(aborted)] == [(0, "abort")]
    (kept,) = responses_of(whole)
    assert kept.finish_reason == "stop"
    again = ScriptedEngine({0: [("new", "stop")]})
    (episode,) = play(again, [responses_of(aborted)])
    assert (episode.status, episode.turns[-1].text, again.requests[0].sampled) == ("completed", "new", 0)


@pytest.mark.parametrize("spans", [(), ((4, 0, 1), (5, 1, 2))])
def test_joined_spans(spans):
    first = Result(0, np.array([1], np.int32), np.zeros(1, np.float32), "abort", 3)
    second = Result(0, np.array([2, 3], np.int32), np.zeros(2, np.float32), "length", 4, spans)
    joined = join_results(first, second)
    assert joined.token_ids.tolist() == [1, 2, 3]
    assert joined.finish_reason == "length"
    assert joined.spans == ((3, 0, 1), *((v, a + 1, b + 1) for v, a, b in (spans or ((4, 0, 2),))))
