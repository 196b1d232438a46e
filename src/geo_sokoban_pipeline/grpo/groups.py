"""Groups of episodes: what an advantage sees of them, and rewards and returns relative to their group.

An advantage sees plain arrays and lists, no torch tensor and no object of this project, so it is a pure function that a
test calls with literals. All statistics are float64. A group with equal rewards gives exactly 0, not a rounding residue
that the division by a tiny standard deviation would amplify into a signal.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

# Rewards that differ by no more than this count as equal: far below any reward step, far above rounding.
EQUAL_REWARDS = 1e-6
# Added to the standard deviation, as in slime.
STD_EPSILON = 1e-6
Floats = NDArray[np.float64]
Function = TypeVar("Function", bound=Callable[..., Any])


@dataclass(frozen=True, eq=False)
class Episodes:
    """The graded episodes of an iteration, N of them, with n_e responses each.

    Attributes:
        group: (N,) int64 group of each episode; groups need be neither contiguous nor equal in size.
        reward: (N,) float64, finite; with `grpo.overlong`, less its penalty.
        trained: (N,) bool, whether the filter lets an episode be trained. Whatever is estimated over the whole
            iteration takes these alone.
        lengths: one (n_e,) int64 per episode: sampled tokens of each response.
        turn_rewards: one (n_e,) float64 per episode: the parts of its reward that its responses have earned. None where
            they do not add up to the reward.
        state_keys: n_e keys per episode: the state before each response. Equal keys within a group are equal states.
        success: whether each episode reached its goal; None for a task without one.
        versions: (N,) int64 newest policy version that sampled a token of the episode.
        state_values: one (n_e,) float64 per episode: the value of the state before each response by continuations from
            it, NaN where it is not measured.
        teacher_gaps: one (tokens,) float64 per episode: log-prob under the teacher less that under the policy, of its
            sampled tokens; empty where no teacher has scored it.
    """

    group: NDArray[np.int64]
    reward: Floats
    trained: NDArray[np.bool_]
    lengths: Sequence[NDArray[np.int64]]
    turn_rewards: Sequence[Floats] | None = None
    state_keys: Sequence[Sequence[Hashable]] = ()
    success: Sequence[bool | None] = ()
    versions: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    state_values: Sequence[Floats] = ()
    teacher_gaps: Sequence[Floats] = ()


def advantage(
    *,
    zero_on_equal_groups: bool,
    turn_rewards: bool = False,
    per_token: bool = False,
    reads_tokens: bool = False,
    forks: bool = False,
) -> Callable[[Function], Function]:
    """Declare what an advantage promises and needs; a function of one's own may set the attributes itself.

    Args:
        zero_on_equal_groups: where the rewards of a group are equal, its episodes' advantages are exactly 0. The
            trajectory contract and the filter rely on it.
        turn_rewards: it needs `Episodes.turn_rewards`, so a reward without them is refused, with the reason.
        per_token: its numbers are means over tokens, which the update trains one by one; `grpo.normalize` leaves them.
        reads_tokens: it reads numbers of tokens, so that an audit of episodes without tokens cannot compute it again.
        forks: it reads `Episodes.state_values`; `continuations` and `each` among its arguments are those of `vine`.
    """

    def declare(function: Function) -> Function:
        vars(function).update(
            zero_on_equal_groups=zero_on_equal_groups,
            turn_rewards=turn_rewards,
            per_token=per_token,
            reads_tokens=reads_tokens,
            forks=forks,
        )
        return function

    return declare


def group_advantages(rewards: ArrayLike, group_index: ArrayLike, *, normalize_std: bool = True) -> Floats:
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


def centred(values: Floats, *, normalize_std: bool = False) -> Floats:
    """Values minus their mean, (n,) float64, optionally divided by (unbiased std + 1e-6); exactly 0 if equal."""
    if len(values) < 2 or is_constant(values):
        return np.zeros(len(values), dtype=np.float64)
    differences: Floats = values - values.mean()
    if normalize_std:
        differences /= values.std(ddof=1) + STD_EPSILON
    return differences


def is_constant(values: Floats) -> bool:
    """Whether values span no more than 1e-6; true for none and for one."""
    return bool(len(values) == 0 or values.max() - values.min() <= EQUAL_REWARDS)


def check_rewards(rewards: ArrayLike, group_index: ArrayLike) -> tuple[Floats, NDArray[np.int64]]:
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


def returns(values: ArrayLike, gamma: float) -> Floats:
    """Discounted reward-to-go `G_s = v_s + gamma * G_{s+1}` of one episode, (n,) float64; gamma in [0, 1] per turn."""
    if not 0.0 <= gamma <= 1.0:
        raise ValueError(f"gamma={gamma}: the discount per turn must be in [0, 1].")
    result = vector("values", values).copy()
    for turn in range(len(result) - 2, -1, -1):
        result[turn] += gamma * result[turn + 1]
    return result


def returns_to_go(episodes: Episodes, gamma: float) -> list[Floats]:
    """`returns` of each episode's turn rewards, one (n_e,) float64 per episode.

    Raises:
        ValueError: the episodes have no turn rewards.
    """
    if episodes.turn_rewards is None:
        raise ValueError("the episodes have no turn_rewards: their reward is not a sum of what the turns earned.")
    return [returns(rewards, gamma) for rewards in episodes.turn_rewards]


def within_cells(
    values: Sequence[Floats],
    groups: NDArray[np.int64],
    keys: Sequence[Sequence[Hashable]],
    statistic: Callable[[Floats, NDArray[np.int64]], Floats],
) -> list[Floats]:
    """A statistic over each cell, which is the turns of a group that have one key.

    Args:
        values: one (n_e,) array per episode.
        groups: (N,) group of each episode.
        keys: n_e keys per episode.
        statistic: from the (n,) values of a cell and the (n,) places of their episodes to n results.

    Returns:
        One (n_e,) float64 per episode.

    Raises:
        ValueError: an episode has not one key for each turn.
    """
    turns, given = [len(row) for row in values], [len(row) for row in keys]
    if turns != given:
        raise ValueError(f"the episodes have {turns} turns and {given} keys: give one key per turn.")
    cells: dict[tuple[int, Hashable], list[tuple[int, int]]] = defaultdict(list)
    for episode, row in enumerate(keys):
        for turn, key in enumerate(row):
            cells[int(groups[episode]), key].append((episode, turn))
    results = [np.zeros(count) for count in turns]
    for places in cells.values():
        cell = np.array([values[episode][turn] for episode, turn in places])
        found = statistic(cell, np.array([episode for episode, _ in places]))
        for (episode, turn), result in zip(places, found, strict=True):
            results[episode][turn] = result
    return results


def scale_by_rms(advantages: Sequence[ArrayLike], kept: ArrayLike) -> list[Floats]:
    """Divide all advantages by the root mean square of the trained ones.

    Args:
        advantages: one array per episode.
        kept: (episodes,) bool, true for trained episodes; only they enter the root mean square.

    Returns:
        One (n_e,) float64 per episode, dropped ones on the same scale; not scaled if all kept ones are 0.
    """
    arrays = [vector("advantages", episode) for episode in advantages]
    mask = np.asarray(kept, dtype=bool)
    if mask.shape != (len(arrays),):
        raise ValueError(f"kept has shape {mask.shape}: it must be ({len(arrays)},), one entry per episode.")
    pool = np.concatenate([np.empty(0), *(episode for episode, keep in zip(arrays, mask, strict=True) if keep)])
    scale = float(np.sqrt(np.mean(pool**2))) if pool.size else 0.0
    if scale > 0.0:
        arrays = [episode / scale for episode in arrays]
    return arrays


def vector(name: str, values: ArrayLike) -> Floats:
    """Values as (n,) float64, or a ValueError that names the array and the wrong entry."""
    array = np.asarray(values, dtype=np.float64)
    if array.ndim != 1:
        raise ValueError(f"{name} has shape {array.shape}: it must be one-dimensional.")
    wrong = np.flatnonzero(~np.isfinite(array))
    if wrong.size:
        raise ValueError(f"{name}[{int(wrong[0])}]={array[wrong[0]]}: it must be finite.")
    return array
