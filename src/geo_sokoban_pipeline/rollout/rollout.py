"""The loop over episodes: steps them with an engine and environments, and returns one trajectory per request.

An episode advances when the engine returns its result, so the same loop serves an engine that returns a turn's whole
batch and one that returns responses as they finish. An episode that raises ends as `failed` and keeps its error; the
others continue. `Episode` has the rules of turns, budgets and statuses.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

from geo_sokoban_pipeline.config.rollout import RolloutOptions
from geo_sokoban_pipeline.envs.plugins import load_object
from geo_sokoban_pipeline.formats import type_name
from geo_sokoban_pipeline.policies.policy import Policy
from geo_sokoban_pipeline.progress import note_progress
from geo_sokoban_pipeline.rollout.engines.base import Result, RolloutEngine, empty_result
from geo_sokoban_pipeline.rollout.episode import Episode, EpisodeRequest, RolloutSettings
from geo_sokoban_pipeline.trajectories.types import Trajectory, share_infos

Progress = Callable[[int], None]
# (trajectories of all complete groups) → whether they are enough, so that the other groups can be aborted
Enough = Callable[["list[Trajectory]"], bool]
# (engine, policy, requests, settings[, progress, enough, supply]) → trajectories, as `rollout`
RolloutFn = Callable[..., "list[Trajectory]"]

_SHOWN = 5  # episodes that an error names


class TooManyFailuresError(RuntimeError):
    """More episodes failed than `rollout.max_failed_share` allows."""


class LostRequestsError(RuntimeError):
    """The engine returned nothing while requests were in flight."""


class WrongEpisodesError(TypeError, ValueError):
    """A user's rollout function returned no episodes, or others than it was asked for."""


class Supply(Protocol):
    """Source of further requests of a rollout that has begun; it may also abort the unfinished ones."""

    is_stopped: bool

    def take(self, *, wait: bool) -> Sequence[EpisodeRequest]:
        """Further requests, of whole groups; where `is_stopped`, of those that end as aborted before they begin.

        Args:
            wait: until there are any; empty then means that there will be none.
        """


def rollout(  # noqa: PLR0912, PLR0915 - one place for the whole loop
    engine: RolloutEngine,
    policy: Policy,
    requests: Sequence[EpisodeRequest],
    settings: RolloutSettings,
    progress: Progress | None = None,
    enough: Enough | None = None,
    supply: Supply | None = None,
) -> list[Trajectory]:
    """Roll out episodes to their ends, or until enough groups are complete; the remaining ones are then aborted.

    Args:
        engine: samples the responses.
        policy: gives tokenizer, template and image encoding.
        requests: one per episode.
        settings: environment, reward, limits, sampling.
        progress: called with the number of episodes that ended since the last call.
        enough: called whenever a group is complete, with the trajectories of all complete groups; None: roll out all.
        supply: asked before every turn; None: nothing comes later.

    Returns:
        One trajectory per request, in their order, those of the supply last; rewards set, advantages not.

    Raises:
        TooManyFailuresError: more than `rollout.max_failed_share` of the episodes failed; names the first error.
        LostRequestsError: the engine returns nothing while requests are in flight; names it and their episodes.
    """
    build_env = load_object(settings.env.factory, default_name="build_env")
    reward = load_object(settings.reward.function, default_name="reward")
    episodes: list[Episode] = []
    groups: dict[int, list[Episode]] = {}
    engine_seconds: dict[int, float] = {}
    finished: dict[int, Trajectory] = {}

    def finish(chosen: Sequence[Episode]) -> list[Trajectory]:
        """Trajectories of episodes, each made once; all rewards start before the loop waits for the first."""
        new = [episode for episode in chosen if episode.id not in finished]
        for episode in new:
            episode.finalize(reward)
        for episode in new:
            finished[episode.id] = episode.finish(engine, engine_seconds[episode.id])
        return [finished[episode.id] for episode in chosen]

    def report(ended: int) -> None:
        if progress is not None and ended:
            progress(ended)

    def start(new_requests: Sequence[EpisodeRequest]) -> int:
        """Start environments and prompts; returns how many episodes wait for a response. Others have ended here."""
        new = [Episode(number, request, policy, settings) for number, request in enumerate(new_requests, len(episodes))]
        episodes.extend(new)
        for episode in new:
            groups.setdefault(episode.request.group_index, []).append(episode)
            engine_seconds[episode.id] = 0.0
            episode.start(build_env)
            note_progress()
        started = [episode for episode in new if episode.is_pending]
        report(len(new) - len(started))
        if started and supply is not None and supply.is_stopped:  # they end before their first token
            held.extend(empty_result(episode.next_request(), "abort", engine.version) for episode in started)
        elif started:
            engine.submit([episode.next_request() for episode in started])
        return len(started)

    held: list[Result] = []  # that no episode has taken yet
    pending = start(requests)
    began = time.perf_counter()

    # Turns: an engine may return some of the submitted requests; their episodes continue meanwhile.
    complete, stopping = 0, False  # groups that `enough` has seen; whether the others are aborted
    while True:
        if supply is not None:
            pending += start(supply.take(wait=not pending))
            if supply.is_stopped and not stopping:
                stopping = True
                engine.abort([episode.id for episode in episodes if episode.is_pending])
        if not pending:  # without a request, the engine is never polled
            break
        if not (results := engine.poll()) and not held:
            waiting = [episode.request.trajectory_id for episode in episodes if episode.is_pending]
            raise LostRequestsError(
                f"rollout.engine={engine.name}: it returned nothing while {_names(waiting)} wait for a response."
            )
        _split_time(engine_seconds, results, time.perf_counter() - began)
        # Environments start the slow work of all results before the first one is stepped.
        for result in results:
            episodes[result.id].prepare(result)
        # A result with unfinished slow work waits while there are others. Not with a seeded engine: batches that depend
        # on the clock would not repeat bit for bit.
        wait = engine.seeded or not results
        arrived, held = held + results, []
        due: list[Result] = []
        for result in arrived:
            (due if wait or episodes[result.id].is_prepared else held).append(result)
        for result in due:
            episodes[result.id].advance(result)
            note_progress()
        over = [result.id for result in due if not episodes[result.id].is_pending]
        engine.release(over)
        pending -= len(over)
        report(len(over))
        running = [episodes[result.id] for result in due if episodes[result.id].is_pending]
        engine.submit([episode.next_request() for episode in running])
        # Early stop: aborted requests come back as results, so every episode still ends in this loop.
        if stopping:
            engine.abort([episode.id for episode in running])
        elif over and enough is not None:
            done = [group for group in groups.values() if not any(episode.is_pending for episode in group)]
            if len(done) > complete:
                complete = len(done)
                if stopping := enough(finish([episode for group in done for episode in group])):
                    engine.abort([episode.id for episode in episodes if episode.is_pending])
        began = time.perf_counter()

    # Finish: rewards and trajectories.
    trajectories = finish(episodes)
    check_failures(trajectories, settings.rollout.max_failed_share)
    share_infos(turn for trajectory in trajectories for turn in trajectory.turns)
    return trajectories


