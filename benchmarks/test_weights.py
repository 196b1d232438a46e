"""How long new weights take from two ranks that share them to a server, in each of the three ways.

Run with `pytest benchmarks/test_weights.py -s`; it needs the servers' environment (`make sglang-env`). A policy of one
gigabyte with random weights is held by two ranks of one thread, and served by one server on the CPU. An update is
everything from the order to the server's answer that it has the weights: collecting them from the ranks, sending, and
loading. Least of two rounds, the ways in turns. Threshold: a group takes at most a third of the seconds of requests.
"""

from __future__ import annotations

import time
from pathlib import Path

from benchmarks.records import keep

from geo_sokoban_pipeline.config.policy import TinyPolicyOptions
from geo_sokoban_pipeline.envs.sokoban.task import SOKOBAN
from geo_sokoban_pipeline.policies.tiny import build_tiny_policy
from geo_sokoban_pipeline.rollout.engines.sglang.engine import SglangEngine
from geo_sokoban_pipeline.training.backend import build_backend
from geo_sokoban_pipeline.training.runtime import prepare_process
from geo_sokoban_pipeline.training.worker_group import load_driver_policy, open_worker_group
from servers import launch_options, need_environment
from training.large import write_random_policy

WAYS, ROUNDS, RANKS = ("tensors", "disk", "group"), 2, 2
THRESHOLD = 1 / 3
SIZES = {"layers": 17, "hidden": 1024, "heads": 8, "kv_heads": 2, "head_dim": 128, "mlp": 4096}


def test_updates_of_weights(tmp_path: Path) -> None:
    need_environment()
    prepare_process(1)
    tiny = TinyPolicyOptions(texts="sokoban")
    write_random_policy(tmp_path, build_tiny_policy(tiny, 0), {**tiny.model_dump(), **SIZES})
    values = {"processes": RANKS, "threads": 1, "sharding": "full", "policy": {"device": "cpu"}}
    options = SOKOBAN.train_config.model_validate(values)
    policy = load_driver_policy(options, tmp_path)
    count = sum(parameter.numel() for parameter in policy.model.parameters())
    seconds: dict[str, list[float]] = {way: [] for way in WAYS}
    version = 0
    with open_worker_group(policy, options) as workers:
        backend = build_backend(policy, options.optimizer, workers=workers)
        for _ in range(ROUNDS):
            for way in WAYS:
                version += 1
                # Each engine takes over the server of the one before.
                engine = SglangEngine(policy, launch_options(update=way))
                began = time.perf_counter()
                engine.update_weights(backend.weight_source(), version)
                seconds[way].append(time.perf_counter() - began)
                engine.close()
    assert policy.is_empty
    least = {way: min(found) for way, found in seconds.items()}
    found = {"bytes": 4 * count, "ranks": RANKS, "seconds": least}
    keep("weights", found)
    assert least["group"] <= THRESHOLD * least["tensors"]
