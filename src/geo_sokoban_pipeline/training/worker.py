"""A worker: the object that a process of a run holds, and whose methods are all that the driver can ask of it.

A rank has a group, a backend and perhaps a part of a reference policy; a rollout worker, which only rolls out, has none
of these. Every call carries its inputs; between calls a worker keeps its attributes and its engine alone.
"""

from __future__ import annotations

import gc
import os
import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.distributed import TCPStore
from torch.distributed.device_mesh import DeviceMesh

from geo_sokoban_pipeline.config.grpo import MegatronOptions, OptimizerOptions, TrainOptions
from geo_sokoban_pipeline.config.policy import PolicyOptions
from geo_sokoban_pipeline.config.server import ServerOptions
from geo_sokoban_pipeline.distributed.fsdp import device_of_mesh, move_shards, shard_policy
from geo_sokoban_pipeline.distributed.group import LOOPBACK, Group, join_group, open_rendezvous
from geo_sokoban_pipeline.distributed.slices import read_weights
from geo_sokoban_pipeline.grpo.loss import Objective, StepSize
from geo_sokoban_pipeline.policies.lora import Adapter
from geo_sokoban_pipeline.policies.policy import (
    Policy,
    allocate_weights,
    attach_adapter,
    device_of,
    empty_model,
    freeze_parameters,
    load_as,
    load_empty,
    store_in_compute_type,
)
from geo_sokoban_pipeline.progress import waiting
from geo_sokoban_pipeline.rollout.engines.base import RolloutEngine
from geo_sokoban_pipeline.rollout.engines.factory import build_engine
from geo_sokoban_pipeline.rollout.engines.sglang.sender import BucketSender
from geo_sokoban_pipeline.rollout.episode import EpisodeRequest, RolloutSettings
from geo_sokoban_pipeline.rollout.functions import STUCK
from geo_sokoban_pipeline.rollout.rollout import check_episodes, load_rollout_fn, rollout
from geo_sokoban_pipeline.training.backends.torch import GradientPass, PassSetting, TorchBackend
from geo_sokoban_pipeline.training.batch import TrainSample
from geo_sokoban_pipeline.training.demonstrations import Demonstrations, Demonstrator
from geo_sokoban_pipeline.training.runtime import PART_THRESHOLD, collect_garbage, limit_heap, prepare_process
from geo_sokoban_pipeline.trajectories.types import Trajectory

if TYPE_CHECKING:
    from geo_sokoban_pipeline.rollout.engines.sglang.servers import ServerPlace


