"""Forks: the worth of each turn of stored episodes, measured by sampling on from the states before and after it.

A stored episode is carried out again up to a turn; from there a player continues many times. The value of a state is
the mean reward of the whole episode over these continuations, undiscounted, which is what GRPO maximises. The advantage
of a turn is the value after its response minus the value before it (VinePPO, arXiv 2410.01679, estimates it alike).
Where one policy has sampled an episode, whose environment has no chance, the advantages of all its turns add up to its
reward minus the value of its prompt.

Equal histories are one node, whose continuations all turns share that are forked together. Seeds follow from the
history alone, so a value does not depend on the other episodes of the command; its interval does by the range of the
rewards that were seen. A continuation is no episode of a run: only its reward and success are kept, so nothing trains
on it, indexes it or scores it.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import pyarrow as pa

from geo_sokoban_pipeline.config.grpo import ForkPipelineOptions
from geo_sokoban_pipeline.envs.metrics import wilson_interval
from geo_sokoban_pipeline.evaluation.replay import ReplayedStates, Replayer
from geo_sokoban_pipeline.rollout.engines.base import Result
from geo_sokoban_pipeline.rollout.episode import EpisodeRequest, responses_of
from geo_sokoban_pipeline.seeding import content_hash, derive_seed
from geo_sokoban_pipeline.trajectories.arrow import SOLVED
from geo_sokoban_pipeline.trajectories.index import spread
from geo_sokoban_pipeline.trajectories.schema import TURN_VALUES
from geo_sokoban_pipeline.trajectories.types import Trajectory

_TOGETHER = 1024  # continuations that are rolled out together
# Version of the policy that continues, and its sampling as stored; (None, "") of any other player.
Sampler = tuple[int | None, str]


@dataclass(frozen=True, eq=False)
class Node:
    """A state of an episode, from which a player continues.

    Attributes:
        history: hash of all that led to the state.
        row: the prompt.
        past: responses before it.
        texts: the same, as text.
        reseed_at, env_seed: see `EpisodeRequest`.
        sampler: who continues.
        parent: the first episode that it was found in, and the turn, as the beginning of its continuations' names.
    """

    history: str
    row: Mapping[str, Any]
    past: tuple[Result, ...]
    parent: str
    reseed_at: int | None = None
    texts: tuple[str, ...] = ()
    sampler: Sampler = (None, "")
    env_seed: int | None = None

    @property
    def key(self) -> tuple[Sampler, str]:
        """Equal for equal states that the same player continues."""
        return self.sampler, self.history

    @property
    def is_greedy(self) -> bool:
        """Whether the policy decodes greedily."""
        return bool(json.loads(self.sampler[1] or "{}").get("greedy"))

    @property
    def is_certain(self) -> bool:
        """Whether all continuations are one: of greedy decoding in an environment without chance."""
        return self.is_greedy and self.reseed_at is None

    def requests(self, group: int, root: int, numbers: Iterable[int]) -> list[EpisodeRequest]:
        """Requests of its continuations.

        Args:
            group: number of the node among those that are rolled out together.
            root: seed that all seeds follow from.
        """
        return [
            EpisodeRequest(
                trajectory_id=f"{self.parent}/f{number:04d}",
                prompt=dict(self.row),
                group_index=group,
                sample_index=number,
                seed=derive_seed(root, "fork", self.history, number),
                past=self.past,
                reseed_at=self.reseed_at,
                env_seed=self.env_seed,
            )
            for number in numbers
        ]


@dataclass(frozen=True, eq=False)
class ForkedTurn:
    """A response of a stored episode between two states.

    Attributes:
        turn: its number among the episode's turns.
        turns_left: responses that the episode may have from here on, this one included.
        before: the state before it; None: the turn is left out.
        after: the state after it; None: the episode has ended with it.
        steps_left, steps_after: see `Task.steps_to_goal`, before the response and after it.
        left_out: why: the turn does not come out as stored, or its episode has no reward.
    """

    episode: Trajectory
    turn: int
    turns_left: int
    before: Node | None = None
    after: Node | None = None
    steps_left: int | None = None
    steps_after: int | None = None
    left_out: str | None = None

    @property
    def nodes(self) -> list[Node]:
        """The states that are to be continued."""
        return [node for node in (self.before, self.after) if node is not None]


@dataclass(frozen=True)
class Outcome:
    """End of a continuation.

    Attributes:
        reward: of the whole episode; None: it has failed.
        success: whether it has reached the goal; None: the environment does not say.
    """

    reward: float | None
    success: bool | None

    @classmethod
    def of(cls, reward: float | None, metrics: Mapping[str, float]) -> Outcome:
        """Of an episode with this reward and these metrics."""
        return cls(reward, metrics["success"] >= SOLVED if "success" in metrics else None)


@dataclass(frozen=True)
class StateValue:
    """Value of a state by its continuations, or the known end of an episode.

    Attributes:
        continuations: that have a reward; 0: the end is known, or all have failed.
        failed: that have none, because environment or reward raised.
        value: mean reward of the whole episode; None: all have failed.
        low, high: its 95 % interval, see `describe_state`.
        variance: of the reward of one, unbiased; None of a single one.
        success: share that reaches the goal.
        success_low, success_high: its 95 % interval (Wilson).
    """

    continuations: int
    failed: int = 0
    value: float | None = None
    low: float | None = None
    high: float | None = None
    variance: float | None = None
    success: float | None = None
    success_low: float | None = None
    success_high: float | None = None


# (nodes, numbers of their continuations) → the ends of these, by node
Play = Callable[[Sequence[Node], Sequence[int]], "list[list[Outcome]]"]


def fork_episodes(
    episodes: Sequence[Trajectory],
    replayer: Replayer,
    rows: Mapping[str, Sequence[Mapping[str, Any]]],
    play: Play,
    options: ForkPipelineOptions,
    about: Mapping[str, Any],
    bounds: tuple[float, float],
    choose: Callable[[list[ForkedTurn]], list[ForkedTurn]] = list,
) -> tuple[pa.Table, Counter[str]]:
    """Rows of `TURN_VALUES` of some episodes, and counts: turns, histories, continuations, turns left out.

    `unshared` are the continuations that the episodes would need if each had its own, as many of each state.

    Args:
        replayer: with the rules of the run.
        rows: prompts of all splits, see `prompts_by_key`.
        play: continues.
        choose: the turns that are measured.
        about: values of the columns `run`, `run_id` and `forked_by`.
        bounds: see `value_nodes`.
    """
    turns = choose(find_forks(episodes, replayer, rows, options.player == "sampler", options.turns))
    nodes = list({node.key: node for turn in turns for node in turn.nodes}.values())
    values = value_nodes(nodes, play, options.first_continuations, options.continuations, bounds)
    by_key = {node.key: value for node, value in zip(nodes, values, strict=True)}
    played = {key: value.continuations + value.failed for key, value in by_key.items()}
    counts = Counter(
        turns=sum(turn.before is not None for turn in turns),
        histories=len(nodes),
        continuations=sum(played.values()),
        unshared=sum(
            played[key] for _, key in {(turn.episode.trajectory_id, node.key) for turn in turns for node in turn.nodes}
        ),
        left_out=sum(turn.before is None for turn in turns),
    )
    return value_turns(turns, by_key, about), counts


def find_forks(
    episodes: Sequence[Trajectory],
    replayer: Replayer,
    rows: Mapping[str, Sequence[Mapping[str, Any]]],
    own_sampler: bool = True,
    turns: int | None = None,
) -> list[ForkedTurn]:
    """Turns of stored episodes, with the states that they lie between.

    Args:
        replayer: with the rules of the run.
        rows: prompts of all splits, see `prompts_by_key`.
        own_sampler: whether each turn is continued by the policy that sampled it.
        turns: of each episode at most, evenly spread; None: all.
    """
    found: list[ForkedTurn] = []
    nodes: dict[tuple[Sampler, str], Node] = {}
    for episode in episodes:
        numbers = [number for number, turn in enumerate(episode.turns) if turn.role == "assistant"]
        states, responses = replayer.states(episode, rows), responses_of(episode)
        for place in spread(len(numbers), len(numbers) if turns is None else turns):
            forked = ForkedTurn(episode, numbers[place], replayer.rollout.max_turns - place)
            if episode.reward is None or place + 1 >= len(states.steps):
                reason = f"the episode is {episode.status}" if episode.reward is None else states.problem
                found.append(replace(forked, left_out=reason))
                continue
            sampler = (responses[place].weight_version, episode.sampling) if own_sampler else (None, "")
            before = _node_before(episode, numbers[place], states, responses[:place], sampler)
            after = None
            if states.is_random and place < states.stepped:
                after = _node_after(before, episode, numbers[place], responses[place])
            elif place + 1 < len(numbers):
                after = _node_before(episode, numbers[place + 1], states, responses[: place + 1], sampler)
            before = nodes.setdefault(before.key, before)
            after = None if after is None else nodes.setdefault(after.key, after)
            steps = states.steps[place : place + 2]
            found.append(replace(forked, before=before, after=after, steps_left=steps[0], steps_after=steps[1]))
    return found


def history_of(episode: Trajectory, number: int) -> str:
    """Hash of all that led to the state before a turn; equal states have equal ones."""
    return content_hash(
        episode.task_id,
        episode.label or "",
        episode.token_ids[: episode.turns[number].token_start].tobytes(),
        *(episode.images[index] for turn in episode.turns[:number] for index in turn.image_indices),
    )


def _node_before(
    episode: Trajectory, number: int, states: ReplayedStates, past: tuple[Result, ...], sampler: Sampler
) -> Node:
    """The state before a turn of an episode, after these responses."""
    history = history_of(episode, number)
    if states.seed is not None and not states.is_random:  # what the environment draws from here on is another state
        history = content_hash(history, str(states.seed))
    return Node(
        history=history,
        row=states.row,
        past=past,
        texts=tuple(turn.text for turn in episode.turns[:number] if turn.role == "assistant"),
        reseed_at=len(past) if states.is_random else None,
        sampler=sampler,
        parent=f"{episode.trajectory_id}/t{number:02d}",
        env_seed=states.seed,
    )


def _node_after(before: Node, episode: Trajectory, number: int, response: Result) -> Node:
    """The state of a random environment after a response, before it is carried out."""
    return replace(
        before,
        history=content_hash(before.history, response.token_ids.tobytes()),
        past=(*before.past, response),
        texts=(*before.texts, episode.turns[number].text),
        parent=f"{before.parent}/after",
    )


def value_nodes(
    nodes: Sequence[Node], play: Play, first: int, most: int, bounds: tuple[float, float]
) -> list[StateValue]:
    """The value of each node, in two stages: few continuations, then more of the nodes whose ends differ.

    Ends differ where some reach the goal and others do not; where the environment does not say, in their rewards. A
    node whose continuations are all one gets one, and no interval.

    Args:
        first: continuations of every node.
        most: continuations of a node whose first ones differ.
        bounds: lowest and highest reward that episodes of the run are known to have.
    """
    ends: list[list[Outcome]] = [[] for _ in nodes]

    def play_on(numbers: range, chosen: Sequence[int]) -> None:
        size = max(1, _TOGETHER // max(1, len(numbers)))
        for begin in range(0, len(chosen) if numbers else 0, size):
            part = chosen[begin : begin + size]
            for index, own in zip(part, play([nodes[index] for index in part], numbers), strict=True):
                ends[index] += own

    certain = [index for index, node in enumerate(nodes) if node.is_certain]
    open_ended = [index for index, node in enumerate(nodes) if not node.is_certain]
    play_on(range(1), certain)
    play_on(range(first), open_ended)
    play_on(range(first, most), [index for index in open_ended if _differ(ends[index])])
    rewards = [*bounds, *(end.reward for own in ends for end in own if end.reward is not None)]
    values = [describe_state(own, min(rewards), max(rewards)) for own in ends]
    for index in certain:
        value, success = values[index].value, values[index].success
        values[index] = replace(values[index], low=value, high=value, success_low=success, success_high=success)
    return values


def play_nodes(
    nodes: Sequence[Node],
    numbers: Sequence[int],
    root: int,
    roll_out: Callable[[Sequence[EpisodeRequest]], Sequence[Trajectory]],
) -> list[list[Outcome]]:
    """Continue from each node by a rollout; the ends of these continuations, by node.

    Args:
        numbers: of the continuations of each node.
        root: seed that all seeds follow from.
        roll_out: the episodes of these requests.
    """
    ends: list[list[Outcome]] = [[] for _ in nodes]
    for episode in roll_out([one for place, node in enumerate(nodes) for one in node.requests(place, root, numbers)]):
        ends[episode.group_index].append(Outcome.of(episode.reward, episode.metrics))
    return ends


def _differ(ends: Sequence[Outcome]) -> bool:
    known = [end for end in ends if end.reward is not None]
    return len({end.reward if end.success is None else end.success for end in known}) > 1


def describe_state(ends: Sequence[Outcome], lowest: float, highest: float) -> StateValue:
    """Value of a state by the ends of its continuations.

    The interval of the value is Wilson's of the rewards, scaled to the range that is given: no distribution on a range
    varies more than a coin of the same mean, so it covers at least as often as that of a share. The interval of Student
    would miss most rare successes: among 8 continuations there is often none.

    Args:
        lowest, highest: reward that an episode may have, as far as was seen.
    """
    rewards = np.array([end.reward for end in ends if end.reward is not None], np.float64)
    count, failed = len(rewards), len(ends) - len(rewards)
    if not count:
        return StateValue(0, failed)
    value, span = float(rewards.mean()), highest - lowest
    # A mean of equal rewards may round beyond the range.
    scaled = min(max((value - lowest) / span, 0.0), 1.0) * count if span > 0 else 0.0
    low, high = wilson_interval(min(scaled, count), count) if span > 0 else (0.0, 0.0)
    found = StateValue(
        continuations=count,
        failed=failed,
        value=value,
        low=min(value, lowest + low * span),
        high=max(value, lowest + high * span),
        variance=float(rewards.var(ddof=1)) if count > 1 else None,
    )
    solved = [end.success for end in ends if end.reward is not None and end.success is not None]
    if not solved:
        return found
    low, high = wilson_interval(sum(solved), len(solved))
    return replace(found, success=sum(solved) / len(solved), success_low=low, success_high=high)


def value_turns(
    turns: Sequence[ForkedTurn], values: Mapping[tuple[Sampler, str], StateValue], about: Mapping[str, Any]
) -> pa.Table:
    """Rows of `TURN_VALUES`, in the order of the turns.

    Args:
        values: of the nodes, by their keys.
        about: values of the columns `run`, `run_id` and `forked_by`.
    """
    rows = []
    for one in turns:
        episode, before, after = one.episode, one.before, one.after
        row = {
            **about,
            "trajectory_id": episode.trajectory_id,
            "iteration": episode.iteration,
            "group_index": episode.group_index,
            "turn": one.turn,
            "turns_left": one.turns_left,
            "left_out": one.left_out,
        }
        if before is not None:
            first = values[before.key]
            second = _ended(episode) if after is None else values[after.key]
            row |= {
                "policy_version": before.sampler[0],
                "history": before.history,
                **{name: getattr(first, name) for name in _STATE},
                **{f"{name}_after": getattr(second, name) for name in _STATE},
                "advantage": _gain(first.value, second.value),
                "is_greedy": before.is_greedy if before.sampler[1] else None,
                "is_solvable": None if one.steps_left is None else one.steps_left >= 0,
                "is_solvable_after": None if one.steps_after is None else one.steps_after >= 0,
                "steps_left": None if one.steps_left == -1 else one.steps_left,
                "is_reseeded": before.reseed_at is not None,
            }
        rows.append(row)
    return pa.Table.from_pylist(rows, schema=TURN_VALUES)


def _gain(before: float | None, after: float | None) -> float | None:
    return None if before is None or after is None else after - before


_STATE = [field.name for field in fields(StateValue)]


def _ended(episode: Trajectory) -> StateValue:
    """The known end of an episode."""
    end = Outcome.of(episode.reward, episode.metrics)
    success = None if end.success is None else float(end.success)
    return StateValue(0, 0, end.reward, end.reward, end.reward, 0.0, success, success, success)
