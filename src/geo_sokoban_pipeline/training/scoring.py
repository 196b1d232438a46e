"""Scoring: rewards of an iteration become advantages, and the dynamic filter decides which groups are trained.

Everything is written into the trajectories (`advantage`, turn advantages, `trained`, `drop_reason`), so the update
needs nothing else, and a stored iteration can be trained again exactly.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import numpy as np

from geo_sokoban_pipeline.config.grpo import GrpoOptions
from geo_sokoban_pipeline.grpo.advantages import group_advantages, scale_by_rms, turn_advantages, turn_values
from geo_sokoban_pipeline.grpo.filters import GroupSignal, drop_counts, keep_groups, zero_std_counts
from geo_sokoban_pipeline.trajectories.types import Trajectory, Turn

_TOLERANCE = 1e-6


def score_trajectories(
    trajectories: Sequence[Trajectory],
    options: GrpoOptions,
    reward_args: Mapping[str, Any],
    *,
    min_groups: int | None = None,
    most: int | None = None,
) -> dict[str, float]:
    """Set advantages and decide what is trained, in place.

    Args:
        trajectories: episodes of one iteration, groups by `group_index`.
        options: credit, normalisation, filter.
        reward_args: the reward's arguments; `aggregate` and `distance_weight` hold for credit per turn.
        min_groups: in place of `options.min_groups`.
        most: groups that are trained at most, whole ones only; further ones are dropped as `surplus`. None: all that
            the filter keeps, also those that have lost an episode.

    Returns:
        Metrics: `rollout/dynamic_filter/drop_<reason>`, `rollout/zero_std/count_<reward>`, `rollout/groups`.
    """
    graded = [episode for episode in trajectories if episode.reward is not None]
    groups = sorted({episode.group_index for episode in trajectories})
    per_turn = _turn_credit(graded, options, reward_args) if options.credit == "turn" else None
    _set_episode_advantages(graded, options)
    least = options.min_groups if min_groups is None else min_groups
    signals = [_signal(graded, group, per_turn) for group in groups]
    reasons = dict(zip(groups, keep_groups(signals, options.filter, least), strict=True))
    if most is not None:
        _limit_groups(reasons, {e.group_index for e in trajectories if e.status == "aborted"}, most)
    unfit = _version_reasons(graded, options.mixed_versions, newest_version(trajectories))
    for episode in graded:
        reason = reasons[episode.group_index] or unfit.get(id(episode))
        episode.trained = reason is None and bool(episode.loss_mask.any())
        episode.drop_reason = reason
    if per_turn is not None:
        _set_turn_advantages(graded, per_turn, options)
    elif options.normalize == "rms":
        _scale_episodes(graded, options)
    return {
        "rollout/groups": float(len(groups)),
        **{name: float(value) for name, value in drop_counts(signals, list(reasons.values())).items()},
        **{name: float(value) for name, value in zero_std_counts(signals).items()},
    }


def replies(trajectory: Trajectory) -> list[Turn]:
    """The assistant's turns of an episode."""
    return [turn for turn in trajectory.turns if turn.role == "assistant"]


def is_solved(trajectory: Trajectory) -> bool | None:
    """Whether an episode succeeded; None where the task knows no success."""
    success = trajectory.metrics.get("success")
    return None if success is None else success >= 0.5


def _limit_groups(reasons: dict[int, str | None], broken: set[int], most: int) -> None:
    """Keep so many groups, in order, and none of those that were broken off."""
    kept = [group for group, reason in reasons.items() if reason is None]
    whole = [group for group in kept if group not in broken]
    for group in set(kept) - set(whole[:most]):
        reasons[group] = "surplus"


def _version_reasons(episodes: Sequence[Trajectory], rule: str, newest: int) -> dict[int, str]:
    """Why episodes with tokens of older weights are dropped, by `id`; those that the rule allows are not in it."""
    reasons = {}
    for episode in episodes:
        versions = _versions(episode)
        if rule == "drop" and versions - {newest}:
            reasons[id(episode)] = "mixed_versions"
        elif rule == "mask" and newest not in versions:
            reasons[id(episode)] = "stale"
    return reasons


def newest_version(episodes: Sequence[Trajectory]) -> int:
    """Version of the newest weights that have sampled any of the episodes; −1 where none has a token."""
    return max((version for episode in episodes for version in _versions(episode)), default=-1)


def _versions(episode: Trajectory) -> set[int]:
    """Versions of the weights that have sampled at least one token."""
    return {version for version, start, end in episode.weight_spans if end > start}


