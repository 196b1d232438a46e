"""Relations between parameters: what cannot work is a failure, what hardly can be meant a warning."""

from __future__ import annotations

from typing import Any

import pytest

from geo_sokoban_pipeline.preflight.relations import check_counts, check_lengths, check_relations

RUN = "train_sokoban"


def test_the_default_fits(make_subject: Any) -> None:
    (check,) = check_relations(RUN, make_subject().options)
    assert (check.state, check.found) == ("ok", "all fit each other")


@pytest.mark.parametrize(
    ("changes", "state", "text"),
    [
        ({"grpo": {"group_size": 1}}, "failure", "group_size=1: an episode alone in its group has advantage 0"),
        ({"grpo": {"min_groups": 40}}, "warning", "min_groups=40: above groups=32"),
        ({"grpo": {"groups_per_step": 33}}, "warning", "groups_per_step=33: above groups=32"),
        ({"loop": {"iterations": 500}}, "warning", "iterations=500: beyond optimizer.schedule_iterations"),
        ({"loop": {"iterations": 30}}, "warning", "with 30 iterations the learning rate never falls"),
        ({"optimizer": {"warmup_iterations": 999}}, "warning", "warmup_iterations=999: not below"),
        ({"loop": {"eval_interval": 999}}, "warning", "only the policy before training is validated"),
        ({"loop": {"save_interval": 999}}, "warning", "a killed run begins anew"),
        ({"rollout": {"max_conversations": 100}}, "warning", "256 episodes are played in 3 waves"),
    ],
)
def test_what_does_not_fit(make_subject: Any, changes: dict[str, Any], state: str, text: str) -> None:
    (check,) = check_relations(RUN, make_subject(train_sokoban=changes).options)
    assert check.state == state
    assert text in check.found
    assert check.way_out


@pytest.mark.parametrize(
    ("counts", "changes", "state", "text"),
    [
        ((6144, 256, 640), {}, "ok", "6144 for training"),
        ((0, 256, 640), {}, "failure", "no training levels"),
        ((31, 256, 640), {}, "warning", "groups=32: more than the 31 training levels"),
        ((6144, 0, 640), {}, "failure", "warm_start.steps=1000: its validations have no validation levels"),
        ((6144, 0, 640), {"warm_start": {"steps": 0}}, "warning", "so nothing is validated"),
        ((6144, 256, 0), {}, "warning", "the evaluation at the end says nothing"),
        ((6144, 100, 640), {}, "warning", "loop.eval_prompts=160: there are 100"),
        ((6144, 256, 640), {"evaluation": {"prompts": 1000}}, "warning", "evaluation.prompts=1000: there are 640"),
    ],
)
def test_levels(make_subject: Any, counts: Any, changes: dict[str, Any], state: str, text: str) -> None:
    first, *_ = check_counts(RUN, make_subject(train_sokoban=changes).options, *counts)
    assert first.state == state
    assert text in first.found


@pytest.mark.parametrize(
    ("episode", "context", "prompt", "reply", "changes", "state", "text"),
    [
        (300, 32768, 28, 6, {}, "ok", "28 in the prompt, up to 300 in all"),
        (300, 256, 28, 6, {}, "failure", "up to 300 with train_sokoban.rollout.max_turns=10; the model holds 256"),
        (300, 32768, 40, 6, {"rollout": {"max_context_tokens": 32}}, "failure", "a prompt takes 40 tokens"),
        (None, 32768, 28, 6, {}, "warning", "no limit but the model's context of 32768 tokens"),
        (300, 32768, 28, 12, {}, "warning", "the teacher's replies take 12 tokens; max_tokens_per_turn=8"),
        (9000, 32768, 28, 6, {}, "warning", "the longest episode has 9000 tokens"),
    ],
)
def test_lengths(
    make_subject: Any, episode: int | None, context: int, prompt: int, reply: int, changes: Any, state: str, text: str
) -> None:
    (check,) = check_lengths(RUN, make_subject(train_sokoban=changes).options, episode, context, prompt, reply)
    assert check.state == state
    assert text in check.found
