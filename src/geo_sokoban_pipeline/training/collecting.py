"""Collecting: an iteration's prompts become played and scored trajectories, refilled while the filter finds too
little.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from geo_sokoban_pipeline.envs.plugins import load_object
from geo_sokoban_pipeline.grpo.sampler import PromptSampler, SamplerKind, SamplerOptions
from geo_sokoban_pipeline.options.training import PromptOptions, TrainOptions
from geo_sokoban_pipeline.policies.policy import Policy
from geo_sokoban_pipeline.rollout.conversation import EpisodeTask
from geo_sokoban_pipeline.rollout.engines.base import RolloutEngine
from geo_sokoban_pipeline.rollout.episode import PlaySettings
from geo_sokoban_pipeline.seeding import derive_seed
from geo_sokoban_pipeline.training.scoring import is_solved, score_trajectories
from geo_sokoban_pipeline.trajectories import Trajectory

logger = logging.getLogger(__name__)
_SAMPLER_KINDS: dict[str, SamplerKind] = {"shuffle": "shuffle", "solve_rate": "bucket", "prompt_solve_rate": "prompt"}
Rows = Sequence[dict[str, Any]]
Play = Callable[..., list[Trajectory]]


@dataclass(frozen=True)
class Collector:
    """Plays iterations of GRPO.

    Attributes:
        run: namespace of the run, the first part of trajectory ids.
        seed: seed of the run.
        prompts: rows of the training prompts.
    """

    run: str
    seed: int
    options: TrainOptions
    prompts: Rows
    policy: Policy
    engine: RolloutEngine

    def collect(self, iteration: int, sampler: PromptSampler) -> tuple[list[Trajectory], dict[str, float]]:
        """Play and score one iteration; moves the sampler on.

        Returns:
            Trajectories (groups in order, dropped ones included) and metrics `rollout/…`, `perf/…`.
        """
        began = time.perf_counter()
        grpo = self.options.grpo
        limit = max(grpo.groups, math.ceil(grpo.groups * grpo.max_refill))
        chosen: list[int] = []
        trajectories: list[Trajectory] = []
        attempt = 0
        while len(chosen) < limit:
            wanted = grpo.groups if not chosen else min(grpo.groups - _kept(trajectories), limit - len(chosen))
            drawn = sampler.draw(iteration, wanted, attempt)
            trajectories += self._play(iteration, drawn, first_group=len(chosen))
            chosen += drawn
            attempt += 1
            # The fallback of `min_groups` is for the end: it would hide that signal is scarce from the refill.
            score_trajectories(trajectories, grpo, self.options.reward.args, min_groups=0)
            if _kept(trajectories) >= grpo.groups:
                break
        filter_metrics = score_trajectories(trajectories, grpo, self.options.reward.args)
        if not _kept(trajectories):
            logger.warning(
                "iteration %d: %d groups played, but no group to train on; it commits without an update",
                iteration,
                len(chosen),
            )
        self._follow(sampler, chosen, trajectories)
        seconds = time.perf_counter() - began
        return trajectories, {**describe_rollout(trajectories, seconds), **filter_metrics}

    def _play(self, iteration: int, drawn: Sequence[int], first_group: int) -> list[Trajectory]:
        options = self.options
        tasks = [
            EpisodeTask(
                trajectory_id=f"{self.run}/i{iteration:05d}/g{group:03d}/s{sample:02d}",
                prompt=self.prompts[index],
                group_index=group,
                sample_index=sample,
                seed=derive_seed(self.seed, "rollout", iteration, group, sample),
            )
            for group, index in enumerate(drawn, start=first_group)
            for sample in range(options.grpo.group_size)
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
        play: Play = load_object(options.rollout.function, default_name="play_episodes")
        return play(self.engine, self.policy, tasks, settings)

    def _follow(self, sampler: PromptSampler, chosen: Sequence[int], trajectories: Sequence[Trajectory]) -> None:
        rates: dict[int, list[float]] = {}
        for episode in trajectories:
            solved = is_solved(episode)
            if solved is not None:
                rates.setdefault(episode.group_index, []).append(float(solved))
        groups = sorted(rates)
        sampler.update([chosen[group] for group in groups], [float(np.mean(rates[group])) for group in groups])


def build_sampler(prompts: Rows, options: PromptOptions, seed: int, state: dict[str, Any] | None) -> PromptSampler:
    """Prompt sampler of a run, new or continued."""
    settings = SamplerOptions(
        seed=derive_seed(seed, "prompts"),
        kind=_SAMPLER_KINDS[options.order],
        floor=options.floor,
        smoothing=options.smoothing,
    )
    buckets = [row.get("solution_length") for row in prompts]
    return PromptSampler(buckets, settings) if state is None else PromptSampler.from_state(state, buckets, settings)


def describe_rollout(trajectories: Sequence[Trajectory], seconds: float) -> dict[str, float]:
    """Metrics of played episodes under the seed's names; response lengths count sampled tokens."""
    rewards = [episode.reward for episode in trajectories if episode.reward is not None]
    solved = [float(value) for episode in trajectories if (value := is_solved(episode)) is not None]
    lengths = np.array([int(episode.loss_mask.sum()) for episode in trajectories] or [0])
    advantages = [episode.advantage for episode in trajectories if episode.advantage is not None]
    engine = sum(episode.timings.get("engine", 0.0) for episode in trajectories)
    env = sum(episode.timings.get("env", 0.0) for episode in trajectories)
    count = max(len(trajectories), 1)
    share = {status: sum(e.status == status for e in trajectories) / count for status in ("truncated", "failed")}
    return {
        "rollout/episodes": float(len(trajectories)),
        "rollout/raw_reward": float(np.mean(rewards or [0.0])),
        "rollout/advantages": float(np.mean(advantages or [0.0])),
        "rollout/success_rate": float(np.mean(solved or [0.0])),
        "rollout/response_len/mean": float(lengths.mean()),
        "rollout/response_len/median": float(np.median(lengths)),
        "rollout/response_len/max": float(lengths.max()),
        "rollout/response_len/min": float(lengths.min()),
        "rollout/turns/mean": float(np.mean([e.metrics.get("turns", 0.0) for e in trajectories] or [0.0])),
        "rollout/truncated_ratio": share["truncated"],
        "rollout/failed_ratio": share["failed"],
        "rollout/trained_ratio": sum(e.trained for e in trajectories) / count,
        "perf/rollout_time": seconds,
        "perf/engine_time": engine,
        "perf/env_time": env,
        "perf/tokens_per_second": float(sum(len(e.token_ids) for e in trajectories) / max(seconds, 1e-9)),
    }


def _kept(trajectories: Sequence[Trajectory]) -> int:
    return len({episode.group_index for episode in trajectories if episode.trained})
