"""Weights on their way to servers: payloads, broadcasts, and which servers are sent them again."""

from __future__ import annotations

import asyncio
import base64
import collections
import dataclasses
import json
import pickle
import subprocess
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import yaml
from torch.multiprocessing import reductions
from torch.testing._internal.distributed.fake_pg import FakeStore

from geo_sokoban_pipeline.config.grpo import OptimizerOptions
from geo_sokoban_pipeline.config.server import ServerOptions
from geo_sokoban_pipeline.distributed.fsdp import shard_modules
from geo_sokoban_pipeline.distributed.group import Group as Ranks
from geo_sokoban_pipeline.policies.policy import empty_model
from geo_sokoban_pipeline.policies.weights import cut, plan_buckets
from geo_sokoban_pipeline.preflight.published_sizes import published_config
from geo_sokoban_pipeline.rollout.engines.sglang import sender
from geo_sokoban_pipeline.rollout.engines.sglang.client import (
    BadResponse,
    RequestRefused,
    ServerLost,
    UpdateInterrupted,
)
from geo_sokoban_pipeline.rollout.engines.sglang.sender import UpdateGroup, own_address, pack_handle, pack_tensors
from geo_sokoban_pipeline.rollout.engines.sglang.weight_update import WeightUpdate, describe_bucket
from geo_sokoban_pipeline.training.backend import RankSender
from geo_sokoban_pipeline.training.backends import torch as backends
from given_weights import named_tensors, source_of
from proxies import WithoutModel
from runs import ROOT
from servers import PYTHON, attached, need_environment

pytestmark = pytest.mark.xdist_group("sglang")


def bucket_of(tensors):
    """A bucket, and the specs of what it holds."""
    source = source_of(tensors)
    (specs,) = plan_buckets(source.specs, 1 << 30)
    return source.collect(specs, None), specs


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_payload_holds_each_tensor_once(dtype):
    given = {str(number): torch.arange(2000 * number).view(2, -1).to(dtype) for number in range(1, 4)}
    flat, specs = bucket_of(given)
    text = b"".join(pack_tensors(flat, specs))
    assert len(text) < 1.4 * len(flat) + 4000
    read = pickle.loads(base64.b64decode(text, validate=True))
    assert [name for name, _ in read] == list(given)
    assert all(torch.equal(tensor, given[name]) for name, tensor in read)


READ_HANDLES = """
import sys, torch
from torch.multiprocessing import reductions
from sglang.srt.utils.common import MultiprocessingSerializer
from sglang.srt.utils.patch_torch import monkey_patch_torch_reductions
from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorBucket
monkey_patch_torch_reductions()
opened, memory = [], torch.arange(24, dtype=torch.uint8)
reductions._rebuild_cuda_tensor_original = lambda *given: opened.append(given) or memory
torch.cuda.device_count = lambda: 2
torch.cuda.get_device_properties = lambda number: type("Gpu", (), {"uuid": f"GPU-{number}"})
read = MultiprocessingSerializer.deserialize(sys.stdin.read())
bucket = FlattenedTensorBucket(flattened_tensor=read["flattened_tensor"], metadata=read["metadata"])
print([(tuple(one[1]), one[5], one[6], one[7]) for one in opened],
      [(name, tensor.dtype, tensor.shape, int(tensor.view(torch.uint8).flatten()[0]))
       for name, tensor in bucket.reconstruct_tensors()])
"""


