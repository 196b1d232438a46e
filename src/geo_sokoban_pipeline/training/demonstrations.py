"""Demonstrations: an expert's episodes as training samples.

They run through the episode code of the policy, so SFT trains on exactly the tokens that the policy would see and
write.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from geo_sokoban_pipeline.config.grpo import TrainOptions
from geo_sokoban_pipeline.config.policy import ExpertOptions
from geo_sokoban_pipeline.config.rollout import SamplingOptions
from geo_sokoban_pipeline.envs.base import make_expert
from geo_sokoban_pipeline.envs.plugins import load_object
from geo_sokoban_pipeline.policies.policy import Policy
from geo_sokoban_pipeline.rollout.engines.base import Result
from geo_sokoban_pipeline.rollout.episode import Episode, EpisodeRequest, RolloutSettings, load_generate
from geo_sokoban_pipeline.seeding import derive_seed, python_generator
from geo_sokoban_pipeline.tasks import task_of
from geo_sokoban_pipeline.training.batch import TrainSample, build_sample

logger = logging.getLogger(__name__)

_MOST_TRIES = 100


class Demonstrator:
    """Makes numbered demonstrations; demonstration n is a function of seed, purpose and prompts.

    Args:
        prompts: rows to draw from: first a difficulty uniformly, then one of its prompts.
        seed: seed of the run.
        purpose: name of the random stream, so that training and validation draw different demonstrations.
    """

    def __init__(
        self, prompts: Sequence[dict[str, Any]], policy: Policy, options: TrainOptions, seed: int, purpose: str
    ) -> None:
        self._policy = policy
        self._expert: ExpertOptions = options.warm_start.teacher
        self._build_env = load_object(options.env.factory, default_name="build_env")
        self._generate = load_generate(options.rollout)
        turns = self._expert.max_turns or options.rollout.max_turns
        # Limits per turn are for the policy's responses: an expert's response is never cut off.
        rollout = options.rollout.model_copy(update={"max_turns": turns, "max_tokens_per_turn": None})
        self._settings = RolloutSettings(options.env, options.reward, rollout, SamplingOptions(), 0, options.task)
        self._seed, self._purpose = seed, purpose
        self._task = task = task_of(options.task)
        if not prompts:
            raise ValueError(
                f"there are no {task.words.units} for {purpose} demonstrations; raise the counts or shares of the data "
                f"({task.name}.counts, {task.name}.shares), or set warm_start.steps=0."
            )
        self._buckets: dict[str, list[dict[str, Any]]] = {}
        for row in prompts:
            self._buckets.setdefault(str(task.difficulty_of(row)), []).append(row)
        self._labels = sorted(self._buckets)
        self._failure = ""

    def demonstrate(self, number: int) -> TrainSample:
        """Demonstration number n, as a training sample.

        Raises:
            RuntimeError: 100 episodes in a row had no response, or the environment failed in all.
        """
        generator = python_generator(self._seed, "demonstration", self._purpose, number)
        for attempt in range(_MOST_TRIES):
            seed = derive_seed(self._seed, "demonstration", self._purpose, number, "environment", attempt)
            if (sample := self._try_episode(generator, seed)) is not None:
                return sample
        raise RuntimeError(
            f"warm_start.teacher.name={self._expert.name} gave no usable demonstration in {_MOST_TRIES} "
            f"{self._task.words.units}; raise its patience, or choose another teacher.{self._failure}"
        )

    def _try_episode(self, generator: random.Random, seed: int) -> TrainSample | None:
        row = generator.choice(self._buckets[generator.choice(self._labels)])
        episode = Episode(
            0, EpisodeRequest(f"a demonstration on {row.get('id')}", row, 0, 0, seed), self._policy, self._settings
        )
        expert = make_expert(self._expert, row)
        codec = self._policy.codec
        try:
            episode.start(self._build_env, self._generate)
            while episode.is_pending and (text := expert.respond(episode.env, generator)) is not None:
                ids = np.append(codec.encode_text(text), np.int32(codec.end_id))
                episode.advance(Result(0, ids, np.zeros(len(ids), np.float32), "stop", 0))
            if episode.error is not None:
                # As in a rollout, an episode that raises is dropped; `demonstrate` raises where all do.
                self._failure = f" The last error of the environment: {episode.error}."
                logger.warning("a demonstration failed and is dropped: %s", episode.error)
                return None
            trajectory = episode.snapshot()
        finally:
            episode.close()
        return build_sample(trajectory, self._policy) if trajectory.loss_mask.any() else None


@dataclass(frozen=True)
class Demonstrations:
    """The demonstrations of a step, by number; each process makes the ones it trains on.

    Attributes:
        numbers: of the demonstrations.
        demonstrator: of this process; every worker has an equal one.
    """

    numbers: range
    demonstrator: Demonstrator

    def make(self) -> list[TrainSample]:
        """The demonstrations, in order."""
        return [self.demonstrator.demonstrate(number) for number in self.numbers]
