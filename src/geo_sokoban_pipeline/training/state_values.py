"""Values of states of an iteration's episodes, by continuations from them, within a budget.

Episodes are measured that are trained, in groups whose rewards differ: in other groups all advantages are 0. States are
measured in the order of how unlikely the response before them was. A certain response has the advantage 0, so the state
after it is worth what the one before was; and what has led to a state does not depend on the responses after it, so
that the choice hardly biases the advantages of these (cutpoints of SPO, arXiv 2505.23564, section 4; here the border
lies where the budget of the iteration ends). All measured states get equally many continuations: more where the first
ones differ would move their means away from even odds.

Prompts are not measured, because the other episodes of the group are their continuations. Values are part of the stored
episodes, so that an audit and a second update compute the same advantages.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from geo_sokoban_pipeline.config.estimators import VineArguments
from geo_sokoban_pipeline.evaluation.forks import Node, history_of, play_nodes
from geo_sokoban_pipeline.grpo.groups import is_constant
from geo_sokoban_pipeline.grpo.scoring import STATE_VALUE
from geo_sokoban_pipeline.rollout.episode import EpisodeRequest, responses_of
from geo_sokoban_pipeline.seeding import content_hash
from geo_sokoban_pipeline.trajectories.types import Trajectory, Turn

RollOut = Callable[[Sequence[EpisodeRequest]], Sequence[Trajectory]]


def measure_states(
    trajectories: Sequence[Trajectory],
    rows: Sequence[Mapping[str, Any]],
    options: VineArguments,
    root: int,
    roll_out: RollOut,
    is_fixed: Callable[[Mapping[str, Any]], bool] = lambda row: False,
) -> dict[str, float]:
    """Write the values of states into the `info` of the turns after them (`STATE_VALUE`).

    Args:
        trajectories: of one iteration, scored without these values.
        rows: prompt of each group.
        root: seed that all seeds of continuations follow from.
        roll_out: rolls out by the policy that sampled the episodes.
        is_fixed: whether the environment of a prompt draws all its randomness by the seed of the episode: episodes
            with equal histories then have different states. Asked once, of a prompt that has been rolled out.

    Returns:
        `rollout/forks/…`: the `states` that are measured, the `continuations`, and `cutpoint`, the largest probability
        of a response whose following state is measured.
    """
    nodes: dict[str, Node] = {}
    likely: dict[str, float] = {}  # log-prob of the response before a state
    turns: list[tuple[str, Turn]] = []
    measured = _with_signal(trajectories)
    by_seed = bool(measured) and is_fixed(rows[measured[0].group_index])
    for episode in measured:
        for node, turn, log_prob in _states(episode, rows[episode.group_index], by_seed):
            nodes.setdefault(node.history, node)
            likely.setdefault(node.history, log_prob)
            turns.append((node.history, turn))
    chosen = sorted(nodes, key=likely.__getitem__)[: options.continuations // options.each]
    found = play_nodes([nodes[history] for history in chosen], range(options.each), root, roll_out) if chosen else []
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
        "rollout/forks/cutpoint": math.exp(likely[chosen[-1]]) if chosen else 0.0,
    }


def _with_signal(trajectories: Sequence[Trajectory]) -> list[Trajectory]:
    """The trained episodes of groups whose rewards differ."""
    rewards: dict[int, list[float]] = {}
    for episode in trajectories:
        if episode.reward is not None:
            rewards.setdefault(episode.group_index, []).append(episode.reward)
    groups = {group for group, values in rewards.items() if not is_constant(np.array(values))}
    return [episode for episode in trajectories if episode.trained and episode.group_index in groups]


def _states(episode: Trajectory, row: Mapping[str, Any], by_seed: bool) -> Iterator[tuple[Node, Turn, float]]:
    """The states of an episode behind its prompt, each with the response after it and the log-prob of that before."""
    responses = responses_of(episode)
    numbers = [number for number, turn in enumerate(episode.turns) if turn.role == "assistant"]
    for place, number in enumerate(numbers[1:], start=1):
        history = history_of(episode, number)
        node = Node(
            history=content_hash(history, str(episode.seed)) if by_seed else history,
            row=row,
            past=responses[:place],
            reseed_at=place,
            env_seed=episode.seed,
            parent=f"{episode.trajectory_id}/t{number:02d}",
        )
        yield node, episode.turns[number], float(responses[place - 1].log_probs.sum())
