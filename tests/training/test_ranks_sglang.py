"""Weights of sharded ranks at a real server, in each of the ways; a server that comes back gets them again.

`by ranks`: from rank 0 straight to the servers, as in a Ray cluster.
"""

from __future__ import annotations

import base64
import pickle
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from torch import Tensor

from geo_sokoban_pipeline.config.grpo import GrpoOptions, OptimizerOptions
from geo_sokoban_pipeline.config.rollout import SamplingOptions
from geo_sokoban_pipeline.config.server import ServerOptions
from geo_sokoban_pipeline.grpo.loss import GrpoObjective
from geo_sokoban_pipeline.policies.lora import Adapter
from geo_sokoban_pipeline.policies.policy import Policy, load_as, load_empty, save_policy
from geo_sokoban_pipeline.policies.qwen3_vl import extend_positions
from geo_sokoban_pipeline.policies.weights import SharedBytes, TensorSpec, WeightSource
from geo_sokoban_pipeline.rollout.engines.base import Request, Result
from geo_sokoban_pipeline.rollout.engines.sglang import sender
from geo_sokoban_pipeline.rollout.engines.sglang.engine import SglangEngine
from geo_sokoban_pipeline.training.backend import RankSender, build_backend
from geo_sokoban_pipeline.training.backends.base import TrainBackend
from geo_sokoban_pipeline.training.batch import TrainSample
from geo_sokoban_pipeline.training.worker_group import WorkerGroup
from proxies import Proxy, WithoutModel, changed, proxied
from rollout.engines.sglang.material import TOLERANCE, ask, kill, request_with
from servers import attached, launch_options, strays
from training.four_ranks import FourRanks
from training.large import forget_peak, peak, write_random_policy
from training.setup import ADAPTED, SIZES, Setup

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("sglang")]

WAYS = ("tensors", "disk", "group", "group by ranks")
SAMPLING = SamplingOptions()
OBJECTIVE = GrpoObjective(GrpoOptions())
ADAPTER = Adapter(2, 4.0, ADAPTED, Path())
MIB = 1 << 20
# 45 million weights: three buckets of 64 MiB.
LARGE = {**SIZES, "layers": 6, "hidden": 768, "heads": 12, "kv_heads": 4, "head_dim": 64, "mlp": 2304}


@pytest.fixture(autouse=True)
def _nothing_is_left_behind() -> Iterator[None]:
    yield
    assert strays() == []


def sample_of(policy: Policy, request: Request, result: Result) -> TrainSample:
    """A response as the trainer takes it."""
    ids = np.concatenate([request.token_ids, result.token_ids]).astype(np.int64)
    codec = policy.codec
    grids = [image.grid for image in request.images]
    positions, _ = extend_positions(ids, grids, codec.image_pad_id, codec.merge_size)
    targets = np.arange(len(request.token_ids), len(ids))
    return TrainSample(ids[:-1], positions[:, :-1], targets, ids[targets], list(request.images))


def check(backend: TrainBackend, policy: Policy, pairs: list[tuple[Request, Result]]) -> None:
    """The server's log-probs are those of the trainer."""
    assert all(len(result.token_ids) for _, result in pairs)
    scored = backend.log_probs([sample_of(policy, *pair) for pair in pairs])
    for (_, result), expected in zip(pairs, scored, strict=True):
        np.testing.assert_allclose(result.log_probs, expected, atol=TOLERANCE)