@pytest.mark.slow
def test_a_server_reads_handles_of_gpu_memory(monkeypatch):
    """Up to the call that opens one: SGLang's own reader finds the GPU by its identifier, whatever its number here."""

    def reduce_tensor(tensor):  # as torch does for a GPU tensor, and there is none here
        place = (tensor.size(), tensor.stride(), 0, torch.UntypedStorage, tensor.dtype, 7, b"handle")
        return reductions.rebuild_cuda_tensor, (torch.Tensor, *place, 24, 0, False, b"", 0, b"", False)

    monkeypatch.setattr(reductions, "reduce_tensor", reduce_tensor)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda number: SimpleNamespace(uuid=f"GPU-{number - 6}"))
    flat, specs = bucket_of({"b": torch.zeros(4, dtype=torch.bfloat16), "a": torch.zeros(2, 2)})
    text = b"".join(pack_handle(flat, specs)).decode()
    need_environment()
    read = subprocess.run([str(PYTHON), "-c", READ_HANDLES], input=text, capture_output=True, text=True, check=False)
    assert read.returncode == 0, read.stderr[-2000:]
    opened = [((24,), torch.uint8, 1, b"handle")]
    tensors = [("a", torch.float32, torch.Size([2, 2]), 0), ("b", torch.bfloat16, torch.Size([4]), 16)]
    assert read.stdout.splitlines()[-1] == f"{opened} {tensors}"


@pytest.mark.parametrize("count", range(1, 8))
def test_payloads_of_any_length(count):
    """Pieces of base64 meet wherever a tensor ends."""
    flat, specs = bucket_of({str(number): torch.arange(count * 20_000 + number).bfloat16() for number in range(3)})
    read = pickle.loads(base64.b64decode(b"".join(pack_tensors(flat, specs)), validate=True))
    assert all(torch.equal(one, other) for (_, one), (_, other) in zip(read, cut(flat, specs), strict=True))


def test_a_bucket_is_broadcast_as_bytes_in_the_order_of_its_description():
    group = UpdateGroup(["http://127.0.0.1:1"], [2], "gloo", 1.0)
    try:
        assert [body["rank_offset"] for body in group.invitations] == [1]
        assert group.invitations[0]["world_size"] == 3
        flat, specs = bucket_of({"b": torch.tensor([3.0], dtype=torch.bfloat16), "a": torch.tensor([[1.0, 2.0]])})
        fields = describe_bucket(specs)
        assert (fields["names"], fields["dtypes"], fields["shapes"]) == (
            ["a", "b"],
            ["float32", "bfloat16"],
            [[1, 2], [1]],
        )
        assert flat[:8].view(torch.float32).tolist() == [1.0, 2.0]
        assert flat[8:].view(torch.bfloat16).tolist() == [3.0]
    finally:
        group.leave()


@pytest.mark.parametrize(
    ("options", "on_gpu", "way"),
    [
        ({}, True, "ipc"),
        ({"first_gpu": 8, "colocated": True}, True, "ipc"),
        ({"first_gpu": 1, "tensor_parallel": 2}, True, "group"),
        ({"colocated": True}, False, "group"),  # the weights are on the CPU
        ({"device": "cpu"}, True, "group"),
        ({"mode": "attach", "urls": ("http://a:1",)}, True, "tensors"),
        ({"update": "disk"}, True, "disk"),
    ],
)
def test_the_way_of_weights_without_an_option(options, on_gpu, way):
    assert ServerOptions(**options).way(on_gpu=on_gpu) == way


def test_servers_of_this_machine_reach_it_on_the_loopback_interface():
    assert own_address(["http://127.0.0.1:1", "http://localhost:2/x"]) in ("127.0.0.1", "::1")


class OneServer:
    """A server that answers commands from a script: an exception is raised, and later commands succeed."""

    def __init__(self, url, **faults):
        self.url, self.faults, self.heard, self.tag = url, faults, [], ""

    async def command(self, path, body):
        name = path.removeprefix("/")
        self.heard.append(name)
        await asyncio.sleep(0)
        if self.faults.get(name):
            raise self.faults[name].pop(0)
        self.tag = body.get("weight_version", self.tag)

    async def get(self, path):
        return {"weight_version": self.tag}


class Group(UpdateGroup):
    """A group whose broadcasts fail as its members do."""

    broken = False

    def join(self):
        pass

    def broadcast(self, flat):
        if Group.broken:
            raise RuntimeError("gloo: connection closed by peer")


LOST, GARBLED = ServerLost("one is gone"), BadResponse("one answered 500")
HALF = RequestRefused("other refused with 400: Failed to receive weights")
BROADCAST = "update_weights_from_distributed"


