"""Scoring: computes advantages from the rewards of an iteration, and decides which episodes are trained.

`score_groups` changes nothing, so that collecting can call it at any time to see whether the groups so far are enough;
`apply_scores` writes the result into the episodes, once. The update reads only the episodes, so a stored iteration can
be trained again exactly.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from geo_sokoban_pipeline.config.grpo import GrpoOptions
from geo_sokoban_pipeline.grpo.advantages import Floats, group_advantages, scale_by_rms, turn_advantages, turn_values
from geo_sokoban_pipeline.grpo.filters import GroupSignal, drop_counts, keep_groups, zero_std_counts
from geo_sokoban_pipeline.trajectories.types import Trajectory, Turn

_TOLERANCE = 1e-6


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
    reward_args: Mapping[str, Any],
    *,
    min_groups: int | None = None,
    max_trained_groups: int | None = None,
) -> Scores:
    """Advantages of an iteration's episodes, and which of them pass the dynamic filter; changes nothing.

    Args:
        trajectories: episodes of one iteration, groups by `group_index`.
        options: credit, normalisation, filter.
        reward_args: the reward's arguments; credit per turn uses `aggregate` and `distance_weight`.
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
        turn_credits = [turn_credit(episode, reward_args) for episode in graded]
        per_turn = turn_advantages(
            turn_credits,
            group_of,
            options.gamma,
            normalize="std" if options.normalize == "std" else "none",
            baseline=options.baseline,
            board_keys=[_observation_keys(episode) for episode in graded] if options.baseline == "board" else None,
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


def turn_worth(episode: Trajectory, reward_args: Mapping[str, Any]) -> Floats:
    """Worth of each turn that the environment stepped; for credit per turn they must add up to the reward."""
    turns = [turn for turn in assistant_turns(episode) if turn.reward is not None]
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
    """Whether the worths of an episode's turns add up to its reward."""
    return abs(float(values.sum()) - reward) <= _TOLERANCE * max(1.0, abs(reward))


def turn_credit(episode: Trajectory, reward_args: Mapping[str, Any]) -> Floats:
    """Part of the reward of each assistant turn; 0 for a response that was cut off and not stepped.

    Raises:
        ValueError: the turns do not add up to the episode's reward, so credit per turn would change the objective.
    """
    values = turn_worth(episode, reward_args)
    if not adds_up(values, float(episode.reward or 0.0)):
        raise ValueError(
            f"episode {episode.trajectory_id} has reward {episode.reward}, but its turns add up to {values.sum()}: "
            "grpo.credit=turn needs a reward made of turn rewards, distance and final bonus; use credit=episode."
        )
    return np.concatenate([values, np.zeros(len(assistant_turns(episode)) - len(values))])


def _version_reason(episode: Trajectory, rule: str, newest: int) -> str | None:
    """Why a stale episode, with tokens of older policy versions, is not trained; None if the rule allows it."""
    versions = _versions(episode)
    if rule == "drop" and versions - {newest}:
        return "mixed_versions"
    return "stale" if rule == "mask" and newest not in versions else None


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