class Worker:
    """The state of a process of a run; the driver calls its methods.

    Attributes:
        policy: this process's own.
        options: of the run.
        group: the ranks; None before `join`, and in a rollout worker.
        expert: makes demonstrations; None before `demonstrate`.
        backend: this rank's part of the training backend; None before `build_backend`.
        scorer: this rank's part of a reference policy; None before `build_scorer`.
        sender: of this rank's buckets of weights to servers; None before `open_sender`.
        rendezvous: where the ranks find each other, on rank 0 of a group; else None.
        loaded: folder that the weights of a rollout worker are from; None: it has none.
    """

    def __init__(self, policy: Policy, options: TrainOptions) -> None:
        self.policy, self.options = policy, options
        self.group: Group | None = None
        self.expert: Any = None
        self.backend: Any = None
        self.scorer: Any = None
        self.sender: BucketSender | None = None
        self.rendezvous: TCPStore | None = None
        self.loaded: Path | None = None
        self._lock = threading.Lock()
        self._supply: GroupSupply | None = None
        self._emit: Callable[[Any], None] = lambda item: None
        self._lost_servers: dict[tuple[int, int], Future[ServerPlace]] = {}

    @cached_property
    def engine(self) -> RolloutEngine:
        """This process's own engine, built at its first use."""
        return build_engine(self.policy, self.options.rollout)

    # The group.

    def open_rendezvous(self, size: int, host: str = LOOPBACK) -> int:
        """Serve the store through which the ranks find each other, on rank 0; returns its port."""
        self.rendezvous = open_rendezvous(size, host)
        return self.rendezvous.port

    def join(
        self,
        rank: int,
        size: int,
        port: int,
        device: str = "cpu",
        host: str = LOOPBACK,
        address: str | None = None,
    ) -> None:
        """Join the group of all ranks, and take over the weights of rank 0, unless the policy is empty.

        Args:
            host, port: of rank 0's store.
            address: of this rank's machine; None: all ranks are on one.
        """
        self.group = join_group(rank, size, port, device, host, address)
        if not self.policy.is_empty:
            self.policy.model.to(device)
            model = self.policy.model
            # Tied parameters once, in an order that is the same on every rank.
            self.group.broadcast([*(parameter.data for parameter in model.parameters()), *model.buffers()])

    def leave(self) -> None:
        """Leave the group."""
        group, store, self.group, self.rendezvous = self.group, self.rendezvous, None, None
        if group is not None:
            group.close()
        del store  # rank 0 serves it until its group is closed

    def read_weights(self, folder: Path) -> None:
        """Fill the model with the weights of a folder."""
        read_weights(dict(self.policy.model.named_parameters()), folder)

    # Training.

    def build_backend(self, folder: Path | None, options: OptimizerOptions, temperature: float) -> None:
        """Build this rank's part of a backend.

        Args:
            folder: from which a policy without weights is read; None: its own.
            options: optimizer and micro-batches.
            temperature: sampling temperature of the rollouts.
        """
        if folder is not None:
            self.policy.folder = folder
        self.backend = build_rank(self.policy, options, temperature, self.group, *self._layout)

    def build_scorer(self, folder: Path, options: OptimizerOptions, temperature: float) -> None:
        """Build this rank's part of a reference policy, or a whole one where none is sharded."""
        self.scorer = build_rank_scorer(folder, self.options.policy, options, temperature, self.group, *self._layout)

    def open_sender(self, owners: Sequence[int]) -> None:
        """Begin an update of servers, which get weights from some of the ranks."""
        self.sender = BucketSender(partial(self.backend.collect, owners=owners, device=self.backend.device))

    @property
    def _layout(self) -> tuple[Any, ...]:
        return self.options.sharding, self.options.replicas, self.options.megatron_layout

    def demonstrate(self, prompts: Sequence[dict[str, Any]], seed: int, purpose: str) -> None:
        """Make demonstrations of these prompts from now on; the steps of a warm start draw from them."""
        self.expert = Demonstrator(prompts, self.policy, self.options, seed, purpose)

    def step(
        self, batch: Sequence[TrainSample] | range, objective: Objective, learning_rate: float, size: StepSize | None
    ) -> dict[str, float]:
        """An optimizer step of all ranks, on this rank's samples, or on its numbers of demonstrations."""
        given = Demonstrations(batch, self.expert) if isinstance(batch, range) else batch
        return self.backend.step(given, objective, learning_rate, size)

    # Rollouts.

    def update_weights(self, version: int) -> None:
        """Drop everything computed with earlier weights; the weights now have this version."""
        self.engine.update_weights(None, version)
        collect_garbage(version)

    def free_caches(self) -> None:
        """Give up what the engine has computed, for an update; `update_weights` drops it in any case."""
        self.engine.offload()

    def rollout(self, tasks: Sequence[EpisodeRequest], settings: RolloutSettings, *watching: Any) -> list[Trajectory]:
        """Roll out episodes; returns their trajectories, in order.

        Args:
            watching: see `rollout`.
        """
        return load_rollout_fn(settings.rollout)(self.engine, self.policy, tasks, settings, *watching)

    def rollout_groups(
        self,
        emit: Callable[[Any], None],
        number: int,
        requests: Sequence[EpisodeRequest],
        settings: RolloutSettings,
        is_all: bool,
        is_streamed: bool,
    ) -> RolloutTimes:
        """Roll out whole groups; emits the trajectories of each.

        Args:
            number: of the rollout, which is that of `add_groups`.
            is_all: whether no further groups follow.
            is_streamed: whether each group is sent as it ends, not all of them at the end.
        """
        began, sent = time.perf_counter(), set[int]()
        supply = self._supply_of(number)
        supply.is_all = supply.is_all or is_all
        rollout_fn = load_rollout_fn(settings.rollout)

        def deliver(trajectories: Sequence[Trajectory]) -> None:
            """Send the groups that have not been sent."""
            for group, given in groupby(trajectories, key=lambda episode: episode.group_index):
                if group not in sent:
                    sent.add(group)
                    episodes = list(given)
                    if rollout_fn is not rollout:  # which may call a group complete that is not
                        wanted = [request for request in requests if request.group_index == group]
                        check_episodes(settings.rollout.function, wanted, episodes)
                    emit(episodes)

        def enough(complete: Sequence[Trajectory]) -> bool:
            deliver(complete)
            supply.look()
            return supply.is_stopped

        further: dict[str, Any] = {"supply": supply} if rollout_fn is rollout else {}
        watching = {"enough": enough, **further} if is_streamed else {}
        self._emit = emit
        deliver(rollout_fn(self.engine, self.policy, requests, settings, **watching))
        return RolloutTimes(
            busy=time.perf_counter() - began - supply.idle,
            stuck=sum(thread.name == STUCK for thread in threading.enumerate()),
        )

    def add_groups(self, number: int, requests: Sequence[EpisodeRequest], is_all: bool, is_stopped: bool) -> None:
        """Add groups to a rollout, while it goes on or before; ignored once it is over.

        Args:
            is_all: whether none follow.
            is_stopped: whether all that has not ended is aborted, so that none of these groups begins.
        """
        supply = self._supply_of(number)
        if supply.number == number:
            supply.inbox.put((requests, is_all, is_stopped))

    def _supply_of(self, number: int) -> GroupSupply:
        """Of a rollout; of the newest one where that is later."""
        with self._lock:
            if self._supply is None or self._supply.number < number:
                self._supply = GroupSupply(number)
            return self._supply

    def load_weights(self, folder: Path, version: int, device: str) -> None:
        """Fill the model of a rollout worker's engine with weights, unless it has read this folder before.

        Args:
            folder: which never changes; of its files those of weights are read.
            device: on which the engine computes.
        """
        if self.policy.is_empty:
            allocate_weights(self.policy, device)
        if self.loaded != folder:
            self.read_weights(folder)
            self.loaded = folder
        self.update_weights(version)

    def follow_servers(
        self,
        emit: Callable[[Any], None],
        options: ServerOptions,
        key: str | None,
        tag: str,
        version: int,
        places: Sequence[ServerPlace],
    ) -> None:
        """Sample from servers that the driver keeps; emits those that are lost.

        Args:
            options: of servers that are there.
            key: of the servers; None: they have none.
            tag: of their weights.
            places: where they are now.
        """
        from geo_sokoban_pipeline.rollout.engines.sglang.engine import FollowingEngine

        self._emit = emit
        with waiting():  # servers have limits of their own
            if "engine" not in vars(self):
                if options.api_key_variable is not None and key is not None:
                    os.environ[options.api_key_variable] = key  # on nodes whose environment lacks it
                self.engine = FollowingEngine(self.policy, options, places, self._report_lost)
            assert isinstance(self.engine, FollowingEngine)
            self.engine.follow(tag, version, places)
        collect_garbage(version)

    def move_server(self, server: int, life: int, place: ServerPlace) -> None:
        """Take where a server is that was lost in a life of it."""
        self._lost_servers.pop((server, life)).set_result(place)

    def _report_lost(self, server: int, life: int, reason: str) -> Future[ServerPlace]:
        future = self._lost_servers[server, life] = Future()
        self._emit(LostServer(server, life, reason))
        return future