@pytest.mark.parametrize(
    ("mine", "other", "broken", "expected"),
    [
        ({}, {}, False, {}),
        # The one that is lost has lost it for the other, too, which only has to get the weights again.
        ({BROADCAST: [LOST]}, {BROADCAST: [HALF]}, True, {"one": ServerLost, "other": UpdateInterrupted}),
        ({BROADCAST: [GARBLED]}, {}, False, {"one": BadResponse, "other": UpdateInterrupted}),
        ({"init_weights_update_group": [LOST]}, {}, True, {"one": ServerLost, "other": UpdateInterrupted}),
        # Before there is a group, a lost server is nobody else's fault.
        ({"begin_weight_update": [LOST]}, {}, False, {"one": ServerLost}),
        ({"end_weight_update": [LOST]}, {}, False, {"one": ServerLost}),
        # Nobody has answered with a fault, but nobody knows what the servers have.
        ({}, {}, True, {"one": BadResponse, "other": BadResponse}),
    ],
)
def test_who_is_sent_weights_again(monkeypatch, mine, other, broken, expected):
    monkeypatch.setattr(sender, "UpdateGroup", Group)
    monkeypatch.setattr(Group, "broken", broken)
    clients = [OneServer("http://127.0.0.1:1", **mine), OneServer("http://127.0.0.1:2", **other)]
    update = WeightUpdate(dict.fromkeys(clients, 1), ServerOptions(bucket_bytes=8), "group")
    asyncio.run(update.send(source_of(named_tensors([2, 2])), "1-tag"))
    names = {"http://127.0.0.1:1": "one", "http://127.0.0.1:2": "other"}
    assert {names[client.url]: type(fault) for client, fault in update.faults.items()} == expected
    for client in clients:
        assert client.heard.count("destroy_weights_update_group") == client.heard.count("init_weights_update_group")


class Counter(OneServer):
    """A server that counts the bytes of its commands."""

    written = 0

    async def command(self, path, body):
        text = json.dumps(body) if isinstance(body, dict) else b"".join(body)
        self.written += len(text)
        await super().command(path, json.loads(text))


PRESET = yaml.safe_load((ROOT / "conf/qwen3vl/parameters/engine.yml").read_text(encoding="utf-8"))
PRESET_BUCKET = PRESET["train_geo3k"]["rollout"]["server"]["bucket_bytes"]


@pytest.fixture
def rank_of_eight(tiny_policy, monkeypatch):
    """Weights of 8B that eight ranks share, on no device, as rank 0 collects them, and its calls of collectives."""
    if dist.is_initialized():
        dist.destroy_process_group()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=8)
    called = []
    try:
        ranks = Ranks(0, 8, None, "cpu")
        mesh, policy = (
            ranks.mesh(),
            dataclasses.replace(tiny_policy, model=empty_model(published_config("8B"), "sdpa", torch.float32)),
        )
        shard_modules(policy.network.language, policy.network.vision, mesh)
        monkeypatch.setattr(backends, "shard_policy", lambda given, mesh, **options: policy)  # which would allocate it
        backend = backends.TorchBackend(dataclasses.replace(policy), OptimizerOptions(), 1.0, ranks, mesh)
        for name in ("all_to_all_single", "send", "recv", "all_reduce", "broadcast", "all_gather_single"):
            monkeypatch.setattr(dist, name, lambda *given, name=name: called.append(name))
        yield backend.weight_source(), called
    finally:
        monkeypatch.undo()
        dist.destroy_process_group()


