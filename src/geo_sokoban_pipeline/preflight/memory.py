"""Memory of a run, part by part, against what the machine has free.

The parts are upper estimates from shapes: weights and what the optimizer holds are exact, activations are counted per
layer and token as autograd keeps them. Only the exact parts are a failure; the timed part says what was really used.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path

from geo_sokoban_pipeline.options.training import TrainOptions
from geo_sokoban_pipeline.preflight.checks import Check, State
from geo_sokoban_pipeline.preflight.disk import size
from geo_sokoban_pipeline.preflight.episode import EpisodeShape
from geo_sokoban_pipeline.preflight.model import ModelShape

_GROUP = "memory"
# Values that autograd keeps per token and layer, in multiples of the width and of the MLP's inner width: inputs of two
# norms, of the projections, queries, keys, values and their rotations; gate, up and their product.
_WIDTHS_PER_LAYER = 12
_MLPS_PER_LAYER = 4
# Interpreter and libraries of a further process, its caches filled: measured at the default size.
_PROCESS_BYTES = 600_000_000
_LOGIT_COPIES = 3  # logits, log-probs, gradient, in float32
_EXACT = ("weights", "gradients", "optimizer moments", "reference policy")
_SHARED_MEMORY = Path("/dev/shm")


def plan_memory(
    options: TrainOptions,
    model: ModelShape,
    shape: EpisodeShape,
    longest: int,
    *,
    validation: int = 0,
    evaluation: int = 0,
) -> dict[str, int]:
    """Bytes by part, as in the table.

    Args:
        longest: tokens of the longest episode.
        validation, evaluation: prompts that are played in between and at the end.
    """
    from geo_sokoban_pipeline.policies.images import DEFAULT_CACHE_BYTES

    text, vision = model.config.text_config, model.config.vision_config
    weights = model.weight_bytes
    wide = model.value_bytes if options.policy.compute is None else 2  # bytes of a value that is computed
    grpo, rollout = options.grpo, options.rollout
    episodes = max(grpo.groups * grpo.group_size, validation, evaluation * options.evaluation.samples)
    in_step = min(grpo.groups_per_step or grpo.groups, grpo.groups) * grpo.group_size
    imitation = options.warm_start.max_tokens if options.warm_start.steps else 0
    tokens = max(options.optimizer.max_tokens, imitation, longest)
    layer = _WIDTHS_PER_LAYER * text.hidden_size + _MLPS_PER_LAYER * text.intermediate_size
    logits = min(options.optimizer.logit_chunk, tokens) * text.vocab_size * 4 * _LOGIT_COPIES
    patch = _WIDTHS_PER_LAYER * vision.hidden_size + _MLPS_PER_LAYER * vision.intermediate_size
    pictures = 0 if not shape.patches else rollout.max_turns + 1
    heads = getattr(text, "num_key_value_heads", text.num_attention_heads)
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    rows = min(rollout.max_conversations, episodes)
    features = 1 + len(vision.deepstack_visual_indexes)
    plan = {
        "weights": weights,
        # A further process keeps its own, and hands them over in a second place.
        "gradients": weights * (2 * options.processes - 1),
        "optimizer moments": 2 * weights,
        "activations of a micro-batch": tokens * text.num_hidden_layers * layer * wide + logits,
        "vision activations of a step": in_step * pictures * shape.patches * vision.depth * patch * wide,
        "key-value cache": rows * longest * text.num_hidden_layers * 2 * heads * head_dim * wide,
        "picture features": episodes * pictures * shape.picture_tokens * text.hidden_size * features * wide,
        "picture cache": min(DEFAULT_CACHE_BYTES, episodes * pictures * (shape.patches * 768 + shape.picture_bytes)),
    }
    if options.processes > 1:
        plan["further processes"] = (options.processes - 1) * _PROCESS_BYTES
    if grpo.kl_coefficient > 0:
        plan["reference policy"] = weights
    return plan


def check_memory(plan: Mapping[str, int], free: int, share: float, where: str) -> list[Check]:
    """One row per part, and one for the whole.

    Args:
        free: bytes that are free.
        share: of them that may be planned.
        where: what limits them, for the text.
    """
    total = sum(plan.values())
    exact = sum(plan.get(part, 0) for part in _EXACT)
    state: State = "ok"
    way_out = ""
    if total > share * free:
        state = "failure" if exact > free else "warning"
        largest = max(plan, key=lambda part: plan[part])
        way_out = "take a smaller model" if exact > free else _WAYS_OUT.get(largest, "take a smaller model")
    parts = [Check(_GROUP, part, "ok", f"up to {size(count)}") for part, count in plan.items() if count]
    text = f"at most {size(total)} ({size(exact)} certain), of {size(free)} free ({where})"
    return [*parts, Check(_GROUP, "in all", state, text, way_out)]


def check_shared_memory(processes: int, weights: int, folder: Path = _SHARED_MEMORY) -> list[Check]:
    """Whether weights, and the gradients of every further process, find room where processes share memory.

    Args:
        weights: bytes of all weights.
        folder: the file system of shared memory, as on Linux; nothing is said where there is none.
    """
    if processes == 1 or not folder.is_dir():
        return []
    needed, free = processes * weights, shutil.disk_usage(folder).free
    text = f"{size(needed)} for {processes} processes, of {size(free)} free in {folder}"
    if needed <= free:
        return [Check(_GROUP, "shared memory", "ok", text)]
    return [
        Check(_GROUP, "shared memory", "failure", text, "raise it (in a container: --shm-size), or set processes=1")
    ]


def free_memory(device: str = "cpu") -> tuple[int, str]:
    """Bytes that this process may still take, and where: the tighter one of the machine and its control group.

    Args:
        device: `cuda`: the memory of the GPU instead.
    """
    import psutil

    if device == "cuda":
        import torch

        return int(torch.cuda.mem_get_info()[0]), "memory of the GPU"
    machine = int(psutil.virtual_memory().available)
    limit = group_limit()
    return (machine, "memory of the machine") if limit is None or limit > machine else (limit, "control group")


def group_limit(folder: Path = Path("/sys/fs/cgroup")) -> int | None:
    """Bytes that the control group leaves free, pages of files that the kernel drops on demand among them; None
    without a limit.

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


_WAYS_OUT = {
    "activations of a micro-batch": "lower optimizer.max_tokens or optimizer.logit_chunk",
    "vision activations of a step": "lower grpo.groups_per_step or the size of the pictures",
    "further processes": "lower processes",
    "key-value cache": "lower rollout.max_conversations or rollout.max_turns",
    "picture features": "lower grpo.groups or the size of the pictures",
}