@pytest.mark.parametrize(
    ("layout", "ways", "adapter"),
    [
        ("two shards", (*WAYS, "ipc by ranks"), None),
        ("tensor 2", ("tensors", "group by ranks"), None),
        # Base plus product, bucket by bucket; in one process, and by each rank for its own rows.
        ("one process", ("tensors", "disk"), ADAPTER),
        ("two shards", ("tensors", "group"), ADAPTER),
    ],
)
def test_servers_sample_with_what_sharded_ranks_have_trained(
    four_ranks: FourRanks,
    setup: Setup,
    batches: dict[str, list[TrainSample]],
    sglang_server: str,
    tiny_policy: Policy,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    layout: str,
    ways: tuple[str, ...],
    adapter: Adapter | None,
) -> None:
    """Twice in each way, with a step between any two updates; and again where the server has forgotten them."""
    save_policy(tiny_policy, tmp_path)
    send_memory_for_handles(monkeypatch)
    is_alone = layout == "one process"
    policy = (load_as if is_alone else load_empty)(setup.options.policy, tmp_path, adapter)
    seen = request_with(policy, [0, 1], SAMPLING, identity=0)
    before: Any = None
    with four_ranks.group(policy, layout) as workers, proxied(sglang_server) as proxy:
        backend = build_backend(policy, OptimizerOptions(), SAMPLING.temperature, workers)
        for number, way in enumerate(ways):
            update, by_ranks = way.removesuffix(" by ranks"), way.endswith("by ranks")
            if update == "ipc":  # which the options refuse for a CPU
                update = "group"
                monkeypatch.setattr(ServerOptions, "way", lambda self, on_gpu: "ipc")
            with attached(policy, proxy.url, update=update, bucket_bytes=100_000) as engine:
                for version in (2 * number + 1, 2 * number + 2):
                    engine.update_weights(source_of(backend, workers, by_ranks=by_ranks), version)
                    new = request_with(policy, [version + 1], SAMPLING, identity=version)
                    results = ask(engine, seen, new)
                    assert {result.weight_version for result in results.values()} == {version}
                    check(backend, policy, [(request, results[request.id]) for request in (seen, new)])
                    after = backend.log_probs([sample_of(policy, seen, results[seen.id])])[0]
                    if before is not None:
                        moved = backend.log_probs([before[0]])[0] - before[1]
                        assert np.abs(moved).max() > 10 * TOLERANCE, "the step has changed what is sampled"
                    before = sample_of(policy, seen, results[seen.id]), after
                    if version % 2:
                        backend.step(batches["boards"], OBJECTIVE, 3e-3)
                sent = updates(proxy)
                proxy.order("/generate", "drop")
                proxy.order("/model_info", lambda body: body, changed(forget))
                again = replace(seen, id=99)
                check(backend, policy, [(again, ask(engine, again)[again.id])])
                assert updates(proxy) == sent + 1
                backend.step(batches["boards"], OBJECTIVE, 3e-3)
    assert policy.is_empty is not is_alone, "a driver of shards never had the weights"


def source_of(backend: TrainBackend, workers: WorkerGroup | None, *, by_ranks: bool) -> WeightSource:
    """The weights; sent by the driver, or by the ranks."""
    source = backend.weight_source()
    if not by_ranks:
        return source
    assert workers is not None

    def collect(specs: Mapping[str, TensorSpec], memory: SharedBytes | None) -> Tensor:
        raise AssertionError("the driver collects nothing")

    return replace(source, collect=collect, sender=partial(RankSender, workers))


