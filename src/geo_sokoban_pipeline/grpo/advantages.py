"""Advantages: an episode's reward, or a turn's return, relative to the other episodes of its group.

All statistics are float64. A group with equal rewards gets exactly 0, not a rounding residue that the division by a
tiny standard deviation would amplify into a signal.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Sequence
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

# Rewards that differ by no more than this count as equal: far below any reward step, far above rounding.
EQUAL_REWARDS = 1e-6
# Added to the standard deviation, as in slime.
STD_EPSILON = 1e-6


def group_advantages(rewards: ArrayLike, group_index: ArrayLike, *, normalize_std: bool = True) -> NDArray[np.float64]:
    """Advantage of each episode within its group (GRPO, arXiv 2402.03300, section 4.1).

    Args:
        rewards: (N,) episode rewards, any finite scale.
        group_index: (N,) integer group of each episode; groups need not be contiguous or equal in size.
        normalize_std: divide by the unbiased standard deviation + 1e-6; off gives Dr. GRPO (arXiv 2503.20783).

    Returns:
        (N,) float64. Exactly 0 where the rewards of a group differ by no more than 1e-6, also for values that binary
        floats cannot represent, and for a group of one.

    Raises:
        ValueError: the shapes differ, or a reward is not finite; the message names its index.
    """
    values, groups = check_rewards(rewards, group_index)
    advantages = np.zeros(len(values), dtype=np.float64)
    for group in np.unique(groups):
        members = np.flatnonzero(groups == group)
        advantages[members] = centred(values[members], normalize_std=normalize_std)
    return advantages


def centred(values: NDArray[np.float64], *, normalize_std: bool = False) -> NDArray[np.float64]:
    """Values minus their mean, (n,) float64, optionally divided by (unbiased std + 1e-6); exactly 0 if equal."""
    if len(values) < 2 or is_constant(values):
        return np.zeros(len(values), dtype=np.float64)
    differences: NDArray[np.float64] = values - values.mean()
    if normalize_std:
        differences /= values.std(ddof=1) + STD_EPSILON
    return differences


def is_constant(values: NDArray[np.float64]) -> bool:
    """Whether values span no more than 1e-6; true for none and for one."""
    return bool(len(values) == 0 or values.max() - values.min() <= EQUAL_REWARDS)


def check_rewards(rewards: ArrayLike, group_index: ArrayLike) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Rewards as (N,) float64 and groups as (N,) int64, or a ValueError that names the wrong entry."""
    values = np.asarray(rewards, dtype=np.float64)
    groups = np.asarray(group_index)
    if values.ndim != 1 or groups.shape != values.shape:
        raise ValueError(
            f"rewards has shape {values.shape}, group_index {groups.shape}: both must be (N,), one entry per episode."
        )
    if groups.size and not np.issubdtype(groups.dtype, np.integer):
        raise ValueError(f"group_index has dtype {groups.dtype}: it must hold integers.")
    wrong = np.flatnonzero(~np.isfinite(values))
    if wrong.size:
        index = int(wrong[0])
        raise ValueError(
            f"rewards[{index}]={values[index]}: a reward must be finite. Leave out failed and aborted episodes."
        )
    return values, groups.astype(np.int64)


# Credit per turn: the worth of each turn, and its advantage over comparable turns.


Baseline = Literal["turn", "board"]
Normalize = Literal["none", "rms", "std"]
Floats = NDArray[np.float64]


def returns(values: ArrayLike, gamma: float) -> Floats:
    """Discounted reward-to-go `G_s = v_s + gamma * G_{s+1}` of one episode, (n,) float64; gamma in [0, 1] per turn."""
    if not 0.0 <= gamma <= 1.0:
        raise ValueError(f"gamma={gamma}: the discount per turn must be in [0, 1].")
    result = _vector("values", values).copy()
    for turn in range(len(result) - 2, -1, -1):
        result[turn] += gamma * result[turn + 1]
    return result