@dataclass(frozen=True)
class LostServer:
    """Item of a stream: a server does not answer; `move_server` follows, once it does.

    Attributes:
        server: its number.
        life: of it, as the driver counts them.
        reason: what was seen.
    """

    server: int
    life: int
    reason: str


@dataclass(frozen=True)
class RolloutTimes:
    """Times of a rollout worker in a rollout.

    Attributes:
        busy: seconds in which it had something to roll out.
        stuck: environments that are left in a call that does not end.
    """

    busy: float
    stuck: int


class GroupSupply:
    """Further groups of a rollout, and the order to stop, as they come from the driver; see `Supply`.

    Attributes:
        inbox: requests, whether they are all, and whether the rollout stops.
        is_stopped: see `Supply`.
        is_all: whether no further groups follow.
        idle: seconds spent waiting.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        self.inbox: queue.SimpleQueue[tuple[Sequence[EpisodeRequest], bool, bool]] = queue.SimpleQueue()
        self.is_stopped = self.is_all = False
        self.idle = 0.0
        self._taken: list[EpisodeRequest] = []

    def take(self, *, wait: bool) -> list[EpisodeRequest]:
        began = time.perf_counter()
        with waiting():
            self.look(wait=wait)
        self.idle += time.perf_counter() - began
        taken, self._taken = self._taken, []
        return taken

    def look(self, *, wait: bool = False) -> None:
        """Read the messages that have come; requests are kept for `take`."""
        with suppress(queue.Empty):
            while True:
                requests, is_all, is_stopped = self.inbox.get(block=wait and not self._taken and not self.is_all)
                self._taken += requests
                self.is_all = self.is_all or is_all or is_stopped
                self.is_stopped = self.is_stopped or is_stopped


@dataclass(frozen=True)
class WorkerSpec:
    """Configuration, encoders and options from which a process builds its worker; rank 0 sends the weights as it joins.

    Attributes:
        config: configuration of the model.
        generation_config: of the model.
        attention, dtype: those of the driver's model.
        threads: of torch.
        is_empty: whether the policy has no weights, so that the rank reads its part from a folder.
        adapter: of the policy; None: it has none.
        gpu: number of the GPU on which its engine computes; None: it has none, or sees one alone.
    """

    config: Any
    generation_config: Any
    attention: str
    dtype: torch.dtype
    tokenizer: Any
    image_processor: Any
    options: TrainOptions
    threads: int
    is_empty: bool
    adapter: Adapter | None = None
    gpu: int | None = None

    @classmethod
    def of(cls, policy: Policy, options: TrainOptions) -> WorkerSpec:
        """Of the driver's policy, with as many threads as the driver has."""
        model = policy.model
        return cls(
            model.config,
            model.generation_config,
            model.config._attn_implementation,
            model.dtype,
            policy.tokenizer,
            policy.image_processor,
            options,
            torch.get_num_threads(),
            policy.is_empty,
            policy.adapter,
        )

    def __call__(self) -> Worker:
        """Build the worker, in its process."""
        prepare_process(self.threads)
        if self.gpu is not None:
            torch.cuda.set_device(self.gpu)
        worker = Worker(self.build_policy(), self.options)
        gc.collect()
        return worker

    def build_policy(self) -> Policy:
        """The worker's policy, without the driver's weights yet."""
        from transformers import AutoModelForImageTextToText

        if self.is_empty:
            model = empty_model(self.config, self.attention, self.dtype, self.generation_config)
        else:
            model = AutoModelForImageTextToText.from_config(
                self.config, attn_implementation=self.attention, dtype=self.dtype
            ).eval()
            model.generation_config = self.generation_config  # end tokens
        chosen = self.options.policy
        freeze_parameters(model, chosen.freeze)
        planned = device_of(chosen) if self.is_empty else None
        policy = Policy(model, self.tokenizer, self.image_processor, None, chosen.compute, planned)
        if self.adapter is not None:
            attach_adapter(policy, self.adapter)
        return policy


