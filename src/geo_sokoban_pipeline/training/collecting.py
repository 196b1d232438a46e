"""Collecting: draw the prompts of an iteration, roll them out and score the episodes.

Prompts, seeds and ids follow from run seed, iteration and group number alone, so equal runs collect equal episodes.

Dynamic sampling draws groups until `grpo.groups` of them carry a signal, at most `grpo.max_refill` times as many.
Over-sampling starts more groups than needed and aborts the rest once enough are complete. Partial rollouts continue the
aborted groups in the next iteration. With `loop.max_staleness` 1, iteration k + 1 is collected while k is trained;
iteration k is then always rolled out with version k - 1 of the weights (the first two with version 0).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from geo_sokoban_pipeline.config.grpo import TrainOptions
from geo_sokoban_pipeline.envs.base import takes_seed
from geo_sokoban_pipeline.envs.plugins import load_object
from geo_sokoban_pipeline.evaluation.rollouts import response_metrics
from geo_sokoban_pipeline.grpo.estimators import load_estimator
from geo_sokoban_pipeline.grpo.sampler import PromptSampler
from geo_sokoban_pipeline.grpo.scoring import Scores, apply_scores, is_solved, score_groups
from geo_sokoban_pipeline.policies.lora import open_weights
from geo_sokoban_pipeline.policies.policy import Policy
from geo_sokoban_pipeline.rollout.engines.base import EngineControl, Result
from geo_sokoban_pipeline.rollout.episode import EpisodeRequest, RolloutSettings, responses_of
from geo_sokoban_pipeline.rollout.rollout import RolloutFn, load_rollout_fn
from geo_sokoban_pipeline.seeding import derive_seed
from geo_sokoban_pipeline.tasks import task_of
from geo_sokoban_pipeline.training.state_values import measure_states
from geo_sokoban_pipeline.trajectories.types import Trajectory

Rows = Sequence[dict[str, Any]]


@dataclass(frozen=True)
class GroupPlan:
    """A group to be rolled out: a new one, or one that an earlier iteration aborted.

    Attributes:
        prompt: index of its prompt.
        seeds, pasts: of its episodes; a past is the tokens of the only response that were sampled so far, with their
            policy versions, empty without any.
    """

    prompt: int
    seeds: list[int]
    pasts: list[tuple[Result, ...]]


@dataclass
class PartialRollouts:
    """Aborted groups, first in, first out; in memory only: a continued run starts without them.

    They resume from prompt and sampled tokens alone, so only for tasks of one turn: no environment is stored.
    """

    groups: list[GroupPlan] = field(default_factory=list)

    def take(self, count: int) -> list[GroupPlan]:
        """Remove and return the first groups, at most `count`."""
        taken, self.groups = self.groups[:count], self.groups[count:]
        return taken

    def keep(self, trajectories: Sequence[Trajectory], prompts: Mapping[int, int]) -> None:
        """Append the groups that have an aborted episode.

        Args:
            trajectories: of an iteration, whole groups.
            prompts: index of each group's prompt.
        """
        aborted = sorted({episode.group_index for episode in trajectories if episode.status == "aborted"})
        for group in aborted:
            episodes = [episode for episode in trajectories if episode.group_index == group]
            pasts = [responses_of(episode) for episode in episodes]
            self.groups.append(GroupPlan(prompts[group], [episode.seed for episode in episodes], pasts))


@dataclass
class Collector:
    """Collects the episodes of GRPO iterations; its only state are the partial rollouts.

    Attributes:
        run: namespace of the run, the first part of trajectory ids.
        seed: seed of the run.
        prompts: rows of the training prompts.
        rollout_fn: rolls out the episodes; None: `rollout.function`, in this process.
        take_metrics: further metrics of the rollouts since its last call.
        partial: groups that earlier iterations aborted; used with `rollout.partial`.
    """

    run: str
    seed: int
    options: TrainOptions
    prompts: Rows
    policy: Policy
    engine: EngineControl
    rollout_fn: RolloutFn | None = None
    take_metrics: Callable[[], dict[str, float]] = dict
    partial: PartialRollouts = field(default_factory=PartialRollouts)

    def collect(self, iteration: int, sampler: PromptSampler) -> tuple[list[Trajectory], dict[str, float | None]]:
        """Roll out and score one iteration; advances the sampler.

        Returns:
            Trajectories (groups in order, dropped ones included) and metrics `rollout/…`, `perf/…`.
        """
        began = time.perf_counter()
        self.take_metrics()  # of validations
        grpo, rollout, task = self.options.grpo, self.options.rollout, task_of(self.options.task)
        first = math.ceil(grpo.groups * rollout.over_sampling)
        limit = max(first, math.ceil(grpo.groups * grpo.max_refill))
        chosen: list[int] = []  # index of each group's prompt
        trajectories: list[Trajectory] = []
        wanted, attempt, found = first, 0, 0
        while True:
            # Aborted groups of earlier iterations come first, then new prompts.
            resumed = self.partial.take(wanted)
            drawn = sampler.draw(iteration, wanted - len(resumed), attempt)
            trajectories += self._roll_out(iteration, drawn, len(chosen), resumed, grpo.groups - found)
            chosen += [*(group.prompt for group in resumed), *drawn]
            attempt += 1
            if len(chosen) >= limit:
                break
            found = self._probe(trajectories).trained_groups
            if found >= grpo.groups:
                break
            wanted = min(grpo.groups - found, limit - len(chosen))
        most = grpo.groups if rollout.over_sampling > 1 else None
        given = trajectories, grpo, task, self.options.reward.args
        scores = score_groups(*given, max_trained_groups=most)
        apply_scores(trajectories, scores)
        seconds, measured = time.perf_counter() - began, dict[str, float]()
        if (forks := load_estimator("advantage", grpo).forks) is not None:
            rows = [self.prompts[prompt] for prompt in chosen]
            root = derive_seed(self.seed, "forks", iteration)
            go_on = partial(self._call, iteration)
            measured = measure_states(trajectories, rows, forks, root, go_on, self._is_fixed)
            measured["perf/fork_time"] = time.perf_counter() - began - seconds
            scores = score_groups(*given, max_trained_groups=most)
            apply_scores(trajectories, scores)
        if rollout.partial:
            self.partial.keep(trajectories, dict(enumerate(chosen)))
        _update_solve_rates(sampler, chosen, trajectories)
        processes = 1 if self.rollout_fn is None else rollout.workers or self.options.processes
        described = describe_rollout(trajectories, seconds, task.watched, processes)
        return trajectories, {**described, **measured, **self.take_metrics(), **scores.metrics}

    def _probe(self, trajectories: Sequence[Trajectory]) -> Scores:
        """Scores of the groups so far, without the fallback of `grpo.min_groups`, which would hide scarce signal."""
        options = self.options
        return score_groups(trajectories, options.grpo, task_of(options.task), options.reward.args, min_groups=0)

    def _roll_out(
        self, iteration: int, drawn: Sequence[int], first_group: int, resumed: Sequence[GroupPlan], missing: int
    ) -> list[Trajectory]:
        """Roll out aborted groups, then groups of the drawn prompts.

        Args:
            missing: number of groups that can be trained after which over-sampling aborts the others.
        """
        options = self.options
        size = options.grpo.group_size
        new = [
            GroupPlan(
                index,
                [derive_seed(self.seed, "rollout", iteration, group, sample) for sample in range(size)],
                [()] * size,
            )
            for group, index in enumerate(drawn, start=first_group + len(resumed))
        ]
        requests = [
            EpisodeRequest(
                trajectory_id=f"{self.run}/i{iteration:05d}/g{group:03d}/s{sample:02d}",
                prompt=self.prompts[plan.prompt],
                group_index=group,
                sample_index=sample,
                seed=seed,
                past=past,
            )
            for group, plan in enumerate([*resumed, *new], start=first_group)
            for sample, (seed, past) in enumerate(zip(plan.seeds, plan.pasts, strict=True))
        ]
        if options.rollout.over_sampling <= 1:
            return self._call(iteration, requests)

        def is_enough(complete: list[Trajectory]) -> bool:
            return self._probe(complete).trained_groups >= missing

        return self._call(iteration, requests, enough=is_enough)

    def _is_fixed(self, row: Mapping[str, Any]) -> bool:
        """Whether the environment takes a seed for all its draws, and cannot draw anew."""
        env = load_object(self.options.env.factory, default_name="build_env")(row, self.options.env.args)
        try:
            return takes_seed(env) and not hasattr(env, "reseed")
        finally:
            env.close()

    def _call(self, iteration: int, requests: Sequence[EpisodeRequest], **enough: Any) -> list[Trajectory]:
        """The rollout's episodes of these requests."""
        options, rollout = self.options, self.options.rollout
        settings = RolloutSettings(
            options.env, options.reward, rollout, rollout.sampling, iteration, options.task, self.engine.version
        )
        roll_out = self.rollout_fn or load_rollout_fn(options.rollout)
        return roll_out(self.engine, self.policy, requests, settings, **enough)