def turn_advantages(
    values: Sequence[ArrayLike],
    group_index: Sequence[int],
    gamma: float,
    normalize: Normalize = "none",
    clip: float | None = None,
    baseline: Baseline = "turn",
    observation_keys: Sequence[Sequence[Hashable]] | None = None,
) -> list[Floats]:
    """Advantage of each turn: its return minus the mean return of its cell, which is the comparable turns of a group.

    Args:
        values: one (n_e,) array per episode, the part of its reward that each turn has earned.
        group_index: group of each episode.
        gamma: discount per turn, in [0, 1].
        normalize: "none"; "std" divides each group by the unbiased std of its turn advantages + 1e-6; "rms" divides all
            by their common root mean square (use `scale_by_rms` if only some groups are trained).
        clip: largest magnitude, applied last; None: not clipped.
        baseline: "turn": the group's episodes that are alive at the turn index; "board": the group's turns with one
            observation (arXiv 2505.10978).
        observation_keys: for "board", one key per turn and episode: what the policy saw before the turn.

    Returns:
        One (n_e,) float64 per episode. A cell with one turn, or with equal returns, gives exactly 0.
    """
    if len(values) != len(group_index):
        raise ValueError(f"values has {len(values)} episodes and group_index {len(group_index)} entries.")
    if normalize not in ("none", "rms", "std"):
        raise ValueError(f"normalize={normalize!r}: choose 'none', 'rms' or 'std'.")
    to_go = [returns(episode, gamma) for episode in values]
    advantages = [np.zeros(len(episode), dtype=np.float64) for episode in to_go]
    for places in _cells(to_go, group_index, baseline, observation_keys).values():
        cell = centred(np.array([to_go[episode][turn] for episode, turn in places]))
        for (episode, turn), advantage in zip(places, cell, strict=True):
            advantages[episode][turn] = advantage
    if normalize == "rms":
        return scale_by_rms(advantages, np.ones(len(advantages), dtype=bool), clip=clip)
    if normalize == "std":
        _scale_groups(advantages, group_index)
    return advantages if clip is None else [np.clip(episode, -clip, clip) for episode in advantages]


def scale_by_rms(advantages: Sequence[ArrayLike], kept: ArrayLike, *, clip: float | None = 4.0) -> list[Floats]:
    """Divide all turn advantages by the root mean square of the trained ones, then clip.

    Args:
        advantages: one (n_e,) array per episode.
        kept: (episodes,) bool, true for trained episodes; only they enter the root mean square.
        clip: largest magnitude after the division; None: not clipped.

    Returns:
        One (n_e,) float64 per episode, dropped ones on the same scale; not scaled if all kept ones are 0.
    """
    arrays = [_vector("advantages", episode) for episode in advantages]
    mask = np.asarray(kept, dtype=bool)
    if mask.shape != (len(arrays),):
        raise ValueError(f"kept has shape {mask.shape}: it must be ({len(arrays)},), one entry per episode.")
    pool = np.concatenate([np.empty(0), *(episode for episode, keep in zip(arrays, mask, strict=True) if keep)])
    scale = float(np.sqrt(np.mean(pool**2))) if pool.size else 0.0
    if scale > 0.0:
        arrays = [episode / scale for episode in arrays]
    return arrays if clip is None else [np.clip(episode, -clip, clip) for episode in arrays]


def _cells(
    to_go: Sequence[Floats],
    group_index: Sequence[int],
    baseline: Baseline,
    observation_keys: Sequence[Sequence[Hashable]] | None,
) -> dict[tuple[int, Hashable], list[tuple[int, int]]]:
    """(episode, turn) places that share a baseline, in episode order."""
    if baseline not in ("turn", "board"):
        raise ValueError(f"baseline={baseline!r}: choose 'turn' or 'board'.")
    cells: dict[tuple[int, Hashable], list[tuple[int, int]]] = defaultdict(list)
    for episode, (group, values) in enumerate(zip(group_index, to_go, strict=True)):
        keys: Sequence[Hashable] = range(len(values))
        if baseline == "board":
            keys = () if observation_keys is None else observation_keys[episode]
            if len(keys) != len(values):
                raise ValueError(
                    f"observation_keys[{episode}] has {len(keys)} keys for {len(values)} turns: give one per turn."
                )
        for turn, key in enumerate(keys):
            cells[int(group), key].append((episode, turn))
    return cells


def _scale_groups(advantages: list[Floats], group_index: Sequence[int]) -> None:
    """Divide the turn advantages of each group, in place, by their unbiased standard deviation + 1e-6."""
    for group in sorted({int(group) for group in group_index}):
        members = [episode for episode, own in enumerate(group_index) if own == group]
        pool = np.concatenate([advantages[episode] for episode in members])
        if not is_constant(pool):
            for episode in members:
                advantages[episode] /= pool.std(ddof=1) + STD_EPSILON


def _vector(name: str, values: ArrayLike) -> Floats:
    array = np.asarray(values, dtype=np.float64)
    if array.ndim != 1:
        raise ValueError(f"{name} has shape {array.shape}: it must be one-dimensional.")
    wrong = np.flatnonzero(~np.isfinite(array))
    if wrong.size:
        raise ValueError(f"{name}[{int(wrong[0])}]={array[wrong[0]]}: it must be finite.")
    return array
