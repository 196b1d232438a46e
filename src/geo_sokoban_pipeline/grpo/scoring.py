"""Scoring: computes advantages from the rewards of an iteration, and decides which episodes are trained.

`score_groups` changes nothing, so that collecting can call it at any time to see whether the groups so far are enough;
`apply_scores` writes the result into the episodes, once. The update reads only the episodes, so a stored iteration can
be trained again exactly.

An advantage is an episode's reward, or a turn's return, relative to the other episodes of its group. All statistics are
float64. A group with equal rewards gets exactly 0, not a rounding residue that the division by a tiny standard
deviation would amplify into a signal.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from geo_sokoban_pipeline.config.grpo import GrpoOptions
from geo_sokoban_pipeline.envs.base import Task
from geo_sokoban_pipeline.trajectories.types import Trajectory, Turn

_TOLERANCE = 1e-6

# Rewards that differ by no more than this count as equal: far below any reward step, far above rounding.
EQUAL_REWARDS = 1e-6
# Added to the standard deviation, as in slime.
STD_EPSILON = 1e-6
FilterKind = Literal["none", "zero_variance", "mixed_success"]
Baseline = Literal["turn", "board"]
Floats = NDArray[np.float64]
# Why a group is not trained.
EMPTY = "empty"
ZERO_STD = "zero_std"
ALL_SOLVED = "all_solved"
NONE_SOLVED = "none_solved"
MIXED_VERSIONS, STALE = "mixed_versions", "stale"  # drop reasons of episodes with tokens of older weights


@dataclass(frozen=True)
class EpisodeScore:
    """Advantages of one graded episode, and whether it is trained.

    Attributes:
        advantage: of the episode within its group; with credit per turn its tokens have `turn_advantages` instead.
        drop_reason: why it is not trained; None: no reason.
        trained: whether it is trained; False also without a sampled token.
        turn_credits: (turns,) part of the reward of each assistant turn; None with credit per episode.
        turn_advantages: (turns,) advantage of the tokens of each assistant turn; None with credit per episode.
    """

    advantage: float
    drop_reason: str | None
    trained: bool
    turn_credits: Floats | None = None
    turn_advantages: Floats | None = None


@dataclass(frozen=True)
class Scores:
    """Result of `score_groups`.

    Attributes:
        episodes: one per trajectory, in order; None for those without a reward (failed and aborted ones).
        trained_groups: number of groups with a trained episode.
        metrics: `rollout/groups`, `rollout/dynamic_filter/drop_<reason>`, `rollout/zero_std/count_<reward>`.
    """

    episodes: list[EpisodeScore | None]
    trained_groups: int
    metrics: dict[str, float]


def score_groups(
    trajectories: Sequence[Trajectory],
    options: GrpoOptions,
    task: Task,
    reward_args: Mapping[str, Any],
    *,
    min_groups: int | None = None,
    max_trained_groups: int | None = None,
) -> Scores:
    """Advantages of an iteration's episodes, and which of them pass the dynamic filter; changes nothing.

    Args:
        trajectories: episodes of one iteration, groups by `group_index`.
        options: credit, normalisation, filter.
        task: credit per turn takes its `turn_values`.
        reward_args: the reward's arguments.
        min_groups: replaces `options.min_groups`; None: does not.
        max_trained_groups: above it, groups are dropped as `surplus`, and so are all with an aborted episode. None: all
            groups that the filter keeps.

    Raises:
        ValueError: with `grpo.credit=turn`, the turns of an episode do not add up to its reward.
    """
    places = [place for place, episode in enumerate(trajectories) if episode.reward is not None]
    graded = [trajectories[place] for place in places]
    rewards = [float(episode.reward or 0.0) for episode in graded]
    group_of = [episode.group_index for episode in graded]

    # Advantages: of each episode within its group, and of each turn where credit is per turn.
    advantages = group_advantages(rewards, group_of, normalize_std=options.normalize == "std")
    if options.advantage_clip is not None and options.normalize != "rms":
        advantages = np.clip(advantages, -options.advantage_clip, options.advantage_clip)
    turn_credits: list[Floats] | None = None
    per_turn: list[Floats] | None = None
    if options.credit == "turn":
        turn_credits = [turn_credit(episode, task, reward_args) for episode in graded]
        per_turn = turn_advantages(
            turn_credits,
            group_of,
            options.gamma,
            per_group=options.normalize == "std",
            baseline=options.baseline,
            observation_keys=[_observation_keys(episode) for episode in graded]
            if options.baseline == "board"
            else None,
        )

    # Filter: whole groups first, then stale episodes.
    groups = sorted({episode.group_index for episode in trajectories})
    signals = [_signal(graded, group, per_turn) for group in groups]
    least = options.min_groups if min_groups is None else min_groups
    reasons = dict(zip(groups, keep_groups(signals, options.filter, least), strict=True))
    if max_trained_groups is not None:
        aborted = {episode.group_index for episode in trajectories if episode.status == "aborted"}
        kept = [group for group, reason in reasons.items() if reason is None]
        whole = [group for group in kept if group not in aborted]
        reasons |= dict.fromkeys(set(kept) - set(whole[:max_trained_groups]), "surplus")
    newest = newest_version(trajectories)
    drop_reasons = [
        reasons[episode.group_index] or _version_reason(episode, options.mixed_versions, newest) for episode in graded
    ]
    trained = [
        reason is None and bool(episode.loss_mask.any()) for episode, reason in zip(graded, drop_reasons, strict=True)
    ]

    # Scale: the root mean square is over trained episodes, so it comes after the filter.
    clip = options.advantage_clip
    if per_turn is not None:
        if options.normalize == "rms":
            per_turn = scale_by_rms(per_turn, trained, clip=clip)
        elif clip is not None:
            per_turn = [np.clip(row, -clip, clip) for row in per_turn]
    elif options.normalize == "rms":
        scaled = scale_by_rms([np.array([value]) for value in advantages], trained, clip=clip)
        advantages = np.array([row[0] for row in scaled])

    scores: list[EpisodeScore | None] = [None] * len(trajectories)
    for number, place in enumerate(places):
        scores[place] = EpisodeScore(
            advantage=float(advantages[number]),
            drop_reason=drop_reasons[number],
            trained=trained[number],
            turn_credits=None if turn_credits is None else turn_credits[number],
            turn_advantages=None if per_turn is None else per_turn[number],
        )
    counts = drop_counts(signals, list(reasons.values())) | zero_std_counts(signals)
    return Scores(
        scores,
        len({group for group, is_trained in zip(group_of, trained, strict=True) if is_trained}),
        {"rollout/groups": float(len(groups)), **{name: float(count) for name, count in counts.items()}},
    )


def apply_scores(trajectories: Sequence[Trajectory], scores: Scores) -> None:
    """Write scores into their episodes: `advantage`, `trained`, `drop_reason`, and the turns' `credit` and `advantage`.

    Episodes without a score are unchanged.
    """
    for episode, score in zip(trajectories, scores.episodes, strict=True):
        if score is None:
            continue
        episode.advantage, episode.trained, episode.drop_reason = score.advantage, score.trained, score.drop_reason
        if score.turn_credits is None or score.turn_advantages is None:
            continue
        for turn, credit, advantage in zip(
            assistant_turns(episode), score.turn_credits, score.turn_advantages, strict=True
        ):
            turn.credit, turn.advantage = float(credit), float(advantage)


def assistant_turns(trajectory: Trajectory) -> list[Turn]:
    """The policy's turns of an episode."""
    return [turn for turn in trajectory.turns if turn.role == "assistant"]