@pytest.mark.parametrize("way", ["group", "ipc"])
def test_what_8b_writes_and_calls_on_eight_ranks_for_eight_servers(monkeypatch, rank_of_eight, way):
    """Each byte once to a server, not 4/3 and that for each of its processes; rank 0 received 5,250 parts before."""
    source, called = rank_of_eight
    source = source.cast(dict.fromkeys(source.specs, "bfloat16"))
    clients = [Counter(f"http://127.0.0.1:{number}") for number in range(1, 9)]
    sent = []

    class Counted(Group):
        def broadcast(self, flat):
            called.append("to servers")
            sent.append(flat.nbytes * len(clients))

    monkeypatch.setattr(sender, "UpdateGroup", Counted)
    monkeypatch.setattr(Group, "broken", False)
    monkeypatch.setattr(sender, "put_on_gpu", lambda flat: flat)
    monkeypatch.setattr(sender, "Handle", lambda flat: ("handle", flat.nbytes))
    update = WeightUpdate(dict.fromkeys(clients, 1), ServerOptions(bucket_bytes=PRESET_BUCKET), way)
    asyncio.run(update.send(source, "1-tag"))
    assert not update.faults
    whole = sum(spec.bytes for spec in source.specs.values())
    written = sum(sent) + sum(client.written for client in clients)
    assert whole > 17.5e9 and len(source.specs) == 750
    assert written <= {"group": 1.001 * whole * len(clients), "ipc": 2e6}[way]
    expected = {"all_to_all_single": 33, **({"to servers": 33} if way == "group" else {})}
    assert dict(collections.Counter(called)) == expected


class RanksElsewhere:
    """In place of ranks with GPUs in a Ray cluster, of which there are none here: it notes what it is asked."""

    size, drives_a_rank = 4, False

    def __init__(self):
        self.asked = []

    def call_all(self, method, *given):
        return self.call_each(method, [given] * self.size)

    def call_each(self, method, given):
        if method != "sender.pack_handles":
            self.asked.append((method, given[0]))
            return [None] * self.size
        self.asked.append((method, [counts for _, counts in given]))
        return [{url: [[b""]] * count for url, count in counts.items()} for _, counts in given]


@pytest.mark.parametrize("numbers", [[0, 1], [1]])
def test_a_server_opens_memory_of_its_own_first_rank(numbers):
    """Of two GPUs each; a server that comes back alone keeps its number."""
    clients = {number: Counter(f"http://10.0.0.{number}:1") for number in numbers}
    ranks = RanksElsewhere()
    source = dataclasses.replace(source_of(named_tensors([2, 3])), sender=partial(RankSender, ranks))
    update = WeightUpdate(dict.fromkeys(clients.values(), 2), ServerOptions(tensor_parallel=2), "ipc", numbers)
    asyncio.run(update.send(source, "1-tag"))
    assert not update.faults
    assert [method for method, _ in ranks.asked].count("sender.leave") == 1
    assert ("open_sender", ([2 * number for number in numbers],)) in ranks.asked
    given = [{clients[rank // 2].url: 2} if rank in (0, 2) and rank // 2 in clients else {} for rank in range(4)]
    assert ("sender.pack_handles", given) in ranks.asked


def test_a_refusal_ends_the_update(monkeypatch):
    monkeypatch.setattr(sender, "UpdateGroup", Group)
    client = OneServer("http://127.0.0.1:1", **{BROADCAST: [RequestRefused("no such weight")]})
    update = WeightUpdate({client: 1}, ServerOptions(), "group")
    with pytest.raises(RequestRefused, match="no such weight"):
        asyncio.run(update.send(source_of(named_tensors([2])), "1-tag"))
    assert client.heard[-1] == "destroy_weights_update_group"


@pytest.mark.parametrize("update", ["tensors", "disk"])
def test_weights_are_sent_where_they_or_their_version_are_new(tiny_policy, update):
    """The version too: the server names it with each token, and rows carry it."""
    server, current = WithoutModel(tiny_policy), {"state": ""}
    source = source_of(named_tensors([3, 1]), lambda: current["state"])
    try:
        with attached(tiny_policy, server.url, update=update) as engine:
            versions = []
            for state, version in (("a", 0), ("a", 0), ("a", 1), ("b", 1), ("b", 1), ("a", 1), ("a", 2), ("c", 3)):
                before, current["state"] = server.tag, state
                engine.update_weights(source, version)
                assert engine.version == int(server.tag.partition("-")[0]) == version
                versions += [version] if server.tag != before else []
            assert versions == [0, 1, 1, 1, 2, 3]
    finally:
        server.close()
