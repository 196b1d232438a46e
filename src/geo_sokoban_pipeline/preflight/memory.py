"""Memory of a run by count: each rank at the peak of an update, and each GPU with the ranks and servers that lie on it.

A rank holds weights, gradients and moments at all times. The rollout, whose caches are freed after it, and the phases
of an update follow each other, so the largest of them is the peak: output head, decoder layers, vision tower, reference
policy, sum over the ranks. FSDP2 adds
to each the units that are gathered, and gradients that wait for the last micro-batch, which is the one that shards
them. `tests/preflight/test_memory_plan.py` compares the plan with what autograd and FSDP2 keep at Qwen3-VL's widths.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

from geo_sokoban_pipeline.config.grpo import OptimizerOptions, TrainOptions
from geo_sokoban_pipeline.config.policy import PolicyOptions
from geo_sokoban_pipeline.envs.inspection import Check
from geo_sokoban_pipeline.formats import size
from geo_sokoban_pipeline.preflight.checks import find_cases
from geo_sokoban_pipeline.preflight.model import ModelShape, PartSize
from geo_sokoban_pipeline.preflight.own_code import EpisodeShape

_LOGIT_COPIES = 2  # in float32, of a chunk
_FEW_LOGIT_COPIES = 6  # where at most a third of a chunk is trained


@dataclass(frozen=True)
class _Kept:
    """Bytes per channel of what a layer keeps.

    Attributes:
        residual: per channel of the residual stream, where a layer with gradient checkpointing keeps `stream` alone.
        inner: per channel of the MLP's inner width.
        heads: per channel of queries and of keys.
        expert, expert_inner: per expert of a token: channels of the residual stream and of the expert's inner width.
        block, block_inner: of a vision block, as `residual` and `inner`.
        merger: per channel of the vision tower, of each merger.
    """

    stream: int
    residual: int
    inner: int
    heads: int
    expert: int
    expert_inner: int
    block: int
    block_inner: int
    merger: int


_FLOAT32 = _Kept(4, residual=24, inner=16, heads=16, expert=8, expert_inner=16, block=40, block_inner=8, merger=16)
# bfloat16 products over float32 weights.
_MIXED = _Kept(4, residual=26, inner=8, heads=10, expert=4, expert_inner=8, block=24, block_inner=4, merger=10)
_HALF = _Kept(2, residual=16, inner=8, heads=10, expert=4, expert_inner=8, block=21, block_inner=4, merger=8)


def language_bytes(config: Any, policy: PolicyOptions, optimizer: OptimizerOptions, tokens: int) -> int:
    """Kept of the padded tokens of a micro-batch by the decoder layers until their backward pass."""
    text = config.text_config
    if optimizer.gradient_checkpointing:
        return int(tokens * text.num_hidden_layers * _kept(policy).stream * text.hidden_size)
    return text.num_hidden_layers * layer_bytes(config, policy, tokens)


def layer_bytes(config: Any, policy: PolicyOptions, tokens: int) -> int:
    """Kept of the padded tokens of a micro-batch by one decoder layer, as by the one that checkpointing runs again."""
    text, kept = config.text_config, _kept(policy)
    heads = (text.num_attention_heads + text.num_key_value_heads) * text.head_dim
    if experts := getattr(text, "num_experts_per_tok", 0):
        inner = experts * (kept.expert * text.hidden_size + kept.expert_inner * text.moe_intermediate_size)
    else:
        inner = kept.inner * text.intermediate_size
    return int(tokens * (kept.residual * text.hidden_size + inner + kept.heads * heads))


def vision_bytes(config: Any, policy: PolicyOptions, optimizer: OptimizerOptions, patches: int, largest: int) -> int:
    """Kept by the vision tower until its backward pass, with the block that checkpointing runs again.

    Args:
        patches: of the images of an optimizer step.
        largest: of the largest image.
    """
    if "visual" in policy.freeze:
        return 0
    vision, kept = config.vision_config, _kept(policy)
    patches = vision_patches(optimizer, patches, largest)
    block = kept.block * vision.hidden_size + kept.block_inner * vision.intermediate_size
    mergers = (1 + len(vision.deepstack_visual_indexes)) * kept.merger * vision.hidden_size
    if optimizer.gradient_checkpointing:
        return int(patches * (vision.depth * kept.stream * vision.hidden_size + block + mergers))
    return int(patches * (vision.depth * block + mergers))


def vision_patches(optimizer: OptimizerOptions, patches: int, largest: int) -> int:
    """Patches that pass the vision tower with one graph, of those of an optimizer step."""
    return patches if optimizer.vision_patches is None else min(patches, max(optimizer.vision_patches, largest))


def logit_bytes(config: Any, policy: PolicyOptions, optimizer: OptimizerOptions, tokens: int) -> int:
    """Logits of a micro-batch, whose tokens may all be trained, and the gradient of the output head in the making.

    Under an adapter the head has no gradient, and one of its own is in the compute type already.
    """
    text, wide = config.text_config, compute_bytes(policy)
    head, chunk = text.vocab_size * text.hidden_size, min(optimizer.logit_chunk, tokens)
    is_adapted = policy.adapter is not None
    rounded = 0 if policy.compute is None or (is_adapted and not config.tie_word_embeddings) else wide * head
    if 3 * tokens <= optimizer.logit_chunk:
        gradient = 0 if is_adapted else (4 + wide) * head
        return int(4 * text.vocab_size * _FEW_LOGIT_COPIES * tokens + gradient + rounded)
    # The gradient of the logits is made of them first; then it is multiplied into that of the head.
    logits = 4 * _LOGIT_COPIES * chunk * text.vocab_size
    if is_adapted:
        return int(rounded + logits)
    return int(4 * head + rounded + max(logits, wide * chunk * text.vocab_size + wide * head))


def compute_bytes(policy: PolicyOptions) -> int:
    """Bytes of a value that is computed."""
    return 4 if policy.dtype == "float32" and policy.compute is None else 2


def _kept(policy: PolicyOptions) -> _Kept:
    if policy.dtype != "float32":
        return _HALF
    return _FLOAT32 if policy.compute is None else _MIXED


_MEMORY = "memory"
# Interpreter, libraries and filled caches of a process: measured at the default size.
_PROCESS_BYTES = 600_000_000
_PATCH_BYTES = 768  # of an encoded patch, in uint8
# SGLang's own choice depends on the GPU; this is about its largest.
SERVER_SHARE = 0.9
_GATHERED_LAYERS = 2  # the one that computes, and the one that is fetched ahead
# Buffers of nccl's communicators on a rank: assumed, not measured.
_COMMUNICATOR_BYTES = 1_000_000_000
_CERTAIN = ("weights", "gradients", "optimizer moments")
MEMORY_SHARE = 0.9  # of the free memory: so much the plan may take
# CUDA contexts of a server and a trainer in turns, CUDA graphs and workspaces of the server, which no sleep frees:
# assumed, not measured.
ASLEEP_BYTES = 4_000_000_000


@dataclass(frozen=True)
class StepLoad:
    """The most that one rank computes in an optimizer step.

    Attributes:
        tokens: padded tokens of a micro-batch.
        passes: number of micro-batches.
        patches: of all its images.
        largest: patches of the largest image.
        image_tokens: language tokens of all its images.
    """

    tokens: int
    passes: int
    patches: int = 0
    largest: int = 0
    image_tokens: int = 0

    @classmethod
    def of(cls, options: TrainOptions, shape: EpisodeShape, longest: int) -> StepLoad:
        """Of a run.

        Args:
            longest: tokens of the longest episode.
        """
        grpo, turns = options.grpo, options.rollout.max_turns
        groups = min(grpo.groups_per_step or grpo.groups, grpo.groups)
        episodes = -(-groups * grpo.group_size * tensor_ranks(options) // options.processes)
        sft = options.warm_start.max_tokens if options.warm_start.steps else 0
        tokens = max(options.optimizer.max_tokens, sft, longest)
        # A group shares the image of its prompt; those of observations differ.
        images = min(groups, episodes) + episodes * shape.seen(turns) if shape.patches else 0
        return cls(
            tokens=tokens,
            passes=max(1, -(-episodes * longest // tokens)),
            patches=images * shape.patches,
            largest=shape.patches,
            image_tokens=images * shape.image_tokens,
        )


@dataclass(frozen=True)
class RankPlan:
    """Bytes of one rank.

    Attributes:
        held: by part, at all times, on the device that computes.
        phases: by phase of an update, and part.
        host: by part, in the memory of the CPU, where that is another device.
    """

    held: dict[str, int]
    phases: dict[str, dict[str, int]]
    host: dict[str, int] = field(default_factory=dict)

    @property
    def phase(self) -> str:
        """The phase of the peak."""
        return max(self.phases, key=lambda name: sum(self.phases[name].values()))

    @property
    def total(self) -> int:
        """Bytes of the peak, on the device that computes."""
        return sum(self.held.values()) + sum(self.phases[self.phase].values())

    @property
    def certain(self) -> int:
        """The part of `total` that is no upper bound."""
        return sum(self.held.get(part, 0) for part in _CERTAIN)

    @property
    def parts(self) -> dict[str, int]:
        """Largest size of each part, in any phase."""
        found = dict(self.held)
        for phase in self.phases.values():
            for part, count in phase.items():
                found[part] = max(found.get(part, 0), count)
        return found


def plan_rank(
    options: TrainOptions, model: ModelShape, load: StepLoad, caches: dict[str, int] | None = None, *, on_gpu: bool
) -> RankPlan:
    """Bytes of one rank.

    Args:
        load: of this rank.
        caches: of its engine, by part, as `plan_caches` gives them.
        on_gpu: whether it computes on a GPU.
    """
    value, products = model.value_bytes, compute_bytes(options.policy)
    is_shared, tensor = options.shares_weights, tensor_ranks(options)
    shards = options.processes // options.replicas // tensor if is_shared else 1
    is_offloaded = options.optimizer.offload and on_gpu
    # The ranks that split matrices have the vision tower each.
    language = held_bytes(options, model, model.layers) + held_bytes(options, model, model.root)
    weights = (language // tensor + held_bytes(options, model, model.vision)) // shards
    trained = ((model.trained - model.vision.trained) // tensor + model.vision.trained) // shards
    state = {
        "weights": weights,
        "gradients": value * trained,
        "optimizer moments": 2 * value * trained,
    }
    held = {} if is_offloaded else dict(state)
    if (is_shared or options.optimizer.offload) and options.ranks_roll_out:
        held["weights of the engine"] = _untrained_bytes(options, model)
    text, features = model.config.text_config, 1 + len(model.config.vision_config.deepstack_visual_indexes)
    if on_gpu and options.processes > 1:
        held["communicators"] = _COMMUNICATOR_BYTES
    held["image features"] = 2 * load.image_tokens * text.hidden_size * features * products  # and their gradients
    phases = _plan_phases(options, model, load, gathers=is_shared or is_offloaded)
    # They are freed before an update.
    if engine := {name: count for name, count in (caches or {}).items() if name != "image cache"}:
        phases["rollout"] = engine
    if on_gpu and options.rollout.engine == "sglang":
        # Of a rank that sends: one on its way and the next; what a collective sends to others, and receives.
        size = server_value_bytes(options)
        experts = 2 * getattr(text, "num_experts", 0) * getattr(text, "moe_intermediate_size", 0)
        largest = max(options.rollout.server.bucket_bytes, size * text.hidden_size * max(text.vocab_size, experts))
        phases["weights on their way"] = {"buckets": (4 if is_shared else 2) * min(largest, size * model.parameters)}
    if options.processes > 1 and not is_shared:
        phases["sum over the ranks"] = {"gradients of all ranks": value * model.trained}
    # Without its adapter the policy is the reference.
    if options.grpo.needs_reference and (options.policy.adapter is None or options.grpo.teacher is not None):
        logits = 2 * 4 * min(options.optimizer.logit_chunk, load.tokens) * text.vocab_size // tensor
        units = (model.root.parameters + _GATHERED_LAYERS * model.layer.parameters) // tensor if is_shared else 0
        phases["reference policy"] = {
            "reference policy": _untrained_bytes(options, model) // (shards * tensor),
            "logits of a micro-batch": logits,
            "gathered weights": value * units,
        }
    host = {"process": _PROCESS_BYTES} if on_gpu else {}
    if is_offloaded:
        host |= state | pinned_bytes(options, model, shards)
    elif on_gpu and options.rollout.takes_turns:  # while the servers sample
        host |= {name: count for name, count in state.items() if name != "gradients"}
    if on_gpu and "reference policy" in phases:  # where it waits between its passes
        host["reference policy"] = phases["reference policy"]["reference policy"]
    (host if on_gpu else held)["image cache"] = (caches or {}).get("image cache", 0)
    return RankPlan(held, phases, host)


def pinned_bytes(options: TrainOptions, model: ModelShape, shards: int) -> dict[str, int]:
    """Weights and gradients of a rank that offloads: FSDP2 pins each by itself, in a power of two bytes of torch.

    Moments are made by the optimizer, in ordinary memory.

    Args:
        shards: ranks that share the weights.
    """
    found = {"weights": 0, "gradients": 0}
    for name, ((rows, *others), is_trained) in model.weights.items():
        # Frozen weights beside an adapter have the type of products, but for embeddings.
        is_wide = options.policy.adapter is None or is_trained or "embed_tokens" in name
        ranks = shards * (1 if name.startswith("model.visual.") else tensor_ranks(options))
        size = -(-rows // ranks) * prod(others) * (model.value_bytes if is_wide else compute_bytes(options.policy))
        block = 1 << (size - 1).bit_length()
        found["weights"] += block
        found["gradients"] += block * is_trained
    return found


def plan_run(
    options: TrainOptions, model: ModelShape, shape: EpisodeShape, *, validation: int, evaluation: int, on_gpu: bool
) -> tuple[RankPlan, RankPlan | None]:
    """Bytes of one rank, and of one rollout worker; None: there are none.

    Args:
        shape: of an episode; as long as the model's context where no limit of the run applies.
        validation, evaluation: number of prompts.
        on_gpu: whether they compute on GPUs.
    """
    longest = shape.longest(options)
    longest = model.context if longest is None else longest
    caches = plan_caches(options, model, shape, longest, validation=validation, evaluation=evaluation)
    worker = plan_worker(options, model, caches, on_gpu=on_gpu)
    if worker is not None:  # its engine is the only one
        caches = {"image cache": caches["image cache"]}
    return plan_rank(options, model, StepLoad.of(options, shape, longest), caches, on_gpu=on_gpu), worker


def plan_worker(options: TrainOptions, model: ModelShape, caches: dict[str, int], *, on_gpu: bool) -> RankPlan | None:
    """Bytes of one rollout worker; None: there are none.

    Args:
        caches: as `plan_caches` gives them.
        on_gpu: whether engines compute on GPUs.
    """
    if options.rollout.workers is None:
        return None
    engine = {name: count for name, count in caches.items() if name != "image cache"}
    if options.rollout.engine == "transformers":
        engine["weights of the engine"] = _untrained_bytes(options, model)
    host = {"process": _PROCESS_BYTES, "image cache": caches["image cache"]}
    return RankPlan(engine, {"rollout": {}}, host) if on_gpu else RankPlan(engine | host, {"rollout": {}})


def _plan_phases(
    options: TrainOptions, model: ModelShape, load: StepLoad, *, gathers: bool
) -> dict[str, dict[str, int]]:
    """Bytes by phase of a gradient, and part.

    Args:
        gathers: whether weights leave their modules between passes, as under FSDP2.
    """
    policy, optimizer, config = options.policy, options.optimizer, model.config
    value, products = model.value_bytes, 0 if policy.compute is None else compute_bytes(policy)
    tensor = tensor_ranks(options)
    tower, *others = (held_bytes(options, model, part) for part in (model.vision, model.layer, model.root))
    layer, root = (count // tensor for count in others)
    # Frozen weights have the type of products already.
    rounded_tower, rounded_layer, rounded_layers = (
        part.parameters if policy.adapter is None else part.trained
        for part in (model.vision, model.layer, model.layers)
    )
    trained_layer, trained_root = model.layer.trained // tensor, model.root.trained // tensor
    embedded = config.text_config.vocab_size * config.text_config.hidden_size // tensor
    is_tied = model.root.parameters // tensor < 2 * embedded
    # So have gathered matrices, and a graph keeps no copies of them.
    in_types = gathers and gathers_in_types(options)
    head, sums = 0, sum_bytes(options, model)
    if in_types:
        layer, rounded_layer, rounded_layers = products * model.layer.parameters, 0, 0
        if not is_tied:
            head, root = products * embedded, 0  # the head apart, the embeddings for their own forward pass alone
    # Without sequence parallelism what lies between the matrices is whole on each rank: an upper bound.
    tokens = load.tokens // tensor if options.megatron.sequence_parallel and tensor > 1 else load.tokens
    again, several = optimizer.gradient_checkpointing, load.passes > 1
    collects = several and optimizer.gradient_sync == "step"

    def part(activations: int, rounded: int, name: str = "activations of a micro-batch") -> dict[str, int]:
        """Activations, and weights that products were computed with, which a graph keeps."""
        return {name: activations, "weights in the type of products": products * rounded}

    def gathered(count: int) -> dict[str, int]:
        return {"gathered weights": count} if gathers else {}

    def waiting(count: int, own: int = 0) -> dict[str, int]:
        """Bytes of gradients of whole weights: that the ranks do not share yet, and `own` that are made in any case."""
        return {"gradients of whole weights": count + own if gathers else own}

    pictures = vision_bytes(config, policy, optimizer, load.patches, load.largest) if model.vision.trained else 0
    in_tower = part(pictures, rounded_tower // (config.vision_config.depth if again else 1), "vision activations")
    in_tower = in_tower if pictures else {}
    # The graph of a single pass waits until the micro-batches are through.
    waits = in_tower if load.patches == vision_patches(optimizer, load.patches, load.largest) else {}
    kept = language_bytes(config, policy, optimizer, tokens)
    graph = _sum((waits, part(kept, 0 if again else rounded_layers // tensor)))
    second = part(layer_bytes(config, policy, tokens), rounded_layer // tensor) if again else {}
    has_logits = model.root.trained or policy.adapter is not None
    logits = logit_bytes(config, policy, optimizer, load.tokens) // tensor if has_logits else 0
    logits -= min(head, logits)  # the one that was gathered
    whole = summed_bytes(options, model, PartSize(0, 0)) // tensor if collects else 0
    # A layer's gradient, and the buffer from which the ranks share it; that of the embeddings or the head, in one or
    # the other.
    of_root = min(trained_root, embedded)
    if head:
        own_layer = products * trained_layer + sums * max(trained_layer, of_root) + whole
    else:
        own_layer = ((products if in_types else value) + sums) * trained_layer + (whole or value * of_root)
    phases = {
        "output head": _sum(
            (graph, {"logits of a micro-batch": logits}, gathered(root + head + layer), waiting(whole))
        ),
        "decoder layers": _sum(
            (
                graph,
                second,
                gathered(root + _GATHERED_LAYERS * layer),
                waiting(own_layer),
            )
        ),
    }
    if policy.adapter is not None or optimizer.offload:
        # Sent weights, or those from the memory of the CPU, lie beside their copies; else larger parts follow.
        phases["gathering"] = _sum((graph, gathered(2 * (value * embedded if head else root))))
    if model.root.trained:
        # The gradient of the embeddings is made whole. That of a tied head is summed with it, not in place.
        making = value * embedded * (2 * is_tied + (collects or not gathers))
        # One rank that offloads shares with none: what it sends to itself is as large as what it gets.
        alone = 0 if options.shares_weights else trained_root
        there = 2 * embedded + alone // 2 if head else trained_layer + trained_root + alone
        phases["embeddings"] = _sum((waits, gathered(root), waiting(value * there, making)))
    if pictures:
        phases["vision tower"] = _sum((in_tower, gathered(tower), waiting(2 * value * model.vision.trained)))
    return phases


def tensor_ranks(options: TrainOptions) -> int:
    """Ranks that split each matrix."""
    layout = options.megatron_layout
    return 1 if layout is None else layout.tensor_parallel


def gathers_in_types(options: TrainOptions) -> bool:
    """Whether FSDP2 gathers the matrices of the language model in the type of products (`distributed/fsdp.py`)."""
    shards = options.backend == "fsdp" and (options.shares_weights or options.optimizer.offload)
    return shards and options.policy.compute is not None and options.policy.adapter is None


def gathered_bytes(options: TrainOptions, model: ModelShape) -> tuple[int, int]:
    """Weights that a rank gathers for a micro-batch: in a forward pass, and in the backward pass behind it.

    The vision tower is not among them; it is gathered as it is held, for its own passes.
    """
    layers, root = (held_bytes(options, model, part) for part in (model.layers, model.root))
    if not gathers_in_types(options):
        return layers + root, layers + root
    value, products = model.value_bytes, compute_bytes(options.policy)
    embedded = model.config.text_config.vocab_size * model.config.text_config.hidden_size
    layers = products * model.layers.parameters
    if model.root.parameters < 2 * embedded:  # a head that is the embeddings as well
        return layers + root, layers + root
    # A backward pass needs no embeddings.
    return layers + (value + products) * embedded, layers + products * embedded


def sum_bytes(options: TrainOptions, model: ModelShape) -> int:
    """Bytes of the gradient of a value of the language model's matrices that the ranks add."""
    if not gathers_in_types(options):
        return model.value_bytes
    return 2 if options.optimizer.reduce_dtype == "bfloat16" else 4


