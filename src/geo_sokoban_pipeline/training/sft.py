"""Warm start: SFT on an expert's demonstrations, so that GRPO starts from a policy that solves some prompts.

Every step trains on new, numbered demonstrations; the result is a function of options, seed, prompts and starting
policy. Each process makes the demonstrations it trains on. Validations change neither weights nor draws, and their time
is not counted; only `stop_below` reads one, to end the stage.

An SFT control continues a run's warm start for the CPU-seconds that its GRPO took, to compare both at equal compute.
"""

from __future__ import annotations

import logging
import math
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from geo_sokoban_pipeline.config.grpo import OptimizerOptions, TrainOptions
from geo_sokoban_pipeline.config.policy import WarmStartOptions
from geo_sokoban_pipeline.config.study import ControlOptions
from geo_sokoban_pipeline.console import track
from geo_sokoban_pipeline.envs.base import Task
from geo_sokoban_pipeline.evaluation.rollouts import describe_rates, validate_policy
from geo_sokoban_pipeline.events import Event, emit
from geo_sokoban_pipeline.grpo.loss import SftObjective
from geo_sokoban_pipeline.grpo.schedules import learning_rate
from geo_sokoban_pipeline.policies.lora import Adapter
from geo_sokoban_pipeline.policies.policy import Policy, load_as
from geo_sokoban_pipeline.rollout.engines.factory import build_engine
from geo_sokoban_pipeline.runs.fingerprint import Fingerprint, differences
from geo_sokoban_pipeline.runs.policy_folder import PolicyFolder
from geo_sokoban_pipeline.tasks import task_of
from geo_sokoban_pipeline.training.backend import build_backend
from geo_sokoban_pipeline.training.backends.base import TrainBackend
from geo_sokoban_pipeline.training.demonstrations import Demonstrations, Demonstrator
from geo_sokoban_pipeline.training.grpo_loop import sync_weights
from geo_sokoban_pipeline.training.runtime import Stopwatch, freeze_survivors
from geo_sokoban_pipeline.training.worker_group import WorkerGroup
from geo_sokoban_pipeline.trajectories.parquet import read_trajectories

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


_SPENT = ("perf/cpu_time", "perf/save_cpu_time")


class ControlError(ValueError):
    """A run that cannot have a control; the message says what is missing and the way out."""


@dataclass(frozen=True)
class Budget:
    """Compute budget of a control.

    Attributes:
        grpo_cpu_seconds: of all iterations of the source run: rollout, update and writing, without validations.
        cpu_seconds_per_step: of the control, see `time_steps`.
        steps: optimizer steps of the control.
        first: number of its first demonstration.
    """

    grpo_cpu_seconds: float
    cpu_seconds_per_step: float
    steps: int
    first: int


def check_source(start: PolicyFolder, metrics: Rows, iterations: int, *, complete: bool, wanted: Fingerprint) -> None:
    """Check that a run can have a control, and that this command has the run's settings.

    Args:
        start: the run's policy after its warm start.
        metrics: rows of its iterations.
        iterations: `loop.iterations` of this command.
        complete: whether the run's loop is finished.
        wanted: fingerprint of a warm start with this command's settings, seed and prompts, without its starting policy.

    Raises:
        ControlError: the run has no warm start, is not finished, has no recorded CPU-seconds, or other settings.
    """
    history = start.manifest.get("history") or []
    if not history or not history[-1].get("step"):
        raise ControlError(
            f"{start.path} has no warm start to continue (warm_start.steps=0, or a policy from elsewhere); "
            "name a run with a warm start as the control's source."
        )
    if not complete or len(metrics) != iterations:
        raise ControlError(
            f"the run of {start.path} is not finished: {len(metrics)} of loop.iterations={iterations} iterations are "
            "stored. Train it to its end, or give this command the loop.iterations that the run has."
        )
    if any(row.get(_SPENT[0]) is None for row in metrics):
        raise ControlError(
            f"the run of {start.path} has no iterations with {_SPENT[0]}; train it to its end with this version first."
        )
    stored = start.manifest.get("fingerprint", {})
    unlike = differences({name: stored[name] for name in stored if name != "input.base_policy"}, wanted)
    if unlike:
        lines = "\n  ".join(unlike)
        raise ControlError(
            f"the run of {start.path} has other settings than this command:\n  {lines}\n"
            "A control may differ from its run only in the stage it replaces: give the command the settings and the "
            "seed of the run, or name another run as the control's source."
        )


def plan_budget(
    start: PolicyFolder, metrics: Rows, episodes_per_step: int, share: float, cpu_seconds_per_step: float
) -> Budget:
    """Steps = ⌈share × CPU-seconds of GRPO ÷ CPU-seconds of a step⌉.

    Args:
        start: the run's policy after its warm start, of a run that `check_source` accepts.
        metrics: rows of its iterations.
        episodes_per_step: demonstrations of a step.
        share: multiple of GRPO's CPU-seconds.
        cpu_seconds_per_step: cost of a step of the control.
    """
    grpo, done = grpo_cpu_seconds(metrics), int(start.manifest["history"][-1]["step"])
    steps = max(1, math.ceil(share * grpo / cpu_seconds_per_step))
    return Budget(grpo, cpu_seconds_per_step, steps, done * episodes_per_step)


