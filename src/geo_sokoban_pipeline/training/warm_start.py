"""Warm start: supervised imitation of a teacher, until GRPO has something to work with.

Demonstrations are fresh in every step and numbered, so the result is a function of the options, the seed, the prompts
and the policy it starts from.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from geo_sokoban_pipeline.grpo.schedules import learning_rate
from geo_sokoban_pipeline.options.policy import WarmStartOptions
from geo_sokoban_pipeline.options.training import OptimizerOptions, TrainOptions
from geo_sokoban_pipeline.policies.policy import Policy
from geo_sokoban_pipeline.progress import track
from geo_sokoban_pipeline.signposts import reached
from geo_sokoban_pipeline.training.backends.fsdp import FsdpBackend
from geo_sokoban_pipeline.training.demonstrations import Demonstrator
from geo_sokoban_pipeline.training.objectives import ImitationObjective

Rows = Sequence[dict[str, Any]]


def imitate_teacher(
    policy: Policy, prompts: Rows, validation_prompts: Rows, options: TrainOptions, seed: int
) -> list[dict[str, float]]:
    """Train the policy in place on demonstrations.

    Returns:
        History, one row per validation: `step`, `loss` and `validation_loss` (nats per reply token), `seconds`,
        `cpu_seconds`.
    """
    warm = options.warm_start
    backend = FsdpBackend(policy, _optimizer_options(warm))
    teacher = Demonstrator(prompts, policy, options, seed, "training")
    examiner = Demonstrator(validation_prompts, policy, options, seed, "validation")
    held_out = [examiner.demonstrate(number) for number in range(warm.validation_episodes)]
    history: list[dict[str, float]] = []
    losses: list[float] = []
    began, cpu = time.perf_counter(), time.process_time()
    with track("warm start", warm.steps) as progress:
        for step in range(warm.steps):
            first = step * warm.episodes_per_step
            samples = [teacher.demonstrate(first + number) for number in range(warm.episodes_per_step)]
            losses.append(backend.step(samples, ImitationObjective(), _rate(warm, step))["loss"])
            reached("warm start step")
            if (step + 1) % warm.validate_every == 0 or step + 1 == warm.steps:
                loss = _validation_loss(backend, held_out)
                spent = {"seconds": time.perf_counter() - began, "cpu_seconds": time.process_time() - cpu}
                history.append({"step": step + 1, "loss": float(np.mean(losses)), "validation_loss": loss, **spent})
                losses = []
                if warm.stop_below is not None and loss <= warm.stop_below:
                    break
            progress.advance(note=f"loss {history[-1]['validation_loss']:.3f}" if history else "")
    backend.close()
    return history


def _validation_loss(backend: FsdpBackend, samples: Sequence[Any]) -> float:
    return float(-np.concatenate(backend.log_probs(samples)).mean())


def _rate(warm: WarmStartOptions, step: int) -> float:
    decays = warm.decay_fraction > 0
    return learning_rate(
        step,
        base=warm.learning_rate,
        warmup_steps=warm.warmup_steps,
        total_steps=warm.steps,
        decay_fraction=warm.decay_fraction if decays else 1.0,
        decay_to=warm.decay_to,
        kind="linear" if decays else "constant",
    )


def _optimizer_options(warm: WarmStartOptions) -> OptimizerOptions:
    return OptimizerOptions(
        learning_rate=warm.learning_rate,
        betas=warm.betas,
        weight_decay=warm.weight_decay,
        clip=warm.clip,
        max_tokens=warm.max_tokens,
    )
