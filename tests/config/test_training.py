"""Options of training: what evaluation inherits, and combinations that could not train."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from task_options import TrainOptions


def test_evaluation_inherits_the_sampling_of_the_rollout() -> None:
    """Worked example 13.9: temperature 0.8 and top_p 1 of the rollout, top_k 1 of the evaluation, one sample."""
    options = TrainOptions.model_validate(
        {
            "rollout": {"sampling": {"temperature": 0.8}, "max_response_tokens": 4096},
            "evaluation": {"sampling": {"top_k": 1}},
        }
    )
    sampling = options.evaluation_sampling
    assert (options.evaluation.samples, sampling.temperature, sampling.top_p, sampling.top_k) == (1, 0.8, 1.0, 1)
    assert options.rollout.max_response_tokens == 4096


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rollout": {"sampling": {"greedy": True}}}, "training needs sampled episodes"),
        ({"evaluation": {"checkpoint": "best"}, "loop": {"keep_best": False}}, "needs loop.keep_best"),
        ({"grpo": {"max_log_prob_difference": 0.1}}, "needs old_log_probs=recompute"),
        ({"grpo": {"importance_cap": 2.0}}, "needs old_log_probs=recompute"),
        ({"grpo": {"reduction": "constant"}}, "needs constant_denominator"),
        ({"grpo": {"credit": "episode", "baseline": "board"}}, "needs credit=turn"),
        ({"policy": {"source": "folder"}}, "path is empty"),
        ({"sharding": "hybrid", "processes": 4, "replicas": 3, "threads": 1}, "such as processes=4 with replicas=2"),
        ({"sharding": "full", "processes": 4, "replicas": 2, "threads": 1}, "only hybrid takes replicas"),
        ({"placement": "inline", "processes": 2, "threads": 1}, "one process has one rank"),
        *(
            ({"placement": "ray", "rollout": {"engine": "sglang", "server": server}}, message)
            for server, message in (
                ({"router": "sticky"}, "router=sticky: a server that is brought back may be on another node"),
                ({"host": "10.0.0.1"}, "host=10.0.0.1: a server listens at the address by which Ray knows its node"),
                ({"update": "ipc"}, "update=ipc: weights come from the driver"),
                ({"update": "disk"}, "give an update_folder that all nodes can read"),
                ({"colocated": True, "count": 2}, "share the GPUs of 2 ranks, and there are processes=1"),
            )
        ),
        ({"placement": "ray", "ray": {"min_processes": 2}}, "min_processes=2 with processes=1"),
        (
            {
                "placement": "ray",
                "processes": 4,
                "threads": 1,
                "sharding": "hybrid",
                "replicas": 2,
                "ray": {"min_processes": 1},
            },
            "ranks come in groups of 2",
        ),
    ],
)
def test_combinations_that_could_not_train(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        TrainOptions.model_validate(changes)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rollout": {"over_sampling": 2}, "processes": 2, "threads": 1}, "give rollout.workers, or take processes=1"),
        ({"placement": "inline", "rollout": {"workers": 2}, "threads": 1}, "placement=inline with rollout.workers=2"),
        ({"rollout": {"workers": 2}}, "rollout.workers=2 needs threads"),
        (
            {"rollout": {"workers": 2, "engine": "sglang", "server": {"router": "sticky"}}, "threads": 1},
            "rollout.workers=2 with rollout.server.router=sticky",
        ),
        ({"rollout": {"partial": True, "over_sampling": 2}}, "an interaction cannot be continued"),
        ({"rollout": {"partial": True, "max_turns": 1}}, "nothing is ever aborted"),
        ({"rollout": {"partial": True, "max_turns": 1, "over_sampling": 2}}, "would never be trained"),
        ({"grpo": {"mixed_versions": "keep", "old_log_probs": "recompute"}}, "needs old_log_probs=rollout"),
    ],
)
def test_rollouts_that_cannot_be(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        TrainOptions.model_validate(options)