def time_steps(
    start: PolicyFolder,
    prompts: Rows,
    options: TrainOptions,
    seed: int,
    *,
    untimed: int = 10,
    timed: int = 10,
    rounds: int = 3,
) -> float:
    """CPU-seconds of a step of a control, measured on a throw-away copy of the policy.

    Its demonstrations come from a random stream of their own. The first steps are not timed: they fill the caches of
    images and texts, which a control pays for once. The cheapest of several rounds counts, so a disturbance can only
    make the control longer, never shorter.

    Args:
        prompts: of the control.
        options: of the control, see `control_options`.
        untimed: steps before the first round.
        timed: steps of a round.
    """
    policy = load_as(options.policy, start.path, Adapter.fresh(options.policy.adapter, start.path, seed))
    warm = options.warm_start
    with closing(build_backend(policy, sft_optimizer(warm, options.optimizer))) as backend:
        if policy.adapter is None:
            backend.load_state(start.path)
        expert, size = Demonstrator(prompts, policy, options, seed, "timing"), warm.episodes_per_step
        freeze_survivors()

        def take_steps(steps: range) -> float:
            began = time.process_time()
            for step in steps:
                samples = [expert.demonstrate(number) for number in range(step * size, (step + 1) * size)]
                backend.step(samples, SftObjective(), warm.learning_rate)
            return (time.process_time() - began) / len(steps)

        take_steps(range(untimed))
        firsts = range(untimed, untimed + timed * rounds, timed)
        return min(take_steps(range(first, first + timed)) for first in firsts)


def grpo_cpu_seconds(metrics: Rows) -> float:
    """CPU-seconds of iterations: rollout, update, and writing the previous iteration; without validations."""
    return math.fsum(float(row.get(name) or 0.0) for row in metrics for name in _SPENT)


def continue_warm_start(
    policy: Policy,
    start: Path,
    prompts: Rows,
    validation_prompts: Rows,
    options: TrainOptions,
    seed: int,
    budget: Budget,
    workers: WorkerGroup | None = None,
) -> tuple[list[dict[str, float]], TrainBackend]:
    """Continue SFT from weights and optimizer state of a warm start; returns history and backend.

    With an adapter it begins with a fresh one, as GRPO does.

    The learning rate has no warm-up: it starts at the warm start's full rate and decays over the same last fraction of
    the steps.

    Args:
        policy: trained in place; its weights are those of `start`.
        start: folder with weights and optimizer state.
        options: of the control, see `control_options`.
        workers: see `run_sft`.
    """
    warm = options.warm_start.model_copy(update={"steps": budget.steps, "warmup_steps": 0, "stop_below": None})
    longer = options.model_copy(update={"warm_start": warm})
    state = start if policy.adapter is None else None
    return run_sft(policy, prompts, validation_prompts, longer, seed, state, budget.first, workers)


def control_options(options: TrainOptions, control: ControlOptions) -> TrainOptions:
    """Options of the run, with the expert of the control.

    Raises:
        ControlError: the task has no optimal expert.
    """
    if control.imitate == "teacher":
        return options
    own, best = options.warm_start.teacher, task_of(options.task).optimal
    if best is None:
        raise ControlError(f"control_{options.task}.imitate=optimal: the task names no optimal expert. Take teacher.")
    expert = type(own).model_validate({"name": best, "patience": None, "max_turns": own.max_turns})
    return options.model_copy(update={"warm_start": options.warm_start.model_copy(update={"teacher": expert})})


def drawn_prompts(files: Iterable[Path]) -> Counter[str]:
    """How often GRPO drew each prompt: groups by `task_id`, dropped ones included, over all stored iterations."""
    groups: dict[tuple[int, int], str] = {}
    for file in files:
        table = read_trajectories(file, ["task_id", "iteration", "group_index"])
        columns = (table.column(name).to_pylist() for name in ("iteration", "group_index", "task_id"))
        groups |= {(iteration, group): key for iteration, group, key in zip(*columns, strict=True)}
    return Counter(groups.values())


def repeat_prompts(prompts: Rows, times: Mapping[str, int], task: Task) -> list[dict[str, Any]]:
    """Each prompt as often as it was drawn, as one pool from which demonstrations draw uniformly.

    Raises:
        ControlError: a drawn prompt is not among the prompts.
    """
    by_key: dict[str, dict[str, Any]] = {}
    for row in prompts:
        by_key.setdefault(task.key_of(row), row)
    if unknown := sorted(set(times) - set(by_key)):
        raise ControlError(
            f"{len(unknown)} {task.words.units} of the source run are not in {task.name}.prompts (first: "
            f"{unknown[0]}): the data have been made with other settings since. Make them with the run's settings."
        )
    # Without difficulties the draw is uniform over rows: demonstrations draw a difficulty first, then one of its rows.
    return [{**by_key[key], task.difficulty: None} for key in sorted(times) for _ in range(times[key])]