def summed_bytes(options: TrainOptions, model: ModelShape, vision: PartSize) -> int:
    """Bytes of the gradients of the language model and `vision` that the ranks add."""
    value, text = model.value_bytes, model.config.text_config
    embedded = text.vocab_size * text.hidden_size
    head = min(model.root.trained, embedded) if model.root.parameters >= 2 * embedded else 0
    rounded = model.layers.trained + head
    return sum_bytes(options, model) * rounded + value * (model.root.trained - head + vision.trained)


def held_bytes(options: TrainOptions, model: ModelShape, part: PartSize) -> int:
    """Weights of a part of the trained model; under an adapter its frozen matrices are in the type of products."""
    if options.policy.adapter is None:
        return model.value_bytes * part.parameters
    text, products = model.config.text_config, compute_bytes(options.policy)
    whole = part.trained + (text.vocab_size * text.hidden_size if part is model.root else 0)
    return int(products * part.parameters + (model.value_bytes - products) * whole)


def _untrained_bytes(options: TrainOptions, model: ModelShape) -> int:
    """A policy that is not trained: matrices in the type of products, embeddings as they are (`use_types`)."""
    text, value, products = model.config.text_config, model.value_bytes, compute_bytes(options.policy)
    return int(products * model.parameters + (value - products) * text.vocab_size * text.hidden_size)


