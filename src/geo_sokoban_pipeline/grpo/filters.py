"""Dynamic filter: which groups carry a signal worth an optimizer step.

The decision on a group depends on its own episodes only. A group without a graded episode is always dropped, however
few groups remain.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from geo_sokoban_pipeline.grpo.advantages import EQUAL_REWARDS, is_constant

FilterKind = Literal["none", "zero_variance", "mixed_success"]

EMPTY = "empty"
ZERO_STD = "zero_std"
ALL_SOLVED = "all_solved"
NONE_SOLVED = "none_solved"


@dataclass(frozen=True)
class GroupSignal:
    """The filter's input of one group.

    Attributes:
        rewards: reward of each graded episode, without failed and aborted ones.
        successes: whether each of them was solved; None for a task without success.
        turn_advantages: all turn advantages of the group; None: credit is per episode.
    """

    rewards: Sequence[float]
    successes: Sequence[bool] | None = None
    turn_advantages: Sequence[float] | None = None

    @property
    def has_signal(self) -> bool:
        """Whether any advantage differs from 0: of the turns with credit per turn, else of the episodes."""
        if self.turn_advantages is not None:
            return bool(np.any(np.abs(np.asarray(self.turn_advantages, dtype=np.float64)) > EQUAL_REWARDS))
        return not is_constant(np.asarray(self.rewards, dtype=np.float64))

    @property
    def reward_label(self) -> str:
        """Mean reward with one decimal, the suffix of metric names; never "-0.0"."""
        return f"{round(float(np.mean(self.rewards)), 1) + 0.0:.1f}" if len(self.rewards) else "none"


def keep_groups(groups: Sequence[GroupSignal], kind: FilterKind = "none", min_groups: int = 0) -> list[str | None]:
    """Why each group is dropped, in the order given; None for a group that is trained.

    Args:
        groups: one signal per group.
        kind: "none" keeps all; "zero_variance" drops groups whose advantages are all 0 (`zero_std`); "mixed_success"
            drops groups in which all or none solved (`all_solved`, `none_solved`).
        min_groups: if fewer groups would remain, all groups with a signal are kept; 0: no fallback.

    Returns:
        One reason or None per group. A group without graded episodes is `empty` with every kind.

    Raises:
        ValueError: unknown kind, negative min_groups, or "mixed_success" for a task without successes.
    """
    if kind not in ("none", "zero_variance", "mixed_success"):
        raise ValueError(f"kind={kind!r}: choose 'none', 'zero_variance' or 'mixed_success'.")
    if min_groups < 0:
        raise ValueError(f"min_groups={min_groups}: it must be 0 or more.")
    reasons = [_drop_reason(index, group, kind) for index, group in enumerate(groups)]
    if sum(reason is None for reason in reasons) < min_groups:
        return [None if group.has_signal else reason for group, reason in zip(groups, reasons, strict=True)]
    return reasons


def drop_counts(groups: Sequence[GroupSignal], reasons: Sequence[str | None]) -> dict[str, int]:
    """Counts per metric name `rollout/dynamic_filter/drop_<reason>`, sorted; `zero_std` gets the reward as a suffix."""
    names = [
        f"{reason}_{group.reward_label}" if reason == ZERO_STD else reason
        for group, reason in zip(groups, reasons, strict=True)
        if reason is not None
    ]
    return {f"rollout/dynamic_filter/drop_{name}": count for name, count in sorted(Counter(names).items())}


def zero_std_counts(groups: Sequence[GroupSignal]) -> dict[str, int]:
    """Groups with equal rewards per metric name `rollout/zero_std/count_<reward, one decimal>`, dropped or not."""
    labels = [
        group.reward_label
        for group in groups
        if len(group.rewards) and is_constant(np.asarray(group.rewards, dtype=np.float64))
    ]
    return {f"rollout/zero_std/count_{label}": count for label, count in sorted(Counter(labels).items())}


def _drop_reason(index: int, group: GroupSignal, kind: FilterKind) -> str | None:
    if len(group.rewards) == 0:
        return EMPTY
    if kind == "zero_variance":
        return None if group.has_signal else ZERO_STD
    if kind == "mixed_success":
        if group.successes is None or len(group.successes) != len(group.rewards):
            raise ValueError(
                f"groups[{index}].successes does not hold one entry per reward: the filter 'mixed_success' needs them. "
                "Choose 'zero_variance' for a task without successes."
            )
        if all(group.successes):
            return ALL_SOLVED
        return None if any(group.successes) else NONE_SOLVED
    return None
