"""Answers that algebra cannot finish, 512 at a time through the episode loop: the batch ends, nobody else pays."""

from __future__ import annotations

import json
import time
from functools import partialmethod

import pytest

from geo_sokoban_pipeline.rewards.math_answer import Grader
from geo_sokoban_pipeline.rollout.episode import EpisodeRequest
from geo_sokoban_pipeline.rollout.rollout import rollout
from rollout.scripted import BatchEngine, CharacterPolicy, geometry_settings

BOMBS, PATIENCE, TURNS = 512, 1.5, 2
LABEL = "x y"


def bomb(number: int) -> str:
    """An answer that passes the rules of the default grader, and that algebra does not finish in its time."""
    return f"(x+y+{number})^{{99}}(x-y)^{{99}}(x+3y)^{{99}}"


def response(answer: str) -> str:
    call = json.dumps({"name": "calc_score", "arguments": {"answer": answer}})
    return f"<tool_call>{call}</tool_call> \\boxed{{{answer}}}"


@pytest.mark.slow
def test_a_batch_of_bombs_ends_by_its_deadlines(monkeypatch):
    monkeypatch.setattr(Grader, "submit", partialmethod(Grader.submit, patience=PATIENCE))
    talks = {n: [response(bomb(TURNS * n + turn)) for turn in range(TURNS)] for n in range(BOMBS)}
    talks[BOMBS] = [response("x+y"), "\\boxed{xy}"]  # right by rule at the end
    tasks = [EpisodeRequest(f"e{n}", {"id": f"e{n}", "prompt": "p", "answer": LABEL}, n, 0, n) for n in talks]
    engine = BatchEngine({n: [(text, "stop") for text in texts] for n, texts in talks.items()})
    start = time.monotonic()
    episodes = rollout(engine, CharacterPolicy(), tasks, geometry_settings(TURNS))
    # Each turn waits for its calls, and the end for the last texts: 5 s, and the loop's own work on a busy machine. To
    # work on all of them would take 20 minutes.
    assert time.monotonic() - start < 60
    assert {episode.status for episode in episodes} == {"completed"}
    assert [episode.reward for episode in episodes] == [0.0] * BOMBS + [1.0]
    assert {episode.metrics["grading_timeout"] for episode in episodes[:BOMBS]} == {1.0}
    rules = {turn.info["rule"] for episode in episodes[:BOMBS] for turn in episode.turns if turn.role == "assistant"}
    assert rules == {"timeout"}