def send_memory_for_handles(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the payload for GPUs the memory of a bucket stands in place of its handle."""
    monkeypatch.setattr(sender, "put_on_gpu", lambda flat: flat)
    monkeypatch.setattr(sender, "Handle", Tensor.clone)


def updates(proxy: Proxy) -> int:
    """How often the server behind a proxy was sent weights."""
    return sum(map(proxy.seen.count, ("/begin_weight_update", "/update_weights_from_disk")))


def forget(body: dict[str, Any]) -> dict[str, Any]:
    """The answer of a restarted server, which names its first weights."""
    return {**body, "weight_version": "default"}


def killing(monkeypatch: pytest.MonkeyPatch, server: int) -> None:
    """Have a server killed when its second bucket is collected, and the first one on its way."""
    advance, asked = RankSender.advance, list[str]()

    def advance_and_kill(self: RankSender, specs: Mapping[str, TensorSpec] | None) -> str | None:
        asked.extend(specs or ())
        if specs and next(iter(specs)) != asked[0] and psutil.pid_exists(server):
            kill(server)
        return advance(self, specs)

    monkeypatch.setattr(RankSender, "advance", advance_and_kill)


def test_the_senders_memory_and_a_server_that_is_killed_in_an_update(
    four_ranks: FourRanks,
    setup: Setup,
    batches: dict[str, list[TrainSample]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With each way the driver grows by two buckets at most; a server that is killed comes back with these weights."""
    bucket = 64 * MIB
    write_random_policy(tmp_path, setup.policy, LARGE)
    policy = load_empty(setup.options.policy, tmp_path)
    assert sum(weight.numel() for weight in policy.model.parameters()) * 4 > 2 * bucket
    options = launch_options(bucket_bytes=bucket)
    request = request_with(policy, [3], SAMPLING, identity=7)
    with four_ranks.group(policy, "two shards") as workers:
        backend = build_backend(policy, OptimizerOptions(), SAMPLING.temperature, workers)
        for version, way in enumerate(WAYS, start=1):
            # The next one takes over the server.
            engine = SglangEngine(policy, options.model_copy(update={"update": way.removesuffix(" by ranks")}))
            by_ranks = way.endswith("by ranks")
            try:
                backend.step(batches["one"], OBJECTIVE, 1e-3)
                first = forget_peak()
                engine.update_weights(source_of(backend, workers, by_ranks=by_ranks), version)
                # Rank 0, which is the driver here, also receives a bucket by a collective.
                assert peak() - first <= (3 if by_ranks else 2) * bucket, way
                check(backend, policy, [(request, ask(engine, request)[request.id])])
                if way == "group by ranks":
                    backend.step(batches["one"], OBJECTIVE, 1e-3)
                    (server,) = engine.servers
                    assert server.launched is not None
                    with monkeypatch.context() as patched:
                        killing(patched, server.launched.pid)
                        engine.update_weights(source_of(backend, workers, by_ranks=by_ranks), version + 10)
                    assert engine.restarts == 1
                    check(backend, policy, [(request, ask(engine, request)[request.id])])
            finally:
                engine.close()


@pytest.mark.parametrize("path", ["/init_weights_update_group", "/update_weights_from_distributed"])
def test_ranks_do_not_wait_for_a_lost_server(
    four_ranks: FourRanks, setup: Setup, sglang_server: str, tiny_policy: Policy, tmp_path: Path, path: str
) -> None:
    """The server has not heard the command for which rank 0 joins, or sends."""
    save_policy(tiny_policy, tmp_path)
    policy = load_empty(setup.options.policy, tmp_path)
    request = request_with(policy, [0, 1], SAMPLING, identity=0)
    faults = {"first_pause": 0.0, "control_timeout": 100.0}
    with four_ranks.group(policy, "two shards") as workers, proxied(sglang_server) as proxy:
        backend = build_backend(policy, OptimizerOptions(), SAMPLING.temperature, workers)
        with attached(policy, proxy.url, update="group", bucket_bytes=400_000, faults=faults) as engine:
            proxy.order(path, "drop")
            began = time.monotonic()
            engine.update_weights(source_of(backend, workers, by_ranks=True), 1)
            assert time.monotonic() - began < 50  # no time limit had to pass
            assert proxy.seen.count("/init_weights_update_group") == 2
            check(backend, policy, [(request, ask(engine, request)[request.id])])


def test_servers_that_come_back_at_a_time_get_the_same_weights(
    four_ranks: FourRanks, setup: Setup, tiny_policy: Policy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both are lost in one update; each is sent all buckets, and none of the other's."""
    save_policy(tiny_policy, tmp_path)
    policy = load_empty(setup.options.policy, tmp_path)
    send_memory_for_handles(monkeypatch)
    monkeypatch.setattr(ServerOptions, "way", lambda self, on_gpu: "ipc")  # which the options refuse for a CPU
    servers = [WithoutModel(policy) for _ in range(2)]
    with four_ranks.group(policy, "two shards") as workers, ExitStack() as opened:
        for server in servers:
            opened.callback(server.close)
            server.order("/begin_weight_update", "drop")
        servers[0].order("/update_weights_from_tensor", "wait 0.5")
        backend = build_backend(policy, OptimizerOptions(), SAMPLING.temperature, workers)
        urls = tuple(server.url for server in servers)
        engine = opened.enter_context(attached(policy, *urls, update="group", bucket_bytes=100_000))
        engine.update_weights(source_of(backend, workers, by_ranks=True), 1)
        assert engine.restarts == 2
        whole = dict(backend.weight_source().read())
    for server in servers:
        found: dict[str, Tensor] = {}
        for text in server.payloads:
            bucket = pickle.loads(base64.b64decode(text))
            flat = bucket["flattened_tensor"]
            for one in bucket["metadata"]:
                found[one.name] = flat[one.start_idx : one.end_idx].view(one.dtype).view(one.shape)
        assert len(server.payloads) > 2 and found.keys() == whole.keys()
        assert all(torch.equal(found[name], weight) for name, weight in whole.items())
