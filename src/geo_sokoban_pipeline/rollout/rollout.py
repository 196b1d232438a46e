"""Episode loop: plays prompts with an engine and environments, and returns one trajectory per episode.

It is driven by replies: whichever engine answers, an episode advances when its reply is there. Rules of turns,
budgets and statuses are those of the seed's multi-turn rollout (reference algorithm, with its deviations behind
`RolloutRules`). An episode that raises ends as `failed` with its error kept; the others go on.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from geo_sokoban_pipeline.config.rollout import RolloutOptions
from geo_sokoban_pipeline.envs.plugins import load_object
from geo_sokoban_pipeline.policies.policy import Policy
from geo_sokoban_pipeline.rollout.engines.base import Result, RolloutEngine
from geo_sokoban_pipeline.rollout.episode import Conversation, EpisodeTask, RolloutSettings, share_infos
from geo_sokoban_pipeline.trajectories.types import Trajectory

Progress = Callable[[int], None]
# Whether the groups that are over (all their episodes) suffice, so that the others may be given up.
Enough = Callable[["list[Trajectory]"], bool]
# (engine, policy, tasks, settings[, progress, enough]) → trajectories, as `rollout`
RolloutFn = Callable[..., "list[Trajectory]"]


class TooManyFailuresError(RuntimeError):
    """More episodes failed than `rollout.max_failed_share` allows."""


def load_rollout_fn(options: RolloutOptions) -> RolloutFn:
    """What `rollout.function` names: `rollout`, or an own function with its signature."""
    play: RolloutFn = load_object(options.function, default_name="rollout")
    return play if play is rollout else partial(_play_own, play, options.function)


def _play_own(play: RolloutFn, name: str, *arguments: Any, **named: Any) -> list[Trajectory]:
    """An own function's trajectories.

    Raises:
        TypeError: it returned something else.
    """
    given: Any = play(*arguments, **named)
    if not isinstance(given, list) or not all(isinstance(episode, Trajectory) for episode in given):
        found = type(given).__name__
        raise TypeError(f"rollout.function={name}: must return a list of Trajectory, one per task; it returned {found}")
    return given


def rollout(
    engine: RolloutEngine,
    policy: Policy,
    tasks: Sequence[EpisodeTask],
    settings: RolloutSettings,
    progress: Progress | None = None,
    enough: Enough | None = None,
) -> list[Trajectory]:
    """Play episodes to their ends, or until enough groups are over; the others are then aborted.

    Args:
        engine: samples the replies.
        policy: its tokenizer, template and picture encoding.
        tasks: prompts, one entry per episode.
        settings: environment, reward, limits, sampling.
        progress: called with the number of episodes that ended since the last call.
        enough: asked whenever a group is over, with the trajectories of all groups that are; None: all are played.

    Returns:
        One trajectory per task, in the order of the tasks; rewards set, advantages not.

    Raises:
        TooManyFailuresError: more than `rollout.max_failed_share` of the episodes failed; names the first error.
    """
    build_env = load_object(settings.env.factory, default_name="build_env")
    reward = load_object(settings.reward.function, default_name="reward")
    talks = [Conversation(index, task, policy, settings) for index, task in enumerate(tasks)]
    waiting = [talk for talk in talks if talk.start(build_env)]
    shares = dict.fromkeys(range(len(talks)), 0.0)
    results = _Results(
        talks,
        lambda talk: talk.conclude(reward),
        lambda talk: talk.finish(reward, engine, shares[talk.id]),
        enough,
    )
    if progress is not None and len(waiting) < len(talks):
        progress(len(talks) - len(waiting))
    while waiting:
        began = time.perf_counter()
        engine.submit([talk.request() for talk in waiting])
        waiting = []
        held: list[Result] = []
        # An engine may answer part of what it was asked; the others go on with what is there.
        while (polled := engine.poll()) or held:
            _share(shares, polled, time.perf_counter() - began)
            for result in polled:
                talks[result.id].prepare(result)
            replies, held = _due(talks, held + polled, wait=engine.seeded or not polled)
            ready = [talks[reply.id] for reply in replies if talks[reply.id].advance(reply)]
            ended = [reply.id for reply in replies if talks[reply.id].status != "pending"]
            engine.release(ended)
            if progress is not None and ended:
                progress(len(ended))
            engine.submit([talk.request() for talk in ready])
            if results.sufficed:
                engine.abort([talk.id for talk in ready])
            elif ended and results.suffice():
                engine.abort([talk.id for talk in talks if talk.status == "pending"])
            began = time.perf_counter()
    trajectories = results.take()
    check_failures(trajectories, settings.rollout.max_failed_share)
    share_infos(turn for trajectory in trajectories for turn in trajectory.turns)
    return trajectories


def _due(talks: Sequence[Conversation], replies: list[Result], *, wait: bool) -> tuple[list[Result], list[Result]]:
    """Replies that are taken, and those that are held until their environment's slow work is done.

    Args:
        wait: take all and wait for that work: an engine that repeats by seed must be asked in batches that depend on no
            clock, and where nothing else is to come there is nothing better to do.
    """
    due: list[Result] = []
    held: list[Result] = []
    for reply in replies:
        (due if wait or talks[reply.id].is_prepared else held).append(reply)
    return due, held


class _Results:
    """Trajectories of episodes, each made once: when its group is over, where somebody asks, else at the end."""

    def __init__(
        self,
        talks: Sequence[Conversation],
        conclude: Callable[[Conversation], None],
        finish: Callable[[Conversation], Trajectory],
        enough: Enough | None,
    ) -> None:
        self._talks, self._conclude, self._finish, self._enough = talks, conclude, finish, enough
        self.sufficed = False
        self._made: dict[int, Trajectory] = {}
        self._groups: dict[int, list[Conversation]] = {}
        for talk in talks:
            self._groups.setdefault(talk.task.group_index, []).append(talk)
        self._asked = 0

    def suffice(self) -> bool:
        """Whether enough groups are over; asked when further ones are, and never again once they suffice."""
        if self._enough is None or self.sufficed:
            return False
        over = [talks for talks in self._groups.values() if all(talk.status != "pending" for talk in talks)]
        if len(over) == self._asked:
            return False
        self._asked = len(over)
        self.sufficed = self._enough(self._make([talk for talks in over for talk in talks]))
        return self.sufficed

    def take(self) -> list[Trajectory]:
        """All trajectories, in the order of the tasks."""
        return self._make(self._talks)

    def _make(self, talks: Sequence[Conversation]) -> list[Trajectory]:
        new = [talk for talk in talks if talk.id not in self._made]
        for talk in new:
            self._conclude(talk)
        for talk in new:
            self._made[talk.id] = self._finish(talk)
        return [self._made[talk.id] for talk in talks]


def _share(shares: dict[int, float], results: Sequence[Result], seconds: float) -> None:
    """Divide a batch's time among its episodes by the tokens they sampled."""
    total = sum(len(result.token_ids) for result in results) or 1
    for result in results:
        shares[result.id] += seconds * len(result.token_ids) / total


def check_failures(trajectories: Sequence[Trajectory], allowed: float) -> None:
    """Stop where more than the allowed share of episodes failed.

    Raises:
        TooManyFailuresError: names the number and the first error.
    """
    failed = [trajectory for trajectory in trajectories if trajectory.status == "failed"]
    if failed and len(failed) > allowed * len(trajectories):
        raise TooManyFailuresError(
            f"{len(failed)} of {len(trajectories)} episodes failed, more than rollout.max_failed_share={allowed}; "
            f"the first one, {failed[0].trajectory_id}: {failed[0].error}"
        )
