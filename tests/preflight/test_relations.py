"""Relations between parameters: what cannot work is a failure, what hardly can be meant a warning."""

from __future__ import annotations

from typing import Any

import pytest

from geo_sokoban_pipeline.envs.sokoban.task import SOKOBAN
from geo_sokoban_pipeline.preflight.relations import check_counts, check_lengths, check_relations
from preflight.conftest import says

RUN = "train_sokoban"


@pytest.mark.parametrize(
    ("changes", "state", "text"),
    [
        ({}, "ok", "all fit each other"),
        ({"grpo": {"group_size": 1}}, "failure", "group_size=1: an episode alone in its group has advantage 0"),
        ({"grpo": {"min_groups": 40}}, "warning", "min_groups=40: above groups=32"),
        ({"grpo": {"groups_per_step": 33}}, "warning", "groups_per_step=33: above groups=32"),
        ({"loop": {"iterations": 500}}, "warning", "iterations=500: beyond optimizer.schedule_iterations"),
        ({"loop": {"iterations": 30}}, "warning", "with 30 iterations the learning rate never falls"),
        ({"optimizer": {"warmup_iterations": 999}}, "warning", "warmup_iterations=999: not below"),
        ({"loop": {"eval_interval": 999}}, "warning", "only the policy before training is validated"),
        ({"loop": {"save_interval": 999}}, "warning", "a killed run starts over"),
        (
            {"policy": {"path": "mine"}},
            "warning",
            "policy.path=mine: not used, because train_sokoban.policy.source=tiny",
        ),
        (
            {"grpo": {"constant_denominator": 5}},
            "warning",
            "constant_denominator=5: not used with reduction=token_mean",
        ),
        (
            {"rollout": {"engine": "sglang", "server": {"colocated": True, "first_gpu": 2}}, "processes": 2},
            "warning",
            "servers begin at first_gpu=2, behind the ranks' 2 GPUs",
        ),
        ({"warm_start": {"steps": 50}}, "warning", "warm_start.warmup_steps=50: not below the 50 steps"),
        ({"warm_start": {"steps": 0}}, "ok", "all fit each other"),
        ({"rollout": {"max_conversations": 100}}, "warning", "256 episodes need 3 waves"),
        ({"loop": {"save_interval": 7}, "evaluation": {"checkpoint": "best"}}, "ok", "all fit each other"),
        (
            {"loop": {"iterations": 139, "save_interval": 21}, "evaluation": {"checkpoint": "best"}},
            "failure",
            "evaluation.checkpoint=best: with eval_interval=20, save_interval=21 and 139 iterations no saved policy",
        ),
    ],
)
def test_what_does_not_fit(make_subject: Any, changes: dict[str, Any], state: str, text: str) -> None:
    check = says(check_relations(RUN, make_subject(train_sokoban=changes).options), state, text)
    assert bool(check.way_out) == (state != "ok")


@pytest.mark.parametrize(
    ("changes", "longest", "states"),
    [
        ({}, 10, []),
        ({}, 11, ["warning"]),
        ({"env": {"args": {"max_actions_per_turn": 2}}}, 20, []),
        ({"rollout": {"max_turns": 4}}, 8, ["warning"]),
        ({"rollout": {"max_turns": 4}, "env": {"factory": "worlds.build_env"}}, 8, []),
    ],
)
def test_moves_that_levels_need(make_subject: Any, changes: Any, longest: int, states: list[str]) -> None:
    found = SOKOBAN.check_limits(make_subject(train_sokoban=changes).options, longest)
    assert [check.state for check in found] == states
    assert all(f"levels need up to {longest}" in check.found for check in found)


@pytest.mark.parametrize(
    ("counts", "changes", "state", "text"),
    [
        ((6144, 256, 640), {}, "ok", "6144 for training"),
        ((0, 256, 640), {}, "failure", "no training levels"),
        ((31, 256, 640), {}, "warning", "groups=32: more than the 31 training levels"),
        ((6144, 0, 640), {}, "failure", "warm_start.steps=1000: its validations have no validation levels"),
        ((6144, 0, 640), {"warm_start": {"steps": 0}}, "warning", "so nothing is validated"),
        ((6144, 256, 0), {}, "warning", "the evaluation at the end is empty"),
        ((6144, 100, 640), {}, "warning", "loop.eval_prompts=160: there are 100"),
        ((6144, 256, 640), {"evaluation": {"prompts": 1000}}, "warning", "evaluation.prompts=1000: there are 640"),
        (
            (6144, 0, 640),
            {"warm_start": {"steps": 0}, "evaluation": {"checkpoint": "best"}},
            "failure",
            "evaluation.checkpoint=best: without validation levels",
        ),
        ((None, None, None), {}, "ok", "as many as there are for training"),
    ],
)
def test_levels(make_subject: Any, counts: Any, changes: dict[str, Any], state: str, text: str) -> None:
    says(check_counts(RUN, make_subject(train_sokoban=changes).options, *counts)[:1], state, text)


@pytest.mark.parametrize(
    ("episode", "context", "prompt", "response", "changes", "state", "text"),
    [
        (300, 32768, 28, 6, {}, "ok", "28 in the prompt, up to 300 in total"),
        (300, 256, 28, 6, {}, "warning", "up to 300 with train_sokoban.rollout.max_turns=10; the model holds 256"),
        (300, 28, 28, 6, {}, "failure", "a prompt takes 28 tokens, the context holds 28"),
        (300, 32768, 40, 6, {"rollout": {"max_context_tokens": 32}}, "failure", "a prompt takes 40 tokens"),
        (None, 32768, 28, 6, {}, "warning", "no limit but the model's context of 32768 tokens"),
        (300, 32768, 28, 12, {}, "warning", "the expert's responses take 12 tokens; max_tokens_per_turn=8"),
        (9000, 32768, 28, 6, {}, "warning", "the longest episode has 9000 tokens"),
    ],
)
def test_lengths(
    make_subject: Any,
    episode: int | None,
    context: int,
    prompt: int,
    response: int,
    changes: Any,
    state: str,
    text: str,
) -> None:
    options = make_subject(train_sokoban=changes).options
    says(check_lengths(RUN, options, episode, context, prompt, response), state, text)
