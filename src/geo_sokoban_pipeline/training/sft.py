"""Warm start: SFT on an expert's demonstrations, so that GRPO starts from a policy that solves some prompts.

Every step trains on new, numbered demonstrations; the result is a function of options, seed, prompts and starting
policy. Each process makes the demonstrations it trains on. Validations change neither weights nor draws, and their time
is not counted; only `stop_below` reads one, to end the stage.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np

from geo_sokoban_pipeline.config.grpo import OptimizerOptions, TrainOptions
from geo_sokoban_pipeline.config.policy import WarmStartOptions
from geo_sokoban_pipeline.console import track
from geo_sokoban_pipeline.evaluation.rollouts import describe_rates, validate_policy
from geo_sokoban_pipeline.events import Event, emit
from geo_sokoban_pipeline.grpo.loss import SftObjective
from geo_sokoban_pipeline.grpo.schedules import learning_rate
from geo_sokoban_pipeline.policies.policy import Policy
from geo_sokoban_pipeline.rollout.engines.factory import build_engine
from geo_sokoban_pipeline.training.backend import build_backend
from geo_sokoban_pipeline.training.backends.base import TrainBackend
from geo_sokoban_pipeline.training.demonstrations import Demonstrations, Demonstrator
from geo_sokoban_pipeline.training.grpo_loop import sync_weights
from geo_sokoban_pipeline.training.runtime import Stopwatch, freeze_survivors
from geo_sokoban_pipeline.training.worker_group import WorkerGroup

logger = logging.getLogger(__name__)
Rows = Sequence[dict[str, Any]]
_MODES = ("sampled", "greedy")
_TRAINING = "training"
_DECAY_TO = 0.05  # share of the highest learning rate at the end


def run_sft(
    policy: Policy,
    prompts: Rows,
    validation_prompts: Rows,
    options: TrainOptions,
    seed: int,
    state: Path | None = None,
    first: int = 0,
    workers: WorkerGroup | None = None,
) -> tuple[list[dict[str, float]], TrainBackend]:
    """Train the policy in place on demonstrations.

    Args:
        prompts: rows that demonstrations are drawn from.
        state: folder with weights and optimizer state to continue from; None: the policy's weights alone.
        first: number of the first demonstration; earlier ones have been trained on.
        workers: whose ranks take every step together, perhaps fewer than wanted; None: this process alone.

    Returns:
        History and backend. The history has one row per validation: `step`, `seconds` and `cpu_seconds` of training so
        far, and, where measured, `loss` and `validation_loss` (nats per response token), `sampled_solve_rate` and
        `greedy_solve_rate`.
    """
    warm = options.warm_start
    if workers is not None:
        options = options.with_processes(workers.size)
    expert = Demonstrator(prompts, policy, options, seed, _TRAINING)
    history: list[dict[str, float]] = []
    losses: list[float] = []
    with track("warm start", warm.steps) as progress:
        # The first use of the workers waits for their start, so the held-out demonstrations are made before.
        validator = _Validator(validation_prompts, policy, options, seed, workers)
        backend = build_backend(
            policy, sft_optimizer(warm, options.optimizer), workers=workers, megatron=options.megatron_layout
        )
        if state is not None:
            backend.load_state(state)
        if workers is not None:
            workers.call_all("demonstrate", prompts, seed, _TRAINING)
        watch = Stopwatch() if workers is None else Stopwatch(workers.cpu_clock)
        freeze_survivors()
        for step in range(warm.steps):
            with watch.running():
                numbers = range(first + step * warm.episodes_per_step, first + (step + 1) * warm.episodes_per_step)
                metrics = backend.step(Demonstrations(numbers, expert), SftObjective(), _rate(warm, step))
                losses.append(metrics["loss"])
            emit(Event.SFT_STEP, step + 1)
            row = validator.validate(backend, step + 1)
            if "validation_loss" in row:
                row["loss"] = float(np.mean(losses))
                losses = []
            if row:
                history.append({"step": step + 1, **row, **watch.read()})
            if warm.stop_below is not None and row.get("validation_loss", np.inf) <= warm.stop_below:
                break
            progress.advance(note=_note(history))
    if not policy.is_empty:
        backend.renew()
    return history, backend


def sft_optimizer(warm: WarmStartOptions, optimizer: OptimizerOptions) -> OptimizerOptions:
    """Options of the backend of a warm start."""
    return OptimizerOptions(
        learning_rate=warm.learning_rate,
        betas=warm.betas,
        weight_decay=warm.weight_decay,
        matrices=warm.matrices,
        clip=warm.clip,
        max_tokens=warm.max_tokens,
        # The bounds of a step's memory are set once, for both stages.
        logit_chunk=optimizer.logit_chunk,
        vision_patches=optimizer.vision_patches,
        gradient_checkpointing=optimizer.gradient_checkpointing,
        offload=optimizer.offload,
        gradient_sync=optimizer.gradient_sync,
    )


class _Validator:
    """Validates the policy at the intervals of the options, without changing it."""

    def __init__(
        self, prompts: Rows, policy: Policy, options: TrainOptions, seed: int, workers: WorkerGroup | None
    ) -> None:
        self._warm, self._options, self._policy, self._seed = options.warm_start, options, policy, seed
        self._workers = workers
        self._prompts = list(prompts[: options.loop.eval_prompts])
        demonstrator = Demonstrator(prompts, policy, options, seed, "validation")
        self._held_out = [demonstrator.demonstrate(number) for number in range(self._warm.validation_episodes)]

    def validate(self, backend: TrainBackend, step: int) -> dict[str, float]:
        """Loss on held-out demonstrations and solve rates, each where it is due after this step; both at the end."""
        warm, last = self._warm, step == self._warm.steps
        row: dict[str, float] = {}
        if last or step % warm.validate_every == 0:
            row["validation_loss"] = float(-np.concatenate(backend.log_probs(self._held_out)).mean())
        stops = warm.stop_below is not None and row.get("validation_loss", np.inf) <= warm.stop_below
        if warm.play_every and self._prompts and (last or stops or step % warm.play_every == 0):
            row |= self._solve_rates(backend, step)
        return row

    def _solve_rates(self, backend: TrainBackend, step: int) -> dict[str, float]:
        if takes_turns := self._options.rollout.takes_turns:
            backend.offload()
        launcher = None if self._workers is None else self._workers.launcher
        with closing(build_engine(self._policy, self._options.rollout, launcher)) as engine:
            sync_weights(engine, backend, self._workers, step)
            rollout_fn = None if self._workers is None or not engine.in_process else self._workers.rollout
            _, metrics = validate_policy(
                "warm_start", self._seed, self._options, self._prompts, self._policy, engine, step, rollout_fn
            )
            if takes_turns:
                engine.offload()
        if takes_turns:
            backend.onload()
        logger.info("warm start, step %d: %s", step, describe_rates(metrics))
        return {f"{mode}_solve_rate": metrics[f"eval/validation/{mode}_solve_rate"] for mode in _MODES}


def _note(history: Sequence[dict[str, float]]) -> str:
    losses = [row["validation_loss"] for row in history if "validation_loss" in row]
    return f"held-out loss {losses[-1]:.3f}" if losses else ""


def _rate(warm: WarmStartOptions, step: int) -> float:
    return learning_rate(
        step,
        base=warm.learning_rate,
        warmup_steps=warm.warmup_steps,
        total_steps=warm.steps,
        decay_fraction=warm.decay_fraction,
        decay_to=_DECAY_TO,
    )
