"""Collecting: an iteration's prompts become played and scored trajectories, refilled while the filter finds too
little.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from geo_sokoban_pipeline.evaluation.metrics import response_metrics
from geo_sokoban_pipeline.grpo.sampler import PromptSampler, SamplerKind, SamplerOptions
from geo_sokoban_pipeline.options.training import TrainOptions
from geo_sokoban_pipeline.policies.policy import Policy
from geo_sokoban_pipeline.rollout.conversation import EpisodeTask
from geo_sokoban_pipeline.rollout.engines.base import RolloutEngine
from geo_sokoban_pipeline.rollout.episode import Play, PlaySettings, load_player
from geo_sokoban_pipeline.seeding import derive_seed
from geo_sokoban_pipeline.tasks import task_of
from geo_sokoban_pipeline.training.leftovers import Leftover, Leftovers
from geo_sokoban_pipeline.training.scoring import is_solved, score_trajectories
from geo_sokoban_pipeline.trajectories import Trajectory

_SAMPLER_KINDS: dict[str, SamplerKind] = {"shuffle": "shuffle", "solve_rate": "bucket", "prompt_solve_rate": "prompt"}
Rows = Sequence[dict[str, Any]]


@dataclass(frozen=True)
class Collector:
    """Plays iterations of GRPO.

    Attributes:
        run: namespace of the run, the first part of trajectory ids.
        seed: seed of the run.
        prompts: rows of the training prompts.
        play: plays the episodes; None: `rollout.function`, in this process.
        leftovers: groups that earlier iterations gave up, with `rollout.partial`.
    """

    run: str
    seed: int
    options: TrainOptions
    prompts: Rows
    policy: Policy
    engine: RolloutEngine
    play: Play | None = None
    leftovers: Leftovers = field(default_factory=Leftovers)

    def collect(self, iteration: int, sampler: PromptSampler) -> tuple[list[Trajectory], dict[str, float | None]]:
        """Play and score one iteration; moves the sampler on.

        Returns:
            Trajectories (groups in order, dropped ones included) and metrics `rollout/…`, `perf/…`.
        """
        began = time.perf_counter()
        grpo = self.options.grpo
        first = math.ceil(grpo.groups * self.options.rollout.over_sampling)
        limit = max(first, math.ceil(grpo.groups * grpo.max_refill))
        chosen: list[int] = []
        trajectories: list[Trajectory] = []
        attempt = 0
        while True:
            wanted = first if not chosen else min(grpo.groups - _kept(trajectories), limit - len(chosen))
            before = self.leftovers.take(wanted)
            drawn = sampler.draw(iteration, wanted - len(before), attempt)
            trajectories += self._play(iteration, drawn, len(chosen), before)
            chosen += [*(group.prompt for group in before), *drawn]
            attempt += 1
            if len(chosen) >= limit:
                break
            # The fallback of `min_groups` is for the end: it would hide that signal is scarce from the refill.
            score_trajectories(trajectories, grpo, self.options.reward.args, min_groups=0)
            if _kept(trajectories) >= grpo.groups:
                break
        most = grpo.groups if self._samples_over else None
        filter_metrics = score_trajectories(trajectories, grpo, self.options.reward.args, most=most)
        if self.options.rollout.partial:
            self.leftovers.keep(trajectories, dict(enumerate(chosen)))
        self._follow(sampler, chosen, trajectories)
        seconds = time.perf_counter() - began
        watched = task_of(self.options.task).watched
        processes = 1 if self.play is None else self.options.processes
        return trajectories, {**describe_rollout(trajectories, seconds, watched, processes), **filter_metrics}

    def _play(
        self, iteration: int, drawn: Sequence[int], first_group: int, before: Sequence[Leftover]
    ) -> list[Trajectory]:
        """Play what was given up before, then prompts that were drawn."""
        options = self.options
        size = options.grpo.group_size
        new = [
            Leftover(
                index,
                [derive_seed(self.seed, "rollout", iteration, group, sample) for sample in range(size)],
                [None] * size,
            )
            for group, index in enumerate(drawn, start=first_group + len(before))
        ]
        tasks = [
            EpisodeTask(
                trajectory_id=f"{self.run}/i{iteration:05d}/g{group:03d}/s{sample:02d}",
                prompt=self.prompts[members.prompt],
                group_index=group,
                sample_index=sample,
                seed=seed,
                past=past,
            )
            for group, members in enumerate([*before, *new], start=first_group)
            for sample, (seed, past) in enumerate(zip(members.seeds, members.pasts, strict=True))
        ]
        settings = PlaySettings(
            options.env,
            options.reward,
            options.rollout,
            options.rollout.sampling,
            iteration,
            options.task,
            self.engine.version,
        )
        play = self.play or load_player(options.rollout)
        if not self._samples_over:
            return play(self.engine, self.policy, tasks, settings)
        return play(self.engine, self.policy, tasks, settings, enough=self._suffice)

    @property
    def _samples_over(self) -> bool:
        return self.options.rollout.over_sampling > 1

    def _suffice(self, over: list[Trajectory]) -> bool:
        """Whether the groups that are over give the update its `groups`."""
        score_trajectories(over, self.options.grpo, self.options.reward.args, min_groups=0)
        return _kept(over) >= self.options.grpo.groups

    def _follow(self, sampler: PromptSampler, chosen: Sequence[int], trajectories: Sequence[Trajectory]) -> None:
        rates: dict[int, list[float]] = {}
        for episode in trajectories:
            solved = is_solved(episode)
            if solved is not None:
                rates.setdefault(episode.group_index, []).append(float(solved))
        groups = sorted(rates)
        sampler.update([chosen[group] for group in groups], [float(np.mean(rates[group])) for group in groups])


def build_sampler(prompts: Rows, options: TrainOptions, seed: int, state: dict[str, Any] | None) -> PromptSampler:
    """Prompt sampler of a run, new or continued; its buckets are the task's difficulties."""
    order = options.prompts
    settings = SamplerOptions(
        seed=derive_seed(seed, "prompts"),
        kind=_SAMPLER_KINDS[order.order],
        floor=order.floor,
        smoothing=order.smoothing,
    )
    buckets = [task_of(options.task).difficulty_of(row) for row in prompts]
    return PromptSampler(buckets, settings) if state is None else PromptSampler.from_state(state, buckets, settings)


def describe_rollout(
    trajectories: Sequence[Trajectory],
    seconds: float,
    watched: Sequence[tuple[str, str]] = (),
    processes: int = 1,
) -> dict[str, float | None]:
    """Metrics of played episodes under the seed's names; what no episode can tell is None.

    Response lengths count sampled tokens, as do the means of log-probs; `returns` are the episodes' rewards, which GRPO
    without a critic equates.

    Args:
        seconds: that the rollout took.
        watched: further metrics of the episodes whose means are reported, as (metric, name).
        processes: that played side by side; the seconds of engine and environment are means over them.
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


def _kept(trajectories: Sequence[Trajectory]) -> int:
    return len({episode.group_index for episode in trajectories if episode.trained})
