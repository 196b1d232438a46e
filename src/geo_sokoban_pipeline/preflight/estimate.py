"""Seconds of a training by count, before anything is started: predicted, not measured.

An iteration is a sum of phases. Passes over whole episodes take the time of their matrix products and then that of
their elementwise work; decoding takes the longer of reading memory and multiplying; what ranks exchange overlaps with
their passes. All episodes are taken as equally long: in a run the longest ones hold a rollout. The shares of a GPU's
peak are constants here, each with its source. `memory.py` plans the bytes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby
from typing import Any

from geo_sokoban_pipeline.config.grpo import TrainOptions
from geo_sokoban_pipeline.config.policy import PolicyOptions
from geo_sokoban_pipeline.config.study import EstimatePipelineOptions
from geo_sokoban_pipeline.formats import size
from geo_sokoban_pipeline.preflight.memory import (
    MEMORY_SHARE,
    SERVER_SHARE,
    Gpu,
    MemoryPlace,
    RankPlan,
    cache_bytes,
    compute_bytes,
    gathered_bytes,
    held_bytes,
    least_server_bytes,
    place_on_gpus,
    plan_run,
    server_value_bytes,
    summed_bytes,
    tensor_ranks,
)
from geo_sokoban_pipeline.preflight.model import ModelShape, PartSize, inspect_model
from geo_sokoban_pipeline.preflight.own_code import EpisodeShape
from geo_sokoban_pipeline.preflight.published_sizes import PUBLISHED, published_config, published_name


class EstimateError(ValueError):
    """A run that cannot be counted; the text has the way out."""


@dataclass(frozen=True)
class GpuKind:
    """Data sheet of a GPU.

    Attributes:
        memory: bytes.
        products, float32: dense operations a second, in bfloat16 and in float32.
        bandwidth: bytes a second of its memory.
        link: bytes a second to another GPU of its node, in one direction.
    """

    memory: float
    products: float
    float32: float
    bandwidth: float
    link: float


# NVIDIA's data sheets: A100 80GB SXM, H100 SXM, H200 SXM (NVLink); Ada architecture white paper, L40S (PCIe 4.0 × 16).
GPUS = {
    "A100": GpuKind(80e9, 312e12, 19.5e12, 2.039e12, 300e9),
    "H100": GpuKind(80e9, 989.5e12, 66.9e12, 3.35e12, 450e9),
    "H200": GpuKind(141e9, 989.5e12, 66.9e12, 4.8e12, 450e9),
    "RTX 4090": GpuKind(24e9, 165.2e12, 82.6e12, 1.008e12, 32e9),
    "L40S": GpuKind(48e9, 362e12, 91.6e12, 0.864e12, 32e9),
}

# Measured on an H200 (docs/gpu.md): an update of 2B has 471·10¹² operations, those of checkpointing counted, in 0.62 s
# of matrix products and attention.
PRODUCTS_SHARE = 0.77
# The rest of its 1.73 s moves 2.3 TB at 4.8 TB/s: elementwise work, casts, and the gaps between kernels.
TRAFFIC_SHARE = 0.43
# Bytes per token, layer and channel, forward and backward: 1.77 MB of 11,264 channels, counted at 2B's widths.
_TRAFFIC = 157
# Of the bandwidth, where a server reads weights and cache: assumed, copies on an H100 reach 2.8 of 3.35 TB/s.
DECODE_SHARE = 0.8
_SERVER_STEP = 1e-3  # seconds of a server's scheduler for a token: assumed
_EAGER_LAYER = 1.74e-3  # seconds of a layer for a token in the engine `transformers`: 25.0 s of 512 steps on that H200
_PINNED = 50e9  # bytes a second between GPU and CPU, measured there
_ADDED = 1.6e9  # bytes a second of gradients that are copied and added in the memory of the CPU: of 19.9 s there
_CPU_ADAMW = 1.5e9  # weights a second of 16 cores, measured there
_ADAMW_BYTES = 28  # per weight: weight, gradient and moments in, all but the gradient out
_NODE = 8  # GPUs
_NETWORK = 50e9  # bytes a second and GPU between nodes, in one direction: assumed, 400 Gbit/s each
# Seconds a GB of weights on their way to servers (docs/benchmarks.md and the measurements behind it, on CPUs): encoded
# once, sent to one server after the other, loaded by all at the same time.
_ENCODED, _SENT, _LOADED = 2.2, 1.33, 6.5
_BY_DISK, _BY_GLOO = 4.0, 2.5
_GROUP_START = 2.0  # seconds until a group of nccl stands: assumed
_BUCKET = 0.1  # seconds in which servers take a bucket that is on a GPU, beside its copies: assumed
# Bytes a second of a checkpoint: of a process, which takes digests (0.93 GB a CPU-second, beside 2.2 written, measured
# on a CPU); of the disk for all of them: assumed.
_WRITTEN, _DISK = 0.65e9, 3e9
# Seconds of the driver for a response of a server (JSON), and for a patch (an image is cut twice), measured on a CPU.
_RESPONSE, _PATCH = 1.8e-3, 47e-6


@dataclass(frozen=True)
class Load:
    """The tokens and images of a forward pass.

    Attributes:
        pieces: new tokens of each sequence, and tokens before them that have passed already.
        scored: tokens whose logits are made.
        patches: of an image.
        images: of that size.
    """

    pieces: Sequence[tuple[float, float]] = ()
    scored: float = 0
    patches: float = 0
    images: float = 0

    @property
    def tokens(self) -> float:
        """New tokens of all sequences."""
        return sum(new for new, _ in self.pieces)


def layer_weights(text: Any, experts: float = 0) -> float:
    """Weights of a decoder layer's matrices that are read for some tokens.

    Args:
        experts: of a mixture, so many of them; without one the MLP is read whole.
    """
    hidden = text.hidden_size
    attention = 2 * hidden * text.head_dim * (text.num_attention_heads + text.num_key_value_heads)
    if experts:
        return attention + hidden * text.num_experts + experts * 3 * hidden * text.moe_intermediate_size
    return attention + 3 * hidden * text.intermediate_size


def forward_flops(config: Any, load: Load) -> float:
    """Multiplications and additions of a forward pass: two per weight of every matrix and token, and attention.

    Attention of the language model is causal: a new token meets those before it and half of the new ones. That of an
    image is not. The output layer counts for the scored tokens alone; the patch embedding is left out.
    """
    text, vision = config.text_config, config.vision_config
    weights = layer_weights(text, getattr(text, "num_experts_per_tok", 0)) * text.num_hidden_layers
    pairs = sum(new * (before + new / 2) for new, before in load.pieces)
    width = text.num_attention_heads * text.head_dim * text.num_hidden_layers
    language = 2 * weights * load.tokens + 4 * pairs * width + 2 * load.scored * text.vocab_size * text.hidden_size
    wide = vision.spatial_merge_size**2 * vision.hidden_size
    block = vision.hidden_size * (4 * vision.hidden_size + 2 * vision.intermediate_size)
    merger = (1 + len(vision.deepstack_visual_indexes)) * wide * (wide + text.hidden_size)
    patch = 2 * (block * vision.depth + merger / vision.spatial_merge_size**2)
    patch += 4 * load.patches * vision.hidden_size * vision.depth
    return float(language + load.images * load.patches * patch)


def forward_traffic(config: Any, load: Load) -> float:
    """Bytes of elementwise work in a forward pass: a third of those of forward and backward pass."""
    text, vision = config.text_config, config.vision_config
    channels = text.hidden_size + text.head_dim * (text.num_attention_heads + text.num_key_value_heads)
    if chosen := getattr(text, "num_experts_per_tok", 0):
        channels += chosen * (text.hidden_size + text.moe_intermediate_size)
    else:
        channels += text.intermediate_size
    tower = (3 * vision.hidden_size + vision.intermediate_size) * vision.depth * load.patches * load.images
    return float(_TRAFFIC / 3 * (channels * text.num_hidden_layers * load.tokens + tower))


def decode_step(config: Any, rows: float, context: float, gpu: GpuKind, gpus: int, value: int = 2) -> float:
    """Seconds of one token of each row: the longer of reading weights and caches, and of multiplying.

    Args:
        rows: sequences that are decoded at the same time.
        context: tokens of a sequence so far.
        gpus: that share each matrix.
        value: bytes of a weight, and of a value of the cache.
    """
    text = config.text_config
    # Each token of the batch chooses its experts: so many of them are chosen by one token at least.
    count = getattr(text, "num_experts", 0)
    read = count and count * (1 - (1 - text.num_experts_per_tok / count) ** rows)
    weights = layer_weights(text, read) * text.num_hidden_layers + text.vocab_size * text.hidden_size
    bytes_read = weights * value + rows * context * cache_bytes(text, value)
    operations = rows * forward_flops(config, Load([(1, context)], 1))
    speed = gpu.products if value == 2 else gpu.float32
    return max(bytes_read / (gpu.bandwidth * DECODE_SHARE), operations / (speed * PRODUCTS_SHARE)) / gpus


def episode_shape(options: TrainOptions, settings: EstimatePipelineOptions) -> EpisodeShape:
    """Tokens and patches of an episode; `response` is that of each turn, within the limits of the run.

    Raises:
        EstimateError: neither the settings nor a limit of the run give the tokens of a response.
    """
    rollout, turns = options.rollout, turns_of(options, settings)
    seen = (turns - 1) * settings.observation
    budget, context = rollout.max_response_tokens, rollout.max_context_tokens
    limits = (
        settings.response,
        rollout.max_tokens_per_turn,
        None if budget is None else (budget - seen) // turns,
        None if context is None else (context - settings.prompt - seen) // turns,
    )
    known = [limit for limit in limits if limit is not None]
    if not known:
        raise EstimateError("nothing limits a response: give estimate_<task>.response, in tokens")
    merged = settings.patches // 4
    lengths = (settings.prompt, settings.observation, max(min(known), 1))
    return EpisodeShape(*lengths, settings.patches if settings.images != 0 else 0, merged, 0, settings.images)


def turns_of(options: TrainOptions, settings: EstimatePipelineOptions) -> int:
    """Responses of an episode."""
    return min(settings.turns or options.rollout.max_turns, options.rollout.max_turns)


@dataclass(frozen=True)
class Estimate:
    """A run on GPUs of one kind, by count.

    Attributes:
        options: of the run.
        model: that is trained.
        gpu: on which ranks and servers compute.
        shape: of an episode.
        turns: responses of an episode.
        images: of an episode.
    """

    options: TrainOptions
    model: ModelShape
    gpu: GpuKind
    shape: EpisodeShape
    turns: int
    images: int

    @classmethod
    def of(cls, options: TrainOptions, settings: EstimatePipelineOptions, model: ModelShape) -> Estimate:
        """Of a run.

        Raises:
            EstimateError: nothing gives the tokens of a response.
        """
        turns, shape = turns_of(options, settings), episode_shape(options, settings)
        # One of the prompt, and one of each observation.
        images = (turns if shape.patches else 0) if settings.images is None else settings.images
        return cls(options, model, GPUS[settings.gpu], shape, turns, images)

    @property
    def episodes(self) -> int:
        """Of an iteration."""
        return self.options.grpo.groups * self.options.grpo.group_size

    @property
    def sampled(self) -> int:
        """Sampled tokens of an episode."""
        return self.turns * self.shape.response

    @property
    def length(self) -> int:
        """Tokens of an episode."""
        return self.shape.prompt + self.sampled + (self.turns - 1) * self.shape.observation

    @property
    def distinct(self) -> float:
        """Images of an episode, that of the prompt divided among its group."""
        return max(self.images - 1, 0) + min(self.images, 1) / self.options.grpo.group_size

    @property
    def samplers(self) -> tuple[int, int]:
        """Number of engines, and GPUs of each."""
        rollout = self.options.rollout
        if rollout.engine == "transformers":
            return rollout.workers or self.options.processes, 1
        server = rollout.server
        return len(server.urls) if server.mode == "attach" else server.count, server.tensor_parallel

    @property
    def gpus(self) -> int:
        """GPUs of the run, without those of servers that run already."""
        options, (engines, each) = self.options, self.samplers
        ranks = options.processes
        if options.rollout.engine == "transformers":
            return ranks + (options.rollout.workers or 0)
        server = options.rollout.server
        if server.mode == "attach" or server.device == "cpu":
            return ranks
        if options.placement == "ray":  # it assigns them
            return ranks if server.colocated else ranks + engines * each
        return max(ranks, server.first_gpu + engines * each)

    @property
    def seconds(self) -> dict[str, float]:
        """Seconds of an iteration by phase, those of validations and checkpoints spread over the iterations."""
        options, loop = self.options, self.options.loop
        prefill, decode = self._rollout(self.options.grpo.groups, self.options.grpo.group_size)
        validated = 2 * sum(self._rollout(loop.eval_prompts or 0, 1)) if loop.eval_interval else 0.0
        score = self._score()
        found = {
            "rollout: prefill": prefill,
            "rollout: decode": decode,
            "scoring: old log-probs": score if options.grpo.old_log_probs == "recompute" else 0.0,
            "scoring: reference policy": score if options.grpo.needs_reference else 0.0,
            "training step": self._steps(self.episodes * options.grpo.passes, self._step_episodes),
            "weights to the engines": self._weights(),
            "state off and onto the GPU": self._turns(),
            "validation": validated / max(loop.eval_interval, 1),
            "checkpoint": self._checkpoint() / loop.save_interval,
            "driver: images and responses": self._driver(),
        }
        return {name: seconds for name, seconds in found.items() if seconds}

    @property
    def iteration(self) -> float:
        """Seconds of an iteration; with `loop.max_staleness` the next rollout overlaps with the rest."""
        found = self.seconds
        rollout = sum(seconds for name, seconds in found.items() if name.startswith("rollout"))
        rest = sum(found.values()) - rollout
        return max(rollout, rest) if self.options.loop.max_staleness else rollout + rest

    @property
    def hours(self) -> float:
        """Hours of the run: its warm start and its iterations, without the evaluation at the end."""
        warm = self.options.warm_start
        demonstrated = self._steps(warm.steps * warm.episodes_per_step, warm.episodes_per_step) if warm.steps else 0.0
        return (demonstrated + self.options.loop.iterations * self.iteration) / 3600

    @property
    def _step_episodes(self) -> int:
        grpo = self.options.grpo
        return min(grpo.groups_per_step or grpo.groups, grpo.groups) * grpo.group_size

    @property
    def _speed(self) -> float:
        """Operations a second of matrix products in a pass."""
        gpu, policy = self.gpu, self.options.policy
        return (gpu.products if compute_bytes(policy) == 2 else gpu.float32) * PRODUCTS_SHARE

    def _pass(self, products: float, traffic: float) -> float:
        return products / self._speed + traffic / (self.gpu.bandwidth * TRAFFIC_SHARE)

    def _forward(self, load: Load) -> float:
        config = self.model.config
        return self._pass(forward_flops(config, load), forward_traffic(config, load))

    def _rollout(self, groups: int, size: int) -> tuple[float, float]:
        """Seconds of prefill and decode: of an engine, while all of them compute."""
        shape, (engines, each) = self.shape, self.samplers
        episodes, options = groups * size, self.options
        is_eager = options.rollout.engine == "transformers"
        # A prompt is prefilled once for its group; servers cannot share what they have read.
        prompts = groups if is_eager else min(episodes, groups * engines)
        later = episodes * (self.turns - 1)
        prompt = Load([(shape.prompt, 0)], 1, shape.patches, min(self.images, 1))
        further = max(self.images - 1, 0) / max(self.turns - 1, 1)
        observation = Load([(shape.observation, self.length / 2)], 1, shape.patches, further)
        prefill = (prompts * self._forward(prompt) + later * self._forward(observation)) / (engines * each)
        most = options.rollout.max_conversations if is_eager else min(options.rollout.server.concurrency, self.seats)
        here = episodes / engines
        rows = max(min(here, most), 1.0)
        value = compute_bytes(options.policy) if is_eager else server_value_bytes(self.options)
        context = (shape.prompt + self.length) / 2
        step = decode_step(self.model.config, rows, context, self.gpu, each, value)
        layers = self.model.config.text_config.num_hidden_layers
        step = max(step, _EAGER_LAYER * layers) if is_eager else step + _SERVER_STEP
        return prefill, (self.sampled * step * max(here / rows, 1.0) if episodes else 0.0)

    @property
    def seats(self) -> int:
        """Episodes whose keys and values a server's cache holds; one at least."""
        server, value = self.options.rollout.server, server_value_bytes(self.options)
        room = (server.memory_fraction or SERVER_SHARE) * self.gpu.memory * server.tensor_parallel
        tokens = (room - value * self.model.parameters) / cache_bytes(self.model.config.text_config, value)
        tokens = min(tokens, server.max_total_tokens or math.inf)
        return max(int(tokens / self.length), 1)

    def _share(self, episodes: float, of_step: float) -> float:
        """Episodes of the rank with the most of them; ranks that split matrices share theirs."""
        groups = self.options.processes // tensor_ranks(self.options)
        return episodes / of_step * math.ceil(of_step / groups)

    @property
    def _load(self) -> Load:
        return Load([(self.length, 0)], self.sampled, self.shape.patches, self.distinct)

    def _score(self) -> float:
        """Seconds of log-probs of all sampled tokens."""
        share = self._share(self.episodes, self.episodes)
        batches = self._batches(share)
        shared = batches * self._gather_seconds[0] + share * self._layer_exchange(2)
        return max(share * self._forward(self._load) / tensor_ranks(self.options), shared) + batches * self._fetch

    def _steps(self, episodes: float, of_step: float) -> float:
        """Seconds of the optimizer steps over some episodes.

        A backward pass multiplies twice as much as a forward pass, less for weights that are not trained; with
        checkpointing a forward pass of all layers is added.

        Args:
            of_step: episodes of one step.
        """
        options, config, model = self.options, self.model.config, self.model
        optimizer, share = options.optimizer, self._share(episodes, of_step)
        again = int(optimizer.gradient_checkpointing)
        language = Load(self._load.pieces, self.sampled)
        layers = Load(language.pieces)
        products = forward_flops(config, language) * (2 + _trained(model.layers))
        products += again * forward_flops(config, layers)
        traffic = forward_traffic(config, layers) * (3 + again)
        if self.images:
            tower = Load(patches=self.shape.patches, images=self.distinct)
            patches = share * of_step / episodes * self.distinct * self.shape.patches  # of a rank in a step
            twice = optimizer.vision_patches is not None and patches > optimizer.vision_patches
            passes = 1 + twice + (again + 1 + _trained(model.vision) if model.vision.trained else 0)
            products += forward_flops(config, tower) * passes
            traffic += forward_traffic(config, tower) * passes
        steps, batches = episodes / of_step, self._batches(share)
        # The backward pass gathers its weights anew.
        shared = batches * sum(self._gather_seconds) + share * self._layer_exchange(4 + 2 * again)
        reduced = batches if optimizer.gradient_sync == "micro_batch" else steps
        shared += reduced * self._reduce_seconds
        computed = share * self._pass(products, traffic) / tensor_ranks(options)
        trained = model.trained / (self._shards * tensor_ranks(options))
        if optimizer.offload:
            # The first gradients of a step are copied to pinned memory, all others are added there.
            added = max(reduced - steps, 0.0) * model.value_bytes * trained / _ADDED
            return max(computed, shared) + 2 * batches * self._fetch + added + steps * trained / _CPU_ADAMW
        return max(computed, shared) + steps * trained * _ADAMW_BYTES / (self.gpu.bandwidth * DECODE_SHARE)

    @property
    def _fetch(self) -> float:
        """Seconds in which a rank takes its weights from the memory of the CPU, if they are there."""
        is_there = self.options.optimizer.offload
        return self.model.value_bytes * self.model.parameters / self._shards / _PINNED if is_there else 0.0

    def _batches(self, share: float) -> float:
        """Micro-batches of some episodes of a rank."""
        return max(share / max(self.options.optimizer.max_tokens // self.length, 1), 1.0)

    @property
    def _shards(self) -> int:
        """Ranks that share the weights of a copy, those that split matrices apart."""
        options = self.options
        return options.processes // options.replicas // tensor_ranks(options) if options.shares_weights else 1

    def _link(self, ranks: int) -> float:
        """Bytes a second between so many ranks with neighbouring numbers."""
        return self.gpu.link if ranks <= _NODE else min(self.gpu.link, _NETWORK)

    @property
    def _gather_seconds(self) -> tuple[float, float]:
        """Seconds in which each rank gets the weights of a forward pass, and of a backward pass, the tower's with each.

        A ring moves (n − 1) / n of them.
        """
        options, model, shards, ranks = self.options, self.model, self._shards, tensor_ranks(self.options)
        tower, link = held_bytes(options, model, model.vision), self._link(shards * ranks)
        forward, backward = (
            (language + tower) / ranks * (shards - 1) / shards / link for language in gathered_bytes(options, model)
        )
        return forward, backward

    @property
    def _reduce_seconds(self) -> float:
        """Seconds in which the ranks add their gradients: shared out among shards, then added over copies."""
        options, shards = self.options, self._shards
        groups = options.processes // tensor_ranks(options)
        copies, whole = groups // shards, summed_bytes(options, self.model, self.model.vision) / tensor_ranks(options)
        between = 2 * whole / shards * (copies - 1) / copies / self._link(options.processes)
        return whole * (shards - 1) / shards / self._link(shards * tensor_ranks(options)) + between

    def _layer_exchange(self, sums: int) -> float:
        """Seconds an episode in which ranks that split matrices add activations of a layer, so many times.

        A sum moves each of (tokens, hidden) values twice.
        """
        text, ranks = self.model.config.text_config, tensor_ranks(self.options)
        values = self.length * text.hidden_size * text.num_hidden_layers * compute_bytes(self.options.policy)
        return sums * 2 * values * (ranks - 1) / ranks / self._link(ranks)

    def _weights(self) -> float:
        """Seconds in which all engines get the weights of an iteration."""
        options, (engines, each) = self.options, self.samplers
        if options.rollout.engine == "transformers":
            if options.rollout.workers:
                return compute_bytes(options.policy) * self.model.parameters / 1e9 * _BY_DISK
            return self._gather_seconds[0] if options.shares_weights or options.optimizer.offload else 0.0
        sent = server_value_bytes(options) * self.model.parameters
        takes_turns, gpu = options.rollout.takes_turns, self.gpu
        # Servers in turns share a GPU with the sender, and a trainer ahead sends weights from the memory of the CPU.
        by_gloo = takes_turns or options.loop.max_staleness
        taken = sent / options.rollout.server.bucket_bytes * _BUCKET
        by_group = sent / 1e9 * _BY_GLOO if by_gloo else _GROUP_START + sent / self._link(self.gpus) + taken
        held = self.model.value_bytes * self.model.parameters / self._shards / tensor_ranks(options)
        collected = held / _PINNED * (takes_turns or options.optimizer.offload) + sent / (
            gpu.link if self._shards > 1 else gpu.bandwidth
        )
        ways = {
            "tensors": sent / 1e9 * (_ENCODED + _SENT * engines * each + _LOADED),
            "disk": sent / 1e9 * _BY_DISK,
            "group": by_group,
            "ipc": collected + sent / gpu.link + taken,
        }
        server = options.rollout.server
        return ways[server.way(on_gpu=server.colocated if options.places_servers else options.policy.device != "cpu")]

    def _turns(self) -> float:
        """Seconds in which weights and moments of a rank leave the GPU that servers share, and come back."""
        if not self.options.rollout.takes_turns or self.options.optimizer.offload:
            return 0.0
        model, shards = self.model, self._shards
        weights = sum(held_bytes(self.options, model, part) for part in (model.layers, model.root, model.vision))
        state = (weights + 2 * model.value_bytes * model.trained) / shards / tensor_ranks(self.options)
        return 2 * state / _PINNED

    def _driver(self) -> float:
        is_served = self.options.rollout.engine == "sglang"
        return self.episodes * (is_served * self.turns * _RESPONSE + self.distinct * self.shape.patches * _PATCH)

    def _checkpoint(self) -> float:
        """Seconds of a checkpoint: weights (of an adapter those alone) and moments, in a folder that all ranks see."""
        model, is_adapted = self.model, self.options.policy.adapter is not None
        weights = model.trained if is_adapted else model.parameters
        writers = self.options.processes if self.options.shares_weights else 1
        return model.value_bytes * (weights + 2 * model.trained) / min(writers * _WRITTEN, _DISK)


def plan_memory(estimate: Estimate) -> tuple[RankPlan, list[MemoryPlace]]:
    """Bytes of a rank, and of each GPU with the ranks and servers that lie on it, by the plan of the pre-flight.

    Without the prompts of validations and evaluations whose number is not given: they need the data.
    """
    options, model, server = estimate.options, estimate.model, estimate.options.rollout.server
    counts = {"validation": options.loop.eval_prompts or 0, "evaluation": options.evaluation.prompts or 0}
    rank, worker = plan_run(options, model, estimate.shape, **counts, on_gpu=True)
    if options.placement == "ray" and not server.colocated:  # it gives servers the GPUs that ranks leave
        changes = {"server": server.model_copy(update={"first_gpu": options.processes})}
        options = options.model_copy(update={"rollout": options.rollout.model_copy(update=changes)})
    least = least_server_bytes(options, model, estimate.length)
    gpu = Gpu(int(estimate.gpu.memory), int(estimate.gpu.memory))
    places = place_on_gpus(options, rank, [gpu] * estimate.gpus, worker, least)
    return rank, [place for place in places if place.users]


def judge(places: Sequence[MemoryPlace], host: int) -> dict[str, Any]:
    """Whether a run fits, bytes that are lacking, and one line about the GPU with the least room.

    Args:
        host: bytes of a node's ranks in the memory of its CPU. No data sheet of a GPU has the size of that memory.
    """
    place = min(places, key=lambda one: MEMORY_SHARE * one.free - one.total)
    room = int(MEMORY_SHARE * place.free) - place.total
    users = (" or " if place.is_shared else " + ").join(f"{name} {size(count)}" for name, count in place.users.items())
    text = f"{place.name} takes {size(place.total)} ({users}) of {size(place.free)}, of which it may take 90 %"
    text += f"; a node's ranks take {size(host)} of the CPU's memory"
    verdict = f"fits: {text}" if room >= 0 else f"does not fit, by {size(-room)}: {text}"
    return {"fits": room >= 0, "lacking": max(-room, 0), "verdict": verdict}


def describe_run(run: str, options: TrainOptions, settings: EstimatePipelineOptions) -> dict[str, Any]:
    """The estimate of a run as JSON values: seconds by phase, hours, bytes by GPU, price, verdict.

    Raises:
        EstimateError: the model's size is not known here, or nothing gives the tokens of a response.
    """
    name, model = _find_model(options, settings)
    estimate = Estimate.of(options, settings, model)
    rank, places = plan_memory(estimate)
    price, of_node = settings.gpu_hour_price, min(options.processes, _NODE)
    return {
        "run": run,
        "is_predicted": True,
        "model": name,
        "gpu": settings.gpu,
        "gpus": estimate.gpus,
        "episodes": estimate.episodes,
        "tokens": {"of an episode": estimate.length, "of them sampled": estimate.sampled},
        "seconds": estimate.seconds,
        "iteration": estimate.iteration,
        "iterations": options.loop.iterations,
        "hours": estimate.hours,
        "price": None if price is None else price * estimate.gpus * estimate.hours,
        "memory": {place.name: {"total": place.total, "free": place.free, "users": place.users} for place in places},
        "rank": {"phase": rank.phase, "peak": rank.total, "parts": rank.parts, "host": rank.host},
        **judge(places, of_node * sum(rank.host.values())),
    }


def rows_of(found: dict[str, Any]) -> list[tuple[str, str, str]]:
    """Cells to print of what `describe_run` gives."""
    whole, rank = found["iteration"], found["rank"]
    tokens = ", ".join(f"{count:,} {name}" for name, count in found["tokens"].items())
    rows = [("iteration", "episodes", f"{found['episodes']:,}; tokens: {tokens}")]
    rows += [("", name, f"{seconds:,.1f} s") for name, seconds in found["seconds"].items()]
    rows.append(("", "all", f"{whole:,.1f} s"))
    rows.append(("run", f"{found['iterations']:,} iterations", f"{found['hours']:,.1f} h"))
    if found["price"] is not None:
        rows.append(("", "price", f"{found['price']:,.0f} for {found['gpus']} GPUs"))
    text = f"at most {size(rank['peak'])}, in the phase `{rank['phase']}`"
    rows.append(("memory", "a rank", f"{text}; {size(sum(rank['host'].values()))} in the CPU's memory"))
    sizes = {name: f"{size(place['total'])} of {size(place['free'])}" for name, place in found["memory"].items()}
    for text, group in groupby(sizes, key=lambda name: sizes[name]):
        first, *others = group
        rows.append(("", f"{first} to {others[-1].removeprefix('GPU ')}" if others else first, text))
    return [*rows, ("verdict", "", found["verdict"])]


def _find_model(options: TrainOptions, settings: EstimatePipelineOptions) -> tuple[str, ModelShape]:
    """Name and shape of the model that is counted; the hub is not asked.

    Raises:
        EstimateError: its size is not known here.
    """
    policy = options.policy
    name = settings.model or (published_name(policy.path or "") if policy.source == "hub" else None)
    if name is not None:
        return name, _published_shape(policy, name)
    if policy.source == "hub":
        raise EstimateError(
            f"{options.task}: policy.path={policy.path} is none of the published models ({', '.join(PUBLISHED)}); give "
            "one of about its size as estimate_<task>.model"
        )
    _, model = inspect_model(policy)
    if model is None:
        raise EstimateError(f"policy.path={policy.path}: its files cannot be used; check_<task> has the reason")
    return policy.path or policy.source, model


@lru_cache(8)  # a table of several runs has few models
def _published_shape(policy: PolicyOptions, name: str) -> ModelShape:
    return ModelShape.of(policy, published_config(name))


def _trained(part: PartSize) -> float:
    return part.trained / part.parameters