def plan_caches(
    options: TrainOptions, model: ModelShape, shape: EpisodeShape, longest: int, *, validation: int, evaluation: int
) -> dict[str, int]:
    """Bytes by part that the engine and the image encoder keep of one process that rolls out.

    Args:
        longest: tokens of the longest episode.
        validation, evaluation: number of prompts.
    """
    from geo_sokoban_pipeline.policies.patches import DEFAULT_CACHE_BYTES

    text, grpo, rollout = model.config.text_config, options.grpo, options.rollout
    batch = max(grpo.groups * grpo.group_size, validation, evaluation * options.evaluation.samples)
    episodes = -(-batch // (rollout.workers or options.processes))
    images = 0 if not shape.patches else 1 + (rollout.max_turns if shape.images is None else shape.images - 1)
    stored = episodes * images * (shape.patches * _PATCH_BYTES + shape.image_bytes)
    found = {"image cache": min(DEFAULT_CACHE_BYTES, stored)}
    if rollout.engine != "transformers":
        return found
    wide, rows = compute_bytes(options.policy), min(rollout.max_conversations, episodes)
    features = (1 + len(model.config.vision_config.deepstack_visual_indexes)) * wide * text.hidden_size
    found["key-value cache"] = rows * longest * cache_bytes(text, wide)
    found["image features of the engine"] = images * episodes * shape.image_tokens * features
    return found


def _sum(parts: Iterable[dict[str, int]]) -> dict[str, int]:
    found: dict[str, int] = {}
    for part in parts:
        for name, count in part.items():
            found[name] = found.get(name, 0) + count
    return found


@dataclass(frozen=True)
class Gpu:
    """A GPU: bytes that are free before the run, and all that it has."""

    free: int
    total: int


@dataclass(frozen=True)
class MemoryPlace:
    """A memory, and what a run puts there.

    Attributes:
        name: such as `GPU 0`.
        free: bytes before the run.
        users: bytes by rank or server.
        certain: bytes of `users` that are no upper bound.
        is_shared: whether they take turns, so that the largest of them is there at a time, and what the others keep.
    """

    name: str
    free: int
    users: dict[str, int]
    certain: int
    is_shared: bool = False

    @property
    def total(self) -> int:
        """Bytes of all users at a time."""
        if self.is_shared and len(self.users) > 1:
            return max(self.users.values()) + ASLEEP_BYTES
        return sum(self.users.values())


def place_on_gpus(
    options: TrainOptions, rank: RankPlan, gpus: Sequence[Gpu], worker: RankPlan | None = None, least: int = 0
) -> list[MemoryPlace]:
    """GPUs of this machine that the run uses.

    Rank n lies on GPU n; rollout workers with engines follow; servers begin at `rollout.server.first_gpu`.

    Args:
        least: bytes that a server needs on a GPU, whatever its share is, as `least_server_bytes` gives them.
    """
    server, workers = options.rollout.server, options.rollout.workers or 0
    launched = server.count if _launches(options) and server.device == "cuda" else 0
    found = []
    for number, gpu in enumerate(gpus):
        users = {f"rank {number}": rank.total} if number < options.processes else {}
        of_worker = number - options.processes
        if worker is not None and worker.total and 0 <= of_worker < workers:
            users[f"rollout worker {of_worker}"] = worker.total
        of_server = number - server.first_gpu
        if 0 <= of_server < launched * server.tensor_parallel:
            share = server.memory_fraction or SERVER_SHARE
            sleeps = options.rollout.takes_turns and number < options.processes
            kept = rank.held.get("communicators", 0) if sleeps else 0  # the rank's, beside the server
            users[f"server {of_server // server.tensor_parallel}"] = max(int(share * gpu.total), least) + kept
        certain = rank.certain if number < options.processes else 0
        found.append(MemoryPlace(f"GPU {number}", gpu.free, users, certain, options.rollout.takes_turns))
    return found


def least_server_bytes(options: TrainOptions, model: ModelShape, longest: int) -> int:
    """Bytes on a GPU of a server that samples one episode at a time: its part of the weights, keys and values.

    Args:
        longest: tokens of the longest episode.
    """
    server = options.rollout.server
    value = server_value_bytes(options)
    return (
        int(value * model.parameters + longest * cache_bytes(model.config.text_config, value)) // server.tensor_parallel
    )


def server_value_bytes(options: TrainOptions) -> int:
    """Bytes of a weight of a server, and of a value of its cache."""
    return 4 if (options.rollout.server.dtype or options.policy.dtype) == "float32" else 2


def cache_bytes(text: Any, value: int) -> int:
    """Bytes of keys and values of a token: layers × 2 × key-value heads × width of a head × bytes of a value."""
    return int(text.num_hidden_layers * 2 * text.num_key_value_heads * text.head_dim * value)


def place_on_cpu(
    options: TrainOptions, model: ModelShape, rank: RankPlan, free: int, where: str, worker: RankPlan | None = None
) -> MemoryPlace:
    """The memory of the CPU: what ranks and rollout workers hold there, and servers that compute there.

    Args:
        free: bytes.
        where: the limiting memory.
    """
    ranks, server, on_gpu = options.processes, options.rollout.server, bool(rank.host)
    each, certain = (sum(rank.host.values()), 0) if on_gpu else (rank.total, rank.certain)
    users = {f"{ranks} ranks" if ranks > 1 else "rank 0": ranks * each}
    if not on_gpu:
        users["further processes"] = (ranks - 1) * _PROCESS_BYTES
    if worker is not None and options.rollout.workers is not None:
        own = sum(worker.host.values()) if on_gpu else worker.total
        users[f"{options.rollout.workers} rollout workers"] = options.rollout.workers * own
    if _launches(options) and server.device == "cpu":
        wide = server_value_bytes(options)
        cache = (server.max_total_tokens or 0) * cache_bytes(model.config.text_config, wide)
        users[f"{server.count} servers"] = server.count * (wide * model.parameters + cache + _PROCESS_BYTES)
    users = {name: count for name, count in users.items() if count}
    return MemoryPlace(where, free, users, ranks * certain)


def _launches(options: TrainOptions) -> bool:
    return options.rollout.engine == "sglang" and options.rollout.server.mode == "launch"


def visible_gpus() -> list[Gpu]:
    """The GPUs that torch sees."""
    import torch

    return [Gpu(*map(int, torch.cuda.mem_get_info(number))) for number in range(torch.cuda.device_count())]


def free_memory() -> tuple[int, str]:
    """Free bytes, and the limiting memory: the tighter one of the machine and its control group."""
    import psutil

    machine = int(psutil.virtual_memory().available)
    limit = group_limit()
    return (machine, "memory of the machine") if limit is None or limit > machine else (limit, "control group")


def group_limit(folder: Path = Path("/sys/fs/cgroup")) -> int | None:
    """Free bytes of the control group, including cached file pages that the kernel drops on demand; None: no limit.

    Args:
        folder: of the control group, version 2.
    """
    try:
        most, used = ((folder / name).read_text(encoding="ascii") for name in ("memory.max", "memory.current"))
        statistics = (folder / "memory.stat").read_text(encoding="ascii")
    except OSError:
        return None
    if most.strip() == "max":
        return None
    counts = dict(line.split() for line in statistics.splitlines())
    return max(int(most) - int(used) + int(counts.get("inactive_file", 0)), 0)


def check_memory(rank: RankPlan, places: Sequence[MemoryPlace], share: float) -> list[Check]:
    """One row per part of a rank, one for the rank, and one per memory that the run uses.

    Args:
        share: largest allowed fraction of the free bytes.
    """
    host = f"; {size(sum(rank.host.values()))} in the CPU's memory" if rank.host else ""
    rows = [
        *(Check(_MEMORY, part, "ok", f"up to {size(count)} in a rank") for part, count in rank.parts.items() if count),
        Check(_MEMORY, "rank", "ok", f"at most {size(rank.total)}, in the phase `{rank.phase}`{host}"),
    ]
    for place in (place for place in places if place.users):
        users = (f"{name} {size(count)}" for name, count in place.users.items())
        text = (" or " if place.is_shared else " + ").join(users)
        text += f": at most {size(place.total)} of {size(place.free)} free"
        fits, is_certain = place.total <= share * place.free, place.certain > place.free
        rows += find_cases(
            _MEMORY,
            (fits, place.name, "ok", text, ""),
            (not fits and is_certain, place.name, "failure", text, _way_out(rank, place)),
            (not fits and not is_certain, place.name, "warning", text, _way_out(rank, place)),
        )
    return rows


def _way_out(rank: RankPlan, place: MemoryPlace) -> str:
    if place.certain > place.free:
        return (
            "share weights among several processes (sharding=full), set optimizer.offload=true, or take a smaller model"
        )
    largest, *others = sorted(place.users, key=lambda name: -place.users[name])
    if place.is_shared and largest.startswith("server"):
        return "lower rollout.server.memory_fraction"
    if not place.is_shared and others and any(name.startswith("server") for name in place.users):
        return (
            "give servers GPUs of their own (rollout.server.first_gpu), let them take turns with the trainer "
            "(rollout.server.colocated=true), or lower rollout.server.memory_fraction"
        )
    peak = {**rank.held, **rank.phases[rank.phase]}
    return _WAYS_OUT.get(max(peak, key=lambda part: peak[part]), "take a smaller model")


_WAYS_OUT = {
    "activations of a micro-batch": "set optimizer.gradient_checkpointing=true or lower optimizer.max_tokens",
    "logits of a micro-batch": "lower optimizer.logit_chunk",
    "vision activations": "set optimizer.vision_patches or optimizer.gradient_checkpointing=true",
    "weights in the type of products": "set optimizer.gradient_checkpointing=true",
    "key-value cache": "lower rollout.max_conversations or rollout.max_turns",
    "image features of the engine": "lower grpo.groups or the size of the images",
    "image features": "lower grpo.groups_per_step or the size of the images",
    "weights": "lower processes, or share weights among them (sharding=full)",
    "gradients": "lower processes, or share weights among them (sharding=full)",
    "optimizer moments": "lower processes, or share weights among them (sharding=full)",
}
