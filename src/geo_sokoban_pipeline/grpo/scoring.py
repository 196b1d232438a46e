"""Scoring: computes advantages from the rewards of an iteration, and decides which episodes are trained.

`score_groups` changes nothing, so that collecting can call it at any time to see whether the groups so far are enough;
`apply_scores` writes the result into the episodes, once. The update reads only the episodes, so a stored iteration can
be trained again exactly.

The advantage itself is the function that `grpo.advantage` names (`grpo.estimators`). Here its input is made, it is
called, and the filter, the scale and the clip that all advantages share are applied.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import orjson
from numpy.typing import ArrayLike

from geo_sokoban_pipeline.config.estimators import OverlongOptions
from geo_sokoban_pipeline.config.grpo import GrpoOptions
from geo_sokoban_pipeline.envs.base import Task
from geo_sokoban_pipeline.grpo.advantages.distillation import token_advantages
from geo_sokoban_pipeline.grpo.estimators import Estimator, estimate_advantages, keeps_zeros, load_estimator
from geo_sokoban_pipeline.grpo.groups import (
    EQUAL_REWARDS,
    Episodes,
    Floats,
    group_advantages,
    is_constant,
    scale_by_rms,
)
from geo_sokoban_pipeline.trajectories.types import TableContext, Trajectory, Turn

_TOLERANCE = 1e-6
_AS_STORED = orjson.OPT_SORT_KEYS | orjson.OPT_SERIALIZE_NUMPY  # a state is the same before and after it is stored

FilterKind = Literal["none", "zero_variance", "mixed_success"]
# In the info of a turn: the part of the reward that the reward function itself gave it.
REWARD_PART = "reward_function.part"
# The value of the state before a turn, by continuations.
STATE_VALUE = "forks.value"
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
        advantage: of the episode; where its turns have some, its tokens have `turn_advantages` instead.
        drop_reason: why it is not trained; None: no reason.
        trained: whether it is trained; False also without a sampled token.
        turn_credits: (turns,) part of the reward of each assistant turn; None unless the advantage is made of them.
        turn_advantages: (turns,) advantage of the tokens of each assistant turn; None for one of the episode.
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
        options: advantage, normalisation, filter.
        task: its `turn_values` are the rewards of turns.
        reward_args: the reward's arguments.
        min_groups: replaces `options.min_groups`; None: does not.
        max_trained_groups: above it, groups are dropped as `surplus`, and so are all with an aborted episode. None: all
            groups that the filter keeps.

    Raises:
        ValueError: the advantage needs rewards of turns, and those of an episode do not add up to its reward.
        EstimatorError: the advantage raised, or its result does not fit.
    """
    places = [place for place, episode in enumerate(trajectories) if episode.reward is not None]
    graded = [trajectories[place] for place in places]
    group_of = [episode.group_index for episode in graded]

    # Advantages of the bare rewards, as if all episodes were trained: the filter looks at them.
    estimator = load_estimator("advantage", options)
    turn_credits = _turn_credits(graded, task, reward_args, estimator)
    episodes = _describe(graded, turn_credits, options)
    found = estimate_advantages(estimator, episodes)

    # Filter: whole groups first, then stale episodes.
    groups = sorted({episode.group_index for episode in trajectories})
    shown = found.values if found.per_turn or not estimator.zero_on_equal_groups else None
    signals = [_signal(graded, group, shown) for group in groups]
    least = options.min_groups if min_groups is None else min_groups
    reasons = dict(zip(groups, keep_groups(signals, options.filter, least), strict=True))
    if max_trained_groups is not None:
        aborted = {episode.group_index for episode in trajectories if episode.status == "aborted"}
        kept = [group for group, reason in reasons.items() if reason is None]
        complete = [group for group in kept if group not in aborted]
        reasons |= dict.fromkeys(set(kept) - set(complete[:max_trained_groups]), "surplus")
    newest = newest_version(trajectories)
    drop_reasons = [
        reasons[episode.group_index] or _version_reason(episode, options.mixed_versions, newest) for episode in graded
    ]
    trained = [
        reason is None and bool(episode.loss_mask.any()) for episode, reason in zip(graded, drop_reasons, strict=True)
    ]

    # Again with the penalty of long episodes, and with estimates over the whole iteration of the trained ones alone.
    if options.overlong is not None:
        episodes = _penalise(episodes, options.overlong)
    if options.overlong is not None or not all(trained):
        found = estimate_advantages(estimator, replace(episodes, trained=np.array(trained, bool)))
    advantages = found.values
    if options.normalize == "rms" and not estimator.per_token:
        advantages = scale_by_rms(advantages, trained)
    if options.advantage_clip is not None:
        advantages = [np.clip(row, -options.advantage_clip, options.advantage_clip) for row in advantages]
    # Beside advantages of turns, the episode's own number is its reward within the group, on the same scale.
    by_std = getattr(estimator.args, "scale", None) == "std"
    whole = group_advantages(episodes.reward, episodes.group, normalize_std=by_std)
    if options.advantage_clip is not None and options.normalize != "rms":
        whole = np.clip(whole, -options.advantage_clip, options.advantage_clip)

    scores: list[EpisodeScore | None] = [None] * len(trajectories)
    for number, place in enumerate(places):
        scores[place] = EpisodeScore(
            advantage=float(whole[number] if found.per_turn else advantages[number][0]),
            drop_reason=drop_reasons[number],
            trained=trained[number],
            turn_credits=turn_credits[number] if turn_credits and estimator.needs_turn_rewards else None,
            turn_advantages=advantages[number] if found.per_turn else None,
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
        for name, values in (("credit", score.turn_credits), ("advantage", score.turn_advantages)):
            if values is not None:
                for turn, value in zip(assistant_turns(episode), values, strict=True):
                    setattr(turn, name, float(value))


def scored_context(context: TableContext, options: GrpoOptions) -> TableContext:
    """Context of a table of scored episodes, with what their advantages promise."""
    return replace(context, zero_on_equal_groups=keeps_zeros(options))


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

    Those that the reward itself gave; else the worths by the task's rule; else the rewards of the environment's steps.

    Raises:
        ValueError: none of them adds up to the episode's reward.
    """
    turns = assistant_turns(episode)
    stepped = [turn for turn in turns if turn.reward is not None]
    rewards, infos = [float(turn.reward or 0.0) for turn in stepped], [turn.info for turn in stepped]
    given = [turn.info[REWARD_PART] for turn in turns if REWARD_PART in turn.info]
    reward = float(episode.reward or 0.0)
    if given and not adds_up(np.asarray(given, np.float64), reward):
        raise ValueError(f"a reward of {reward:g} with `turns` that add up to {sum(given):g}")
    found = given or turn_rewards(task, rewards, infos, episode.reward_parts, reward_args, reward)
    return np.concatenate([np.asarray(found, np.float64), np.zeros(len(turns) - len(found))])


def turn_rewards(
    task: Task,
    rewards: Sequence[float],
    infos: Sequence[Mapping[str, Any]],
    parts: Mapping[str, float],
    reward_args: Mapping[str, Any],
    reward: float,
) -> Floats:
    """Worth of each stepped turn, by the task's rule or, where that does not add up, as the environment rewarded it.

    Args:
        rewards, infos: of the steps that report a reward.
        parts: of the episode's reward.
        reward: of the episode.

    Raises:
        ValueError: neither adds up to the reward.
    """
    values = np.asarray(task.turn_values(rewards, [dict(info) for info in infos], parts, reward_args), np.float64)
    for candidate in (values, np.asarray(rewards, np.float64)):
        if adds_up(candidate, reward):
            return candidate
    raise refuse_reward(task, reward, values)


def refuse_reward(task: Task, reward: float, values: Floats) -> ValueError:
    """The error about an episode whose reward is not the sum of its turns' worths."""
    why = f"turns that add up to {values.sum():g}" if len(values) else "steps that report no turn_reward in their info"
    return ValueError(
        f"a reward of {reward:g} with {why}: this grpo.advantage needs a reward made of {task.credited}, or one that "
        "returns its `turns` (docs/your_own_reward.md); else take an advantage of whole episodes, such as "
        "grpo.advantage=grpo."
    )


def credit_turns(episode: Trajectory, task: Task, reward_args: Mapping[str, Any]) -> Trajectory | None:
    """An episode of an evaluation with the parts of its reward that its responses have earned.

    Args:
        reward_args: `reward.args` of the run.

    Returns:
        A copy; None where they do not add up to the reward.
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


def _turn_credits(
    graded: Sequence[Trajectory], task: Task, reward_args: Mapping[str, Any], estimator: Estimator
) -> list[Floats] | None:
    """Rewards of the turns of all episodes; None where those of one do not add up and the estimator needs none."""
    credits: list[Floats] = []
    for episode in graded:
        try:
            credits.append(turn_credit(episode, task, reward_args))
        except ValueError as error:
            if estimator.needs_turn_rewards:
                raise ValueError(f"episode {episode.trajectory_id}: {error}") from error
            return None
    return credits


def _describe(graded: Sequence[Trajectory], turn_credits: list[Floats] | None, options: GrpoOptions) -> Episodes:
    """Graded episodes as an advantage sees them, all with a sampled token trained."""
    lengths = [
        np.array([turn.token_end - turn.token_start for turn in assistant_turns(episode)], np.int64)
        for episode in graded
    ]
    return Episodes(
        group=np.array([episode.group_index for episode in graded], np.int64),
        reward=np.array([episode.reward for episode in graded], np.float64),
        trained=np.array([bool(episode.loss_mask.any()) for episode in graded], bool),
        lengths=lengths,
        turn_rewards=turn_credits,
        state_keys=[_state_keys(episode) for episode in graded],
        success=[is_solved(episode) for episode in graded],
        versions=np.array([max(_versions(episode), default=-1) for episode in graded], np.int64),
        state_values=[state_values(episode) for episode in graded],
        teacher_gaps=[teacher_gaps(episode, options) for episode in graded],
    )


def state_values(episode: Trajectory) -> Floats:
    """(turns,) values of the states before its responses by continuations; NaN where they are not measured."""
    return np.array([turn.info.get(STATE_VALUE, np.nan) for turn in assistant_turns(episode)], np.float64)


def overlong_penalty(lengths: ArrayLike, options: OverlongOptions) -> Floats:
    """DAPO's soft penalty of long episodes (arXiv 2503.14476, section 3.4), to be added to the rewards.

    Args:
        lengths: (N,) sampled tokens of each episode, over all its responses.

    Returns:
        (N,) float64 in [−1, 0]: 0 up to `length − buffer`, falling to −1 at `length`.
    """
    over = np.asarray(lengths, np.float64) - (options.length - options.buffer)
    return -np.clip(over / options.buffer, 0.0, 1.0)


def _penalise(episodes: Episodes, options: OverlongOptions) -> Episodes:
    """Episodes whose rewards have the penalty of their length; of their turns, the last one has it."""
    penalty = overlong_penalty([own.sum() for own in episodes.lengths], options)
    turns = episodes.turn_rewards
    if turns is not None:
        turns = [np.append(own[:-1], own[-1:] + less) for own, less in zip(turns, penalty, strict=True)]
    return replace(episodes, reward=episodes.reward + penalty, turn_rewards=turns)


def teacher_gaps(episode: Trajectory, options: GrpoOptions) -> Floats:
    """(tokens,) log-probs of sampled tokens under the teacher less those of the policy, clipped like advantages.

    Empty where the teacher has not scored the episode.
    """
    if options.teacher is None or episode.ref_log_probs is None:
        return np.zeros(0)
    own = episode.rollout_log_probs if episode.old_log_probs is None else episode.old_log_probs
    sampled = episode.loss_mask == 1
    return distil(episode.ref_log_probs[sampled], own[sampled], options)


def distil(teacher: ArrayLike, own: ArrayLike, options: GrpoOptions) -> Floats:
    """(M,) advantages of tokens from their log-probs under teacher and policy, clipped like all others."""
    gaps, clip = token_advantages(teacher, own), options.advantage_clip
    return gaps if clip is None else np.clip(gaps, -clip, clip)


def _state_keys(episode: Trajectory) -> list[Hashable]:
    """One key per turn of the policy: the state before it.

    It is what the environment's step before gave as `info["state_key"]`; else the text and the images of the user turn
    before (the anchor state of GiGPO, arXiv 2505.10978).
    """
    keys: list[Hashable] = []
    state: Hashable = None
    for before, turn in zip(episode.turns, episode.turns[1:], strict=False):
        if turn.role == "assistant":
            seen = (before.text, *(episode.images[index] for index in before.image_indices))
            keys.append(seen if state is None else ("state", state))
            key = turn.info.get("state_key")
            state = None if key is None else orjson.dumps(key, option=_AS_STORED)
    return keys


def _signal(graded: Sequence[Trajectory], group: int, advantages: Sequence[Floats] | None) -> GroupSignal:
    members = [number for number, episode in enumerate(graded) if episode.group_index == group]
    solved = [is_solved(graded[number]) for number in members]
    return GroupSignal(
        rewards=[float(graded[number].reward or 0.0) for number in members],
        successes=None if any(value is None for value in solved) else [bool(value) for value in solved],
        advantages=None
        if advantages is None
        else np.concatenate([np.empty(0), *(advantages[number] for number in members)]).tolist(),
    )


# The dynamic filter: which groups carry a signal worth an optimizer step. The decision on a group depends on its own
# episodes only. A group without a graded episode is always dropped, however few groups remain.


@dataclass(frozen=True)
class GroupSignal:
    """The filter's input of one group.

    Attributes:
        rewards: reward of each graded episode, without failed and aborted ones.
        successes: whether each of them was solved; None for a task without success.
        advantages: all of the group, of episodes or turns; None: they are 0 exactly where the rewards are equal.
    """

    rewards: Sequence[float]
    successes: Sequence[bool] | None = None
    advantages: Sequence[float] | None = None

    @property
    def has_signal(self) -> bool:
        """Whether any advantage differs from 0."""
        if self.advantages is not None:
            return bool(np.any(np.abs(np.asarray(self.advantages, dtype=np.float64)) > EQUAL_REWARDS))
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