def is_solved(trajectory: Trajectory) -> bool | None:
    """Whether an episode succeeded; None for a task without success, and for an aborted episode, which has no end."""
    success = None if trajectory.status == "aborted" else trajectory.metrics.get("success")
    return None if success is None else success >= 0.5


def newest_version(episodes: Sequence[Trajectory]) -> int:
    """Newest policy version that sampled any token of the episodes; −1 without a token."""
    return max((version for episode in episodes for version in _versions(episode)), default=-1)


def adds_up(values: np.ndarray, reward: float) -> bool:
    """Whether the worths of an episode's turns add up to its reward."""
    return abs(float(values.sum()) - reward) <= _TOLERANCE * max(1.0, abs(reward))


def turn_credit(episode: Trajectory, task: Task, reward_args: Mapping[str, Any]) -> Floats:
    """Part of the reward of each assistant turn; 0 for a response that was cut off and not stepped.

    Raises:
        ValueError: the turns do not add up to the episode's reward, so credit per turn would change the objective.
    """
    turns = assistant_turns(episode)
    stepped = [(turn.reward, turn.info) for turn in turns if turn.reward is not None]
    rewards, infos = [reward for reward, _ in stepped], [info for _, info in stepped]
    values = np.asarray(task.turn_values(rewards, infos, episode.reward_parts, reward_args), np.float64)
    if not adds_up(values, float(episode.reward or 0.0)):
        raise ValueError(
            f"episode {episode.trajectory_id} has reward {episode.reward}, but its turns add up to {values.sum()}: "
            f"grpo.credit=turn needs a reward made of {task.credited}; use credit=episode."
        )
    return np.concatenate([values, np.zeros(len(turns) - len(values))])


