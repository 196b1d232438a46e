"""What new weights cost on their way from two ranks that share them to a server, in each of the ways.

Run with `pytest benchmarks/test_weights.py -s`; it needs the servers' environment (`make sglang-env`). A policy of one
gigabyte with random weights is held by two ranks of one thread, and served by one server on the CPU. An update is
everything from the order to the server's answer that it has the weights: collecting them from the ranks, sending, and
loading. Least of two rounds, the ways in turns. `before` is a group as it was: the ranks send tensor by tensor, each
bucket is put together in memory of its own, of 512 MiB. Thresholds: a group takes at most a third
of the seconds of requests, and half of the CPU-seconds of `before`, in all processes together.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

import psutil
import torch
import torch.distributed as dist
from benchmarks.records import keep

from geo_sokoban_pipeline.config.policy import TinyPolicyOptions
from geo_sokoban_pipeline.envs.sokoban.task import SOKOBAN
from geo_sokoban_pipeline.policies.tiny import build_tiny_policy
from geo_sokoban_pipeline.policies.weights import SharedBytes, TensorSpec, WeightSource, cut, empty_bucket
from geo_sokoban_pipeline.rollout.engines.sglang.engine import SglangEngine
from geo_sokoban_pipeline.training.backend import build_backend
from geo_sokoban_pipeline.training.runtime import prepare_process
from geo_sokoban_pipeline.training.worker import Worker
from geo_sokoban_pipeline.training.worker_group import WorkerGroup, load_driver_policy
from open_workers import apply_on_all, open_group
from servers import launch_options, need_environment, tree
from training.large import write_random_policy

WAYS, ROUNDS, RANKS = ("tensors", "disk", "group", "before"), 2, 2
BUCKET, BUCKET_BEFORE = 32 << 20, 512 << 20  # bytes; the first as `conf/sglang_cpu` has it
SECONDS, CPU_SECONDS = 1 / 3, 1 / 2
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
    cpu: dict[str, list[tuple[float, float]]] = {way: [] for way in WAYS}
    version = 0
    workers = open_group(policy, options)
    try:
        backend = build_backend(policy, options.optimizer, workers=workers)
        for _ in range(ROUNDS):
            for way in WAYS:
                version += 1
                # Each engine takes over the server of the one before.
                update, size = ("group", BUCKET_BEFORE) if way == "before" else (way, BUCKET)
                engine = SglangEngine(policy, launch_options(update=update, bucket_bytes=size))
                source = backend.weight_source()
                source = one_by_one(source, workers) if way == "before" else source
                began, before = time.perf_counter(), cpu_clocks(engine)
                engine.update_weights(source, version)
                seconds[way].append(time.perf_counter() - began)
                ours, servers = (now - then for now, then in zip(cpu_clocks(engine), before, strict=True))
                cpu[way].append((ours, servers))
                engine.close()
    finally:
        workers.close()
    assert policy.is_empty
    least = {way: min(found) for way, found in seconds.items()}
    spent = {way: min(found, key=sum) for way, found in cpu.items()}
    keep("weights", {"bytes": 4 * count, "ranks": RANKS, "seconds": least, "cpu_seconds": spent})
    assert least["group"] <= SECONDS * least["tensors"]
    assert sum(spent["group"]) <= CPU_SECONDS * sum(spent["before"])


def cpu_clocks(engine: SglangEngine) -> tuple[float, float]:
    """CPU-seconds of the driver with its ranks, and of the servers, since these processes began."""
    of_servers = {
        process.pid
        for server in engine.servers
        if server.launched is not None
        for process in tree(psutil.Process(server.launched.pid).ppid())
    }
    clocks = [0.0, 0.0]
    for process in tree(psutil.Process().pid):
        spent = process.cpu_times()
        clocks[process.pid in of_servers] += spent.user + spent.system
    return clocks[0], clocks[1]


def one_by_one(source: WeightSource, workers: WorkerGroup) -> WeightSource:
    """The source with the ranks sending a tensor at a time."""

    def collect(specs: Mapping[str, TensorSpec], memory: SharedBytes | None) -> torch.Tensor:
        wholes = apply_on_all(workers, partial(send_each, specs))[0]
        flat = empty_bucket(specs, None)
        for (_, place), whole in zip(cut(flat, specs), wholes, strict=True):
            place.copy_(whole)
        return flat

    return replace(source, collect=collect)


def send_each(specs: Mapping[str, TensorSpec], worker: Worker) -> list[torch.Tensor]:
    """Whole weights on rank 0, nothing on the other."""
    found = []
    for name, spec in specs.items():
        part = worker.backend.part_of(name, 0, {})
        own = part.own.to(getattr(torch, spec.dtype))
        if worker.group is None or worker.group.rank:
            dist.send(own, 0)
            continue
        found.append(own.new_empty(part.shape))
        part.of(found[-1], 0).copy_(own)
        dist.recv(part.of(found[-1], 1), 1)
    return found
