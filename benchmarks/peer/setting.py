"""The settings of both systems, and their report of a step. Every number that changes the amount of work is here once,
so the two systems cannot differ."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np

System = Literal["ours", "cache off", "TRL"]
NAMES: dict[System, str] = {"ours": "this project", "cache off": "this project, cache off", "TRL": "TRL"}
_PROBE_BYTES = 8 << 20  # between the two bounds: 4 MiB as this project sets it, 32 MiB as glibc comes to by itself


@dataclass(frozen=True)
class Setting:
    """One comparison.

    Attributes:
        policy: folder of the weights that both systems load.
        turns: responses of every episode.
        groups: prompts of a step.
        group_size: episodes of a prompt.
        threads: threads of torch and OpenMP.
        max_new_tokens: tokens of a response at most.
        temperature: of sampling; low enough that a briefly trained policy writes responses of equal length.
        learning_rate: small, so that both policies stay what they were.
        steps: steps that will be asked for, the warm-up included; each has prompts of its own.
    """

    policy: Path
    turns: int
    groups: int = 4
    group_size: int = 8
    threads: int = 1
    max_new_tokens: int = 8
    temperature: float = 0.5
    learning_rate: float = 1e-5
    betas: tuple[float, float] = (0.9, 0.95)
    clip: float = 0.2
    gradient_norm: float = 1.0
    steps: int = 6

    @property
    def episodes(self) -> int:
        """Episodes of a step."""
        return self.groups * self.group_size


@dataclass(frozen=True)
class StepReport:
    """Counts and times of one step.

    Attributes:
        wall: seconds of the whole step.
        cpu: CPU-seconds of the process, all threads; so are the four parts of it.
        generation: until rewards and advantages are there.
        processing: of `generation`, in the image processor; None: not timed apart, on our side, where an image is
            processed once.
        update: after `generation`, until the weights are changed.
        writing: checking and writing the trajectories.
        levels: level of each episode, in the order in which it was trained.
        turns: responses of each episode.
        images, image_tokens: images in the trained conversations, and the tokens that stand for them.
        trained_episodes, optimizer_steps: what the update used and did.
        vision_moved: largest change of a weight of the vision tower; 0 if no image had a part in the loss.
        tokens: of all conversations.
        sampled_tokens: of them, those that the policy wrote.
        fixed_ids: of each episode the tokens that were not sampled, -1 where a run of sampled ones stood.
        running: type of the weights, attention, threads, optimizer, heap, as they were in force.
    """

    wall: float
    cpu: float
    generation: float
    processing: float | None
    update: float
    writing: float
    levels: list[str]
    turns: list[int]
    images: int
    image_tokens: int
    trained_episodes: int
    optimizer_steps: int
    vision_moved: float
    tokens: int
    sampled_tokens: int
    fixed_ids: list[list[int]]
    running: str
    notes: dict[str, Any] = field(default_factory=dict)


def describe_episodes(token_ids: list[np.ndarray], masks: list[np.ndarray], image_pad_id: int) -> dict[str, Any]:
    """Fields of a report that follow from tokens alone.

    Args:
        token_ids: (L,) ids of each conversation, no padding.
        masks: (L,) 1 where a token was sampled.
    """
    return {
        "turns": [int(_starts(mask).sum()) for mask in masks],
        "image_tokens": int(sum((ids == image_pad_id).sum() for ids in token_ids)),
        "tokens": sum(len(ids) for ids in token_ids),
        "sampled_tokens": int(sum(mask.sum() for mask in masks)),
        "fixed_ids": [_fixed(ids, mask) for ids, mask in zip(token_ids, masks, strict=True)],
    }


def _fixed(ids: np.ndarray, mask: np.ndarray) -> list[int]:
    starts = _starts(mask)
    fixed: list[int] = np.where(starts, -1, ids)[starts | (mask == 0)].tolist()
    return fixed


def _starts(mask: np.ndarray) -> np.ndarray:
    """(L,) whether a run of sampled tokens begins here."""
    return np.diff(mask, prepend=0) == 1


def describe_running(model: Any, *optimizers: Any) -> str:
    """Type of the weights, attention, threads, optimizer and heap in force."""
    import torch

    core = model.model
    attention = {core.language_model.config._attn_implementation, core.visual.config._attn_implementation}
    kinds = {str(value.dtype) for value in model.parameters()}
    # accelerate wraps the optimizer.
    bare = [getattr(optimizer, "optimizer", optimizer) for optimizer in optimizers]
    names = " and ".join(f"{type(one).__name__}(fused={one.defaults.get('fused')})" for one in bare)
    threads = torch.get_num_threads()
    return (
        f"{'/'.join(sorted(kinds))}, {'/'.join(sorted(attention))}, {threads} thread{'s' * (threads > 1)}, {names}, "
        f"{describe_heap()}"
    )


class _MallInfo(ctypes.Structure):
    """`struct mallinfo2` of glibc: `hblks` blocks have their own mapping, `fordblks` bytes of the heap are free."""

    _names = ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")
    _fields_ = [(name, ctypes.c_size_t) for name in _names]


def describe_heap() -> str:
    """Where malloc puts large blocks, found by allocating some: its settings cannot be read back.

    By itself glibc raises its bound to the largest mapped block that was freed, so only the second round tells. Each
    round asks for more than the heap has free: one block at least needs a new place.
    """
    library = ctypes.CDLL(None)
    if not hasattr(library, "mallinfo2"):
        return "heap unknown"
    library.mallinfo2.restype = _MallInfo
    library.malloc.restype, library.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
    library.free.restype, library.free.argtypes = None, [ctypes.c_void_p]
    mapped = 0
    for _ in range(2):
        before = library.mallinfo2()
        blocks = [library.malloc(_PROBE_BYTES) for _ in range(before.fordblks // _PROBE_BYTES + 1)]
        mapped = library.mallinfo2().hblks - before.hblks
        for block in blocks:
            library.free(block)
    return f"blocks of 8 MiB {'outside' if mapped else 'inside'} the heap"


def largest_change(before: dict[str, Any], module: Any) -> float:
    """Largest absolute change of a module's weights since `before`, a copy of its state."""
    return max(float((value - before[name]).abs().max()) for name, value in module.state_dict().items())


def copy_weights(module: Any) -> dict[str, Any]:
    """Copy of a module's state."""
    return {name: value.clone() for name, value in module.state_dict().items()}