def _set_episode_advantages(graded: Sequence[Trajectory], options: GrpoOptions) -> None:
    if not graded:
        return
    rewards = [float(episode.reward or 0.0) for episode in graded]
    groups = [episode.group_index for episode in graded]
    values = group_advantages(rewards, groups, normalize_std=options.normalize == "std")
    if options.advantage_clip is not None and options.normalize != "rms":
        values = np.clip(values, -options.advantage_clip, options.advantage_clip)
    for episode, value in zip(graded, values, strict=True):
        episode.advantage = float(value)


def _turn_credit(
    graded: Sequence[Trajectory], options: GrpoOptions, reward_args: Mapping[str, Any]
) -> list[np.ndarray]:
    values = [turn_credit(episode, reward_args) for episode in graded]
    for episode, row in zip(graded, values, strict=True):
        for turn, value in zip(replies(episode), row, strict=True):
            turn.credit = float(value)
    boards = [_board_keys(episode) for episode in graded] if options.baseline == "board" else None
    return turn_advantages(
        values,
        [episode.group_index for episode in graded],
        options.gamma,
        normalize="std" if options.normalize == "std" else "none",
        baseline=options.baseline,
        board_keys=boards,
    )


def turn_worth(episode: Trajectory, reward_args: Mapping[str, Any]) -> np.ndarray:
    """Worth of each reply that the environment saw, which for credit per turn must add up to the episode's reward."""
    turns = [turn for turn in replies(episode) if turn.reward is not None]
    parts = episode.reward_parts
    distances = [parts.get("dist0"), *(turn.info.get("box_target_distance") for turn in turns)]
    cells = [float(distance) for distance in distances if distance is not None]
    return turn_values(
        [turn.reward for turn in turns if turn.reward is not None],
        cells if len(cells) == len(distances) else None,
        parts.get("final_bonus", 0.0),
        reward_args.get("aggregate", "mean"),
        float(reward_args.get("distance_weight", 1.0)),
    )


def adds_up(values: np.ndarray, reward: float) -> bool:
    """Whether the worth of an episode's turns is its reward."""
    return abs(float(values.sum()) - reward) <= _TOLERANCE * max(1.0, abs(reward))


def turn_credit(episode: Trajectory, reward_args: Mapping[str, Any]) -> np.ndarray:
    """Share of the reward that each reply gets; one that the environment never saw (cut off at a limit) gets none.

    Raises:
        ValueError: the turns do not add up to the episode's reward, so credit per turn would train something else.
    """
    values = turn_worth(episode, reward_args)
    if not adds_up(values, float(episode.reward or 0.0)):
        raise ValueError(
            f"episode {episode.trajectory_id} has reward {episode.reward}, but its turns add up to {values.sum()}: "
            "grpo.credit=turn needs a reward made of turn rewards, distance and final bonus; use credit=episode."
        )
    return np.concatenate([values, np.zeros(len(replies(episode)) - len(values))])


def _board_keys(episode: Trajectory) -> list[Hashable]:
    """What each reply looked at: the pictures and text of the user turn before it."""
    keys: list[Hashable] = []
    for before, turn in zip(episode.turns, episode.turns[1:], strict=False):
        if turn.role == "assistant":
            keys.append((before.text, *(episode.images[index] for index in before.image_indices)))
    return keys


def _signal(graded: Sequence[Trajectory], group: int, per_turn: Sequence[np.ndarray] | None) -> GroupSignal:
    members = [index for index, episode in enumerate(graded) if episode.group_index == group]
    solved = [is_solved(graded[index]) for index in members]
    return GroupSignal(
        rewards=[float(graded[index].reward or 0.0) for index in members],
        successes=None if any(value is None for value in solved) else [bool(value) for value in solved],
        turn_advantages=None
        if per_turn is None
        else np.concatenate([np.empty(0), *(per_turn[i] for i in members)]).tolist(),
    )


def _set_turn_advantages(graded: Sequence[Trajectory], values: list[np.ndarray], options: GrpoOptions) -> None:
    if options.normalize == "rms":
        values = scale_by_rms(values, [episode.trained for episode in graded], clip=options.advantage_clip)
    elif options.advantage_clip is not None:
        values = [np.clip(row, -options.advantage_clip, options.advantage_clip) for row in values]
    for episode, row in zip(graded, values, strict=True):
        for turn, value in zip(replies(episode), row, strict=True):
            turn.advantage = float(value)


def _scale_episodes(graded: Sequence[Trajectory], options: GrpoOptions) -> None:
    rows = [np.array([episode.advantage]) for episode in graded]
    scaled = scale_by_rms(rows, [episode.trained for episode in graded], clip=options.advantage_clip)
    for episode, row in zip(graded, scaled, strict=True):
        episode.advantage = float(row[0])