def credit_turns(episode: Trajectory, task: Task, reward_args: Mapping[str, Any]) -> Trajectory | None:
    """An episode of an evaluation with the shares of its reward that credit per turn gives to its responses.

    Args:
        reward_args: `reward.args` of the run.

    Returns:
        A copy; None where the turns do not add up to the reward, so that credit per turn would change it.
    """
    if episode.reward is None:
        return None
    try:
        shares = iter(turn_credit(episode, task, reward_args).tolist())
    except ValueError:
        return None
    turns = [replace(turn, credit=next(shares)) if turn.role == "assistant" else turn for turn in episode.turns]
    return replace(episode, turns=turns)


def _version_reason(episode: Trajectory, rule: str, newest: int) -> str | None:
    """Why a stale episode, with tokens of older policy versions, is not trained; None if the rule allows it."""
    versions = _versions(episode)
    if rule == "drop" and versions - {newest}:
        return MIXED_VERSIONS
    return STALE if rule == "mask" and newest not in versions else None


def _versions(episode: Trajectory) -> set[int]:
    """Policy versions that sampled at least one token."""
    return {version for version, start, end in episode.weight_spans if end > start}


def _observation_keys(episode: Trajectory) -> list[Hashable]:
    """One key per turn of the policy: text and images of the user turn before it (GiGPO: its anchor state)."""
    return [
        (before.text, *(episode.images[index] for index in before.image_indices))
        for before, turn in zip(episode.turns, episode.turns[1:], strict=False)
        if turn.role == "assistant"
    ]


def _signal(graded: Sequence[Trajectory], group: int, per_turn: Sequence[Floats] | None) -> GroupSignal:
    members = [number for number, episode in enumerate(graded) if episode.group_index == group]
    solved = [is_solved(graded[number]) for number in members]
    return GroupSignal(
        rewards=[float(graded[number].reward or 0.0) for number in members],
        successes=None if any(value is None for value in solved) else [bool(value) for value in solved],
        turn_advantages=None
        if per_turn is None
        else np.concatenate([np.empty(0), *(per_turn[number] for number in members)]).tolist(),
    )


# The dynamic filter: which groups carry a signal worth an optimizer step. The decision on a group depends on its own
# episodes only. A group without a graded episode is always dropped, however few groups remain.


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


# Advantages of episodes: an episode's reward relative to the other episodes of its group.


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
    *,
    per_group: bool = False,
    baseline: Baseline = "turn",
    observation_keys: Sequence[Sequence[Hashable]] | None = None,
) -> list[Floats]:
    """Advantage of each turn: its return minus the mean return of its cell, which is the comparable turns of a group.

    Args:
        values: one (n_e,) array per episode, the part of its reward that each turn has earned.
        group_index: group of each episode.
        gamma: discount per turn, in [0, 1].
        per_group: divide each group by the unbiased standard deviation of its turn advantages + 1e-6.
        baseline: "turn": the group's episodes that are alive at the turn index; "board": the group's turns with one
            observation (arXiv 2505.10978).
        observation_keys: for "board", one key per turn and episode: what the policy saw before the turn.

    Returns:
        One (n_e,) float64 per episode. A cell with one turn, or with equal returns, gives exactly 0.
    """
    if len(values) != len(group_index):
        raise ValueError(f"values has {len(values)} episodes and group_index {len(group_index)} entries.")
    to_go = [returns(episode, gamma) for episode in values]
    advantages = [np.zeros(len(episode), dtype=np.float64) for episode in to_go]
    for places in _cells(to_go, group_index, baseline, observation_keys).values():
        cell = centred(np.array([to_go[episode][turn] for episode, turn in places]))
        for (episode, turn), advantage in zip(places, cell, strict=True):
            advantages[episode][turn] = advantage
    if per_group:
        _scale_groups(advantages, group_index)
    return advantages


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