def build_sampler(prompts: Rows, options: TrainOptions, seed: int, state: dict[str, Any] | None) -> PromptSampler:
    """Prompt sampler of a run, new or continued from a state; its buckets are the task's difficulties."""
    buckets = [task_of(options.task).difficulty_of(row) for row in prompts]
    given = buckets, options.prompts, derive_seed(seed, "prompts")
    return PromptSampler(*given) if state is None else PromptSampler.from_state(state, *given)


def _update_solve_rates(sampler: PromptSampler, chosen: Sequence[int], trajectories: Sequence[Trajectory]) -> None:
    """Update the sampler with the solve rate of each whole group: a partial one counts in the iteration it ends in."""
    aborted = {episode.group_index for episode in trajectories if episode.status == "aborted"}
    rates: dict[int, list[float]] = {}
    for episode in trajectories:
        solved = is_solved(episode)
        if solved is not None and episode.group_index not in aborted:
            rates.setdefault(episode.group_index, []).append(float(solved))
    groups = sorted(rates)
    sampler.update([chosen[group] for group in groups], [float(np.mean(rates[group])) for group in groups])


def describe_rollout(
    trajectories: Sequence[Trajectory],
    seconds: float,
    watched: Sequence[tuple[str, str]] = (),
    processes: int = 1,
) -> dict[str, float | None]:
    """Metrics of episodes under slime's names; None where no episode has a value.

    Response lengths and means of log-probs are over sampled tokens. `returns` are the episodes' rewards: without a
    critic they are the same.

    Args:
        seconds: duration of the rollout.
        watched: further metrics of the episodes whose means are reported, as (metric, name).
        processes: number of parallel processes; the seconds of engine and environment are means over them.
    """
    rewards = [episode.reward for episode in trajectories if episode.reward is not None]
    solved = [float(value) for episode in trajectories if (value := is_solved(episode)) is not None]
    sampled = [episode.rollout_log_probs[episode.loss_mask == 1] for episode in trajectories]
    responses = response_metrics(
        [len(tokens) for tokens in sampled],
        [episode.status == "truncated" for episode in trajectories],
        [episode.response for episode in trajectories],
    )
    count = len(trajectories)
    return {
        "rollout/episodes": float(count),
        "rollout/raw_reward": _mean(rewards),
        "rollout/returns": _mean(rewards),
        "rollout/advantages": _mean([e.advantage for e in trajectories if e.advantage is not None]),
        "rollout/rollout_log_probs": _mean(np.concatenate([np.empty(0), *sampled])),
        "rollout/success_rate": _mean(solved),
        **{f"rollout/{name}": value for name, value in responses.items()},
        "rollout/turns/mean": _mean([e.metrics.get("turns", 0.0) for e in trajectories]),
        **{
            f"rollout/{name}": _mean([e.metrics[metric] for e in trajectories if metric in e.metrics])
            for metric, name in watched
        },
        "rollout/failed_ratio": _mean([float(e.status == "failed") for e in trajectories]),
        "rollout/trained_ratio": _mean([float(e.trained) for e in trajectories]),
        "perf/rollout_time": seconds,
        "perf/engine_time": sum(e.timings.get("engine", 0.0) for e in trajectories) / processes,
        "perf/env_time": sum(e.timings.get("env", 0.0) for e in trajectories) / processes,
        "perf/tokens_per_second": sum(len(e.token_ids) for e in trajectories) / max(seconds, 1e-9),
    }