def load_rollout_fn(options: RolloutOptions) -> RolloutFn:
    """The function that `rollout.function` names: `rollout`, or a user's function with its signature."""
    function: RolloutFn = load_object(options.function, default_name="rollout")
    return function if function is rollout else partial(_call_own, function, options.function)


def _call_own(
    function: RolloutFn,
    name: str,
    engine: RolloutEngine,
    policy: Policy,
    requests: Sequence[EpisodeRequest],
    *arguments: Any,
    **named: Any,
) -> list[Trajectory]:
    return check_episodes(name, requests, function(engine, policy, requests, *arguments, **named))


def check_episodes(name: str, requests: Sequence[EpisodeRequest], given: Any) -> list[Trajectory]:
    """Check the result of a user's rollout function, and return it.

    Args:
        name: the value of `rollout.function`.

    Raises:
        WrongEpisodesError: it is no list of trajectories, or they are not those of the requests, in their order.
    """
    if not isinstance(given, list) or not all(isinstance(episode, Trajectory) for episode in given):
        raise WrongEpisodesError(
            f"rollout.function={name}: must return a list of Trajectory, one per request; it returned "
            f"{type_name(given)}"
        )
    wanted = [request.trajectory_id for request in requests]
    found = [episode.trajectory_id for episode in given]
    regrouped = [
        one.trajectory_id for one, asked in zip(given, requests, strict=False) if one.group_index != asked.group_index
    ]
    if found != wanted or regrouped:
        kinds = {
            "missing": [episode for episode in wanted if episode not in found],
            "returned more than once": [episode for episode, count in Counter(found).items() if count > 1],
            "not asked for": [episode for episode in dict.fromkeys(found) if episode not in wanted],
            "in another group_index": regrouped if found == wanted else [],
        }
        wrong = [f"{kind}: {_names(episodes)}" for kind, episodes in kinds.items() if episodes]
        moved = next((one for one, other in zip(found, wanted, strict=False) if one != other), "")
        raise WrongEpisodesError(
            f"rollout.function={name}: must return one trajectory per request, in the order of the requests; "
            f"{'; '.join(wrong) or f'in another order: from {moved} on'}."
        )
    return given


def _names(episodes: Sequence[str]) -> str:
    """The first names of many."""
    shown, further = ", ".join(episodes[:_SHOWN]), len(episodes) - _SHOWN
    return f"{shown} and {further} more" if further > 0 else shown


def check_failures(trajectories: Sequence[Trajectory], allowed: float) -> None:
    """Raise if more than the allowed share of episodes failed.

    Raises:
        TooManyFailuresError: names the number and the first error.
    """
    failed = [trajectory for trajectory in trajectories if trajectory.status == "failed"]
    if failed and len(failed) > allowed * len(trajectories):
        raise TooManyFailuresError(
            f"{len(failed)} of {len(trajectories)} episodes failed, more than rollout.max_failed_share={allowed}; "
            f"the first one, {failed[0].trajectory_id}: {failed[0].error}"
        )


def _split_time(engine_seconds: dict[int, float], results: Sequence[Result], seconds: float) -> None:
    """Split a batch's time over its episodes, in proportion to their sampled tokens."""
    total = sum(len(result.token_ids) for result in results) or 1
    for result in results:
        engine_seconds[result.id] += seconds * len(result.token_ids) / total