# A rank's part of a backend, and of a reference policy.


def build_rank(
    policy: Policy,
    options: OptimizerOptions,
    temperature: float,
    group: Group | None,
    sharding: str = "none",
    replicas: int = 1,
    megatron: MegatronOptions | None = None,
) -> TorchBackend:
    """The backend of a rank; a policy without weights is read from its folder.

    Args:
        options: optimizer and micro-batches.
        temperature: sampling temperature of the rollouts.
        group: the ranks. None: this process alone.
        sharding, replicas: see `TrainOptions`.
        megatron: layout of Megatron's ranks; None: PyTorch.
    """
    if megatron is not None:
        from geo_sokoban_pipeline.training.backends.megatron.backend import MegatronBackend

        assert group is not None
        limit_heap(PART_THRESHOLD)
        return MegatronBackend(policy, options, temperature, group, megatron)
    mesh = _mesh_of(group, sharding, replicas)
    if mesh is not None:
        limit_heap(PART_THRESHOLD)
    return TorchBackend(policy, options, temperature, group, mesh)


class ReferenceScorer:
    """A policy that is not trained, or a rank's part of it. Between calls it waits in the memory of the CPU.

    Args:
        passes: over the policy, which may wait for its first call already.

    Attributes:
        policy: whole, or this rank's part.
    """

    def __init__(self, passes: GradientPass) -> None:
        self._pass, self.policy, self._device = passes, passes.policy, passes.device
        move_shards(self.policy, "cpu")

    def log_probs(self, samples: Sequence[TrainSample]) -> list[np.ndarray]:
        """(M,) float32 log-probs of each sample's trained tokens."""
        move_shards(self.policy, self._device)
        try:
            return self._pass.log_probs(samples)
        finally:
            move_shards(self.policy, "cpu")


def build_rank_scorer(
    folder: Path,
    chosen: PolicyOptions,
    options: OptimizerOptions,
    temperature: float,
    group: Group | None = None,
    sharding: str = "none",
    replicas: int = 1,
    megatron: MegatronOptions | None = None,
) -> ReferenceScorer:
    """The reference policy of a rank: its part where the ranks share the weights, else a whole one.

    Args:
        folder: of the policy.
        chosen: how it is loaded.
        options, temperature, group, sharding, replicas, megatron: see `build_rank`.
    """
    if megatron is not None:
        from geo_sokoban_pipeline.training.backends.megatron.backend import build_parallel_pass

        assert group is not None
        return ReferenceScorer(build_parallel_pass(load_empty(chosen, folder), options, temperature, group, megatron))
    setting = PassSetting.of(options, temperature)
    mesh = _mesh_of(group, sharding, replicas)
    if mesh is not None:
        held = shard_policy(load_empty(chosen, folder), mesh, is_trained=False)
        return ReferenceScorer(GradientPass(held, setting, group, device_of_mesh(mesh)))
    # The device that computes gets the rounded weights alone.
    policy = load_as(chosen.model_copy(update={"device": "cpu"}), folder)
    store_in_compute_type(policy)
    return ReferenceScorer(GradientPass(policy, setting, device=torch.device(device_of(chosen))))


def _mesh_of(group: Group | None, sharding: str, replicas: int) -> DeviceMesh | None:
    """The mesh over which the weights are sharded; None: every rank has a copy, or is the only one."""
    return None if group is None or sharding == "none" or group.size == 1 else group.mesh(replicas)