def _mean(values: Sequence[float] | np.ndarray) -> float | None:
    return float(np.mean(values)) if len(values) else None


@dataclass
class Collected:
    """An iteration's scored episodes.

    Attributes:
        trajectories: groups in order, dropped ones included.
        metrics: `rollout/…`, `perf/…`.
        sampler: state of the sampler after it.
    """

    trajectories: list[Trajectory]
    metrics: dict[str, float | None]
    sampler: dict[str, Any]


class AheadCollector:
    """Collects iteration k + 1 in a thread, with the weights that iteration k began with, while k is trained.

    Weights come from committed checkpoints, so a continued run collects an iteration in flight again with the same
    ones, and a server that comes back gets them however far the training is.

    Args:
        sampler: advanced by the collector alone.
        folder_of: folder of the policy of a version.
        pool: of one thread; it outlives the engine, whose end stops what is in flight.
    """

    def __init__(
        self, collector: Collector, sampler: PromptSampler, folder_of: Callable[[int], Path], pool: Executor
    ) -> None:
        self._collector, self._sampler = collector, sampler
        self._folder_of, self._pool = folder_of, pool
        self._pending: Future[Collected] | None = None
        self._loaded: int | None = None  # version of the engine's weights

    @staticmethod
    def version_of(iteration: int) -> int:
        """Version of the weights that roll out an iteration: the one that the iteration before it began with."""
        return max(iteration - 1, 0)

    def take(self, iteration: int, *, is_last: bool) -> Collected:
        """Wait for an iteration; the next one begins at once, unless this is the last."""
        began = time.perf_counter()
        if self._pending is None:  # of a loop that begins or continues
            self._begin(iteration)
        assert self._pending is not None
        found, self._pending = self._pending.result(), None
        waited = time.perf_counter() - began
        seconds = max(found.metrics["perf/rollout_time"] or 0.0, 1e-9)
        found.metrics |= {
            "perf/wait_time": waited,
            "perf/overlap": max(0.0, 1.0 - waited / seconds),
            "rollout/staleness": float(iteration - self.version_of(iteration)),
        }
        if not is_last:
            self._begin(iteration + 1)
        return found

    def wait(self) -> None:
        """Return when nothing is in flight; the engine may then get other weights until `take`.

        Raises:
            Exception: of a rollout that failed.
        """
        if self._pending is not None:
            self._pending.result()
        self._loaded = None

    def _begin(self, iteration: int) -> None:
        version = self.version_of(iteration)
        if self._loaded != version:
            self._collector.engine.update_weights(open_weights(self._folder_of(version)), version)
            self._loaded = version
        self._pending = self._pool.submit(self._collect, iteration)

    def _collect(self, iteration: int) -> Collected:
        trajectories, metrics = self._collector.collect(iteration, self._sampler)
        return Collected(trajectories, metrics, self._sampler.state())
