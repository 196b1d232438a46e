"""What a second rank saves of an optimizer step: seconds of two ranks over those of one, at equal work.

Run with `pytest benchmarks/test_ranks.py -s` on an idle machine with two cores or more. A policy of 40 million weights
takes GRPO steps over the same episodes, alone and on two ranks, one thread each: alternately in one run, the least of
three steps each after one that fills caches. Threshold: with replicas and with shards, two ranks take at most 0.6 of
one rank's seconds. CPU-seconds of the one rank tell whether the machine did something else.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from benchmarks.records import keep
from benchmarks.setup import default_options, make_rows
from benchmarks.tables import rank_ratio

from geo_sokoban_pipeline.config.grpo import GrpoOptions, TrainOptions
from geo_sokoban_pipeline.config.policy import TinyPolicyOptions
from geo_sokoban_pipeline.grpo.loss import GrpoObjective
from geo_sokoban_pipeline.policies.policy import Policy
from geo_sokoban_pipeline.policies.tiny import build_tiny_policy
from geo_sokoban_pipeline.training.backend import build_backend
from geo_sokoban_pipeline.training.backends.base import TrainBackend
from geo_sokoban_pipeline.training.batch import TrainSample
from geo_sokoban_pipeline.training.demonstrations import Demonstrator
from geo_sokoban_pipeline.training.runtime import prepare_process
from geo_sokoban_pipeline.training.worker_group import open_worker_group

SIZES: dict[str, Any] = {
    "texts": "sokoban",
    "hidden": 768,
    "layers": 6,
    "heads": 12,
    "kv_heads": 4,
    "head_dim": 64,
    "mlp": 1792,
    "vision_hidden": 256,
    "vision_layers": 4,
    "vision_mlp": 512,
    "initializer_range": 0.02,
}
EPISODES, ROUNDS, THRESHOLD = 40, 3, 0.6  # episodes: the five groups of eight of the default run's step
OBJECTIVE = GrpoObjective(GrpoOptions())


@pytest.fixture(scope="module")
def options() -> TrainOptions:
    return default_options({})


@pytest.fixture(scope="module")
def policy() -> Policy:
    prepare_process(1)
    made = build_tiny_policy(TinyPolicyOptions(**SIZES), seed=0)
    assert 38e6 < made.model.num_parameters() < 42e6
    return made


@pytest.fixture(scope="module")
def samples(policy: Policy, options: TrainOptions) -> list[TrainSample]:
    """Demonstrations of the default task with advantages, and the policy's own log-probs."""
    expert = Demonstrator(make_rows(64), policy, options, 0, "benchmark")
    made = [expert.demonstrate(number) for number in range(EPISODES)]
    rng = np.random.default_rng(0)
    return [
        replace(
            sample,
            advantages=rng.normal(size=len(sample.targets)).astype(np.float32),
            old_log_probs=own,
            rollout_log_probs=own,
        )
        for sample, own in zip(made, build_backend(policy, options.optimizer).log_probs(made), strict=True)
    ]


def seconds_of(backend: TrainBackend, samples: Sequence[TrainSample]) -> tuple[float, float]:
    """Seconds and CPU-seconds of a step here; its rate is too low to change what the next one computes."""
    began, worked = time.perf_counter(), time.process_time()
    backend.step(samples, OBJECTIVE, 1e-9)
    return time.perf_counter() - began, time.process_time() - worked


def compare(policy: Policy, options: TrainOptions, samples: Sequence[TrainSample], sharding: str) -> dict[str, Any]:
    """Seconds of steps, one and two ranks in turn."""
    shape = options.model_copy(update={"processes": 2, "threads": 1, "sharding": sharding})
    shared = copy.deepcopy(policy)
    alone = build_backend(copy.deepcopy(policy), options.optimizer)
    with open_worker_group(shared, shape) as workers:
        both = build_backend(shared, options.optimizer, workers=workers)
        rows = [(*seconds_of(alone, samples), seconds_of(both, samples)[0]) for _ in range(ROUNDS + 1)]
    one, one_cpu, two = map(list, zip(*rows[1:], strict=True))
    return {"sharding": sharding, "one": one, "one_cpu": one_cpu, "two": two}


def test_two_ranks_take_little_more_than_half(
    policy: Policy, options: TrainOptions, samples: list[TrainSample]
) -> None:
    found = {
        "parameters": policy.model.num_parameters(),
        "episodes": len(samples),
        "tokens": sum(sample.length for sample in samples),
        "rows": [compare(policy, options, samples, sharding) for sharding in ("none", "full")],
    }
    keep("ranks", found)
    assert max(rank_ratio(row) for row in found["rows"]) <= THRESHOLD
