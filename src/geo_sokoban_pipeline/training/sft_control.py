"""SFT control: continue a run's warm start for the CPU-seconds that its GRPO took, to compare both at equal compute."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from geo_sokoban_pipeline.config.grpo import TrainOptions
from geo_sokoban_pipeline.config.study import ControlOptions
from geo_sokoban_pipeline.envs.base import Task
from geo_sokoban_pipeline.grpo.loss import SftObjective
from geo_sokoban_pipeline.policies.policy import Policy, load_as
from geo_sokoban_pipeline.runs.fingerprint import Fingerprint, differences
from geo_sokoban_pipeline.runs.policy_folder import PolicyFolder
from geo_sokoban_pipeline.tasks import task_of
from geo_sokoban_pipeline.training.backend import build_backend
from geo_sokoban_pipeline.training.backends.base import TrainBackend
from geo_sokoban_pipeline.training.demonstrations import Demonstrator
from geo_sokoban_pipeline.training.runtime import freeze_survivors
from geo_sokoban_pipeline.training.sft import run_sft, sft_optimizer
from geo_sokoban_pipeline.training.worker_group import WorkerGroup
from geo_sokoban_pipeline.trajectories.parquet import read_trajectories

Rows = Sequence[dict[str, Any]]
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
    policy = load_as(options.policy, start.path)
    warm = options.warm_start
    with closing(build_backend(policy, sft_optimizer(warm, options.optimizer))) as backend:
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
    return run_sft(policy, prompts, validation_prompts, longer, seed, start, budget.first, workers)


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
