"""Values of states of an iteration's episodes, by continuations from them, within a budget.

Only groups that are trained and whose rewards differ get continuations: in the others all advantages are 0. States are
measured in the order of how unlikely the response before them was: a certain response has the advantage 0, so the state
after it is worth what the one before was. Whether a state is measured follows from what has led to it, not from what
comes after it, so the choice does not bias the advantages (cutpoints of SPO, arXiv 2505.23564, section 4).

Half of the budget gives each measured state its first continuations; the rest goes to those whose ends differ. Values
are part of the stored episodes, so that an audit and a second update compute the same advantages.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from geo_sokoban_pipeline.config.estimators import VineArguments
from geo_sokoban_pipeline.evaluation.forks import Node, Outcome, differ, history_of, play_nodes
from geo_sokoban_pipeline.grpo.groups import is_constant
from geo_sokoban_pipeline.grpo.scoring import STATE_VALUE
from geo_sokoban_pipeline.rollout.episode import EpisodeRequest, responses_of
from geo_sokoban_pipeline.trajectories.types import Trajectory, Turn

RollOut = Callable[[Sequence[EpisodeRequest]], Sequence[Trajectory]]


def measure_states(
    trajectories: Sequence[Trajectory],
    rows: Sequence[Mapping[str, Any]],
    options: VineArguments,
    root: int,
    roll_out: RollOut,
) -> dict[str, float]:
    """Write the values of states into the `info` of the turns after them (`STATE_VALUE`).

    Args:
        trajectories: of one iteration, scored without these values.
        rows: prompt of each group.
        root: seed that all seeds of continuations follow from.
        roll_out: rolls out by the policy that sampled the episodes.

    Returns:
        `rollout/forks/…`: the `states` that are measured, the `continuations`, and `cutpoint`, the largest probability
        of a response whose following state is measured.
    """
    nodes: dict[str, Node] = {}
    likely: dict[str, float] = {}  # probability of the response before a state; 0 of a prompt
    turns: list[tuple[str, Turn]] = []
    for episode in _with_signal(trajectories):
        for node, turn, probability in _states(episode, rows[episode.group_index]):
            nodes.setdefault(node.history, node)
            likely.setdefault(node.history, probability)
            turns.append((node.history, turn))
    most = max(options.continuations // 2 // options.first, sum(not value for value in likely.values()))
    chosen = sorted(nodes, key=likely.__getitem__)[:most]
    found = _continue([nodes[history] for history in chosen], options, root, roll_out)
    values = {
        history: float(np.mean(known))
        for history, ends in zip(chosen, found, strict=True)
        if (known := [end.reward for end in ends if end.reward is not None])
    }
    for history, turn in turns:
        if history in values:
            turn.info = {**turn.info, STATE_VALUE: values[history]}
    return {
        "rollout/forks/states": float(len(chosen)),
        "rollout/forks/continuations": float(sum(map(len, found))),
        "rollout/forks/cutpoint": likely[chosen[-1]] if chosen else 0.0,
    }


def _with_signal(trajectories: Sequence[Trajectory]) -> list[Trajectory]:
    """The graded episodes of trained groups whose rewards differ."""
    rewards: dict[int, list[float]] = {}
    for episode in trajectories:
        if episode.trained and episode.reward is not None:
            rewards.setdefault(episode.group_index, []).append(episode.reward)
    groups = {group for group, values in rewards.items() if not is_constant(np.array(values))}
    return [episode for episode in trajectories if episode.group_index in groups and episode.reward is not None]


def _states(episode: Trajectory, row: Mapping[str, Any]) -> Iterator[tuple[Node, Turn, float]]:
    """The states of an episode, each with the response after it and the probability of the one before it."""
    responses, probability = responses_of(episode), 0.0
    numbers = [number for number, turn in enumerate(episode.turns) if turn.role == "assistant"]
    for place, number in enumerate(numbers):
        node = Node(
            history=history_of(episode, number),
            row=row,
            past=responses[:place],
            texts=(),
            reseed_at=place,
            sampler=(None, ""),
            parent=f"{episode.trajectory_id}/t{number:02d}",
        )
        yield node, episode.turns[number], probability
        probability = math.exp(float(responses[place].log_probs.sum()))


def _continue(nodes: Sequence[Node], options: VineArguments, root: int, roll_out: RollOut) -> list[list[Outcome]]:
    """The ends of the continuations of each node, in two stages."""
    ends = play_nodes(nodes, range(options.first), root, roll_out) if nodes else []
    open_ended = [place for place, own in enumerate(ends) if differ(own)]
    left = max(0, options.continuations - options.first * len(nodes))
    if open_ended and (more := left // len(open_ended)):
        numbers = range(options.first, options.first + more)
        further = play_nodes([nodes[place] for place in open_ended], numbers, root, roll_out)
        for place, own in zip(open_ended, further, strict=True):
            ends[place] += own
    return ends
