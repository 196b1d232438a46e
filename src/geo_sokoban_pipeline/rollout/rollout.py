"""The loop over episodes: steps them with an engine and environments, and returns one trajectory per request.

An episode advances when the engine returns its result, so the same loop serves an engine that returns a turn's whole
batch and one that returns responses as they finish. An episode that raises ends as `failed` and keeps its error; the
others continue. `Episode` has the rules of turns, budgets and statuses; its function, `play` or a user's, decides what
happens between responses.
"""

from __future__ import annotations

import math
import queue
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

from geo_sokoban_pipeline.config.rollout import RolloutOptions
from geo_sokoban_pipeline.envs.plugins import load_object
from geo_sokoban_pipeline.formats import type_name
from geo_sokoban_pipeline.policies.policy import Policy
from geo_sokoban_pipeline.progress import note_progress
from geo_sokoban_pipeline.rollout.engines.base import Result, RolloutEngine, empty_result
from geo_sokoban_pipeline.rollout.episode import Episode, EpisodeRequest, RolloutSettings, load_generate, play
from geo_sokoban_pipeline.rollout.functions import is_async
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
    generate = load_generate(settings.rollout)
    capacity = settings.rollout.max_environments or math.inf
    episodes: list[Episode] = []
    groups: dict[int, list[Episode]] = {}
    finished: dict[int, Trajectory] = {}
    # An episode is in one place: it waits for a place of an environment, its function is at work, its request is in the
    # engine, or its result is held because slow work goes on. Then it is over.
    waiting: deque[Episode] = deque()
    at_work: set[int] = set()
    moved: queue.SimpleQueue[Episode] = queue.SimpleQueue()  # whose function waits for a response, or has ended
    in_engine = 0
    held: list[Result] = []
    opened = 0  # environments
    stopping = False  # whether all that is not over is aborted

    def finish(chosen: Sequence[Episode]) -> list[Trajectory]:
        """Trajectories of episodes, each made once; all rewards start before the loop waits for the first."""
        new = [episode for episode in chosen if episode.id not in finished]
        for episode in new:
            episode.finalize(reward)
        for episode in new:
            finished[episode.id] = episode.finish(engine)
        return [finished[episode.id] for episode in chosen]

    def add(new_requests: Sequence[EpisodeRequest]) -> None:
        new = [Episode(number, request, policy, settings) for number, request in enumerate(new_requests, len(episodes))]
        episodes.extend(new)
        waiting.extend(new)
        for episode in new:
            groups.setdefault(episode.request.group_index, []).append(episode)

    def settle() -> list[Episode]:
        """Wait for functions at work; returns the episodes whose functions are not at work any more, in their order.

        With a seeded engine for all: batches that depend on the clock would not repeat bit for bit.
        """
        found: list[Episode] = []
        while at_work and (engine.seeded or not moved.empty() or not (found or in_engine or held)):
            episode = moved.get()
            if episode.id in at_work:  # else it has ended while its response is sampled, which brings it back
                at_work.remove(episode.id)
                found.append(episode)
            note_progress()
        return found if generate is play else sorted(found, key=lambda episode: episode.id)

    def stop() -> None:
        engine.abort([episode.id for episode in episodes if episode.is_pending])

    try:
        add(requests)
        complete = 0  # groups that `enough` has seen
        ended: list[Episode] = []  # whose environments are open
        while True:
            # Start: environments and prompts, as far as there are places.
            idle = not (waiting or at_work or in_engine or held)
            if supply is not None:
                add(supply.take(wait=idle))
                if supply.is_stopped and not stopping:
                    stopping = True
                    stop()
            if idle and not waiting:
                break
            while waiting and opened < capacity:
                episode = waiting.popleft()
                at_work.add(episode.id)
                opened += 1
                episode.start(build_env, generate, moved.put)
                note_progress()

            # Settle: the next responses are asked for; what is over makes place.
            settled = settle()
            over = [episode for episode in settled if not episode.is_pending]
            engine.release([episode.id for episode in over])
            if progress is not None and over:
                progress(len(over))
            next_requests = [episode.next_request() for episode in settled if episode.is_pending]
            if stopping:  # they end without a token
                held += [empty_result(request, "abort", engine.version) for request in next_requests]
            elif next_requests:
                engine.submit(next_requests)
                in_engine += len(next_requests)
            # Early stop: aborted requests come back as results, so every episode still ends in this loop.
            if over and enough is not None and not stopping:
                done = [
                    group
                    for group in groups.values()
                    if not any(episode.is_pending or episode.id in at_work for episode in group)
                ]
                if len(done) > complete:
                    complete = len(done)
                    if stopping := enough(finish([episode for group in done for episode in group])):
                        stop()
            ended += over
            if waiting and ended:
                finish(ended)
                opened -= len(ended)
                ended.clear()
            if not (in_engine or held):
                continue

            # Turn: an engine may return some of the submitted requests; their episodes continue meanwhile.
            began = time.perf_counter()
            if not (results := engine.poll() if in_engine else []) and not held:
                lost = [one.request.trajectory_id for one in episodes if one.is_pending and one not in waiting]
                raise LostRequestsError(
                    f"rollout.engine={engine.name}: it returned nothing while {_names(lost)} wait for a response."
                )
            in_engine -= len(results)
            _split_time(episodes, results, time.perf_counter() - began)
            # Environments start the slow work of all results before the first one is stepped.
            # A function of the user's may step something else than the response.
            for result in results if generate is play else ():
                episodes[result.id].prepare(result)
            # A result with unfinished slow work waits while there are others; not with a seeded engine, as in `settle`.
            wait = engine.seeded or not results
            arrived, held = held + results, []
            for result in arrived:
                if wait or episodes[result.id].is_prepared:
                    at_work.add(result.id)
                    episodes[result.id].advance(result)
                    note_progress()
                else:
                    held.append(result)
    finally:
        for episode in episodes:
            if episode not in waiting:
                episode.cancel()

    # Finish: rewards and trajectories.
    trajectories = finish(episodes)
    check_failures(trajectories, settings.rollout.max_failed_share)
    share_infos(turn for trajectory in trajectories for turn in trajectory.turns)
    return trajectories


def load_rollout_fn(options: RolloutOptions) -> RolloutFn:
    """`rollout`, also where `rollout.function` is of one episode; or a user's function with its signature."""
    function: RolloutFn = load_object(options.function, default_name="rollout")
    is_ours = function is rollout or is_async(function)
    return rollout if is_ours else partial(_call_own, function, options.function)


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


def _split_time(episodes: Sequence[Episode], results: Sequence[Result], seconds: float) -> None:
    """Split a batch's time over its episodes, in proportion to their sampled tokens."""
    total = sum(len(result.token_ids) for result in results) or 1
    for result in results:
        episodes[result.id].engine_seconds += seconds * len(result.token_ids) / total
