"""Control: the warm start of a run goes on for the CPU-seconds that its GRPO took, so that both can be compared.

What the run spent is measured, not estimated: both stages record their CPU-seconds without validations. The number of
steps follows from them before the first step, so the control itself is a function of its options, the seed and the run.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from geo_sokoban_pipeline.folders import PolicyFolder
from geo_sokoban_pipeline.options.policy import TeacherOptions
from geo_sokoban_pipeline.options.study import ControlOptions
from geo_sokoban_pipeline.options.training import TrainOptions
from geo_sokoban_pipeline.policies.policy import Policy
from geo_sokoban_pipeline.training.backends.fsdp import FsdpBackend
from geo_sokoban_pipeline.training.warm_start import build_imitator, imitate_teacher
from geo_sokoban_pipeline.trajectory_files import read_trajectories

Rows = Sequence[dict[str, Any]]
_SPENT = ("perf/cpu_time", "perf/save_cpu_time")


class ControlError(ValueError):
    """A run that cannot have a control; the message says what is missing and the way out."""


@dataclass(frozen=True)
class Budget:
    """What a control may spend.

    Attributes:
        grpo_cpu_seconds: of all iterations of the source run: playing, updating, writing; no validation.
        cpu_seconds_per_step: of its warm start, without validations.
        steps: optimizer steps of the control.
        first: number of its first demonstration.
    """

    grpo_cpu_seconds: float
    cpu_seconds_per_step: float
    steps: int
    first: int

    def entries(self) -> dict[str, float]:
        """What the control's manifest keeps."""
        return {
            "grpo_cpu_seconds": self.grpo_cpu_seconds,
            "cpu_seconds_per_step": self.cpu_seconds_per_step,
            "steps": self.steps,
        }


def plan_budget(start: PolicyFolder, metrics: Rows, episodes_per_step: int, share: float) -> Budget:
    """Steps = ⌈share × CPU-seconds of GRPO ÷ CPU-seconds of a warm-start step⌉.

    Args:
        start: the run's policy after its warm start.
        metrics: rows of its iterations.
        episodes_per_step: demonstrations of a step.
        share: multiple of GRPO's CPU-seconds.

    Raises:
        ControlError: the run has no warm start, no iterations, or none whose CPU-seconds were recorded.
    """
    history = start.manifest.get("history") or []
    done = int(history[-1]["step"]) if history else 0
    spent = float(history[-1].get("cpu_seconds", 0.0)) if history else 0.0
    if not done or spent <= 0:
        raise ControlError(
            f"{start.path} has no warm start to go on with (warm_start.steps=0, or a policy from elsewhere); "
            "give control_sokoban.source a run that has one."
        )
    if not metrics or any(row.get(_SPENT[0]) is None for row in metrics):
        raise ControlError(
            f"the run of {start.path} has no iterations with {_SPENT[0]}; train it to its end with this version first."
        )
    grpo = grpo_cpu_seconds(metrics)
    return Budget(grpo, spent / done, max(1, math.ceil(share * grpo * done / spent)), done * episodes_per_step)


def grpo_cpu_seconds(metrics: Rows) -> float:
    """CPU-seconds of iterations without validations: playing, updating, and writing the iteration before."""
    return math.fsum(float(row.get(name) or 0.0) for row in metrics for name in _SPENT)


def continue_warm_start(
    policy: Policy,
    start: Path,
    prompts: Rows,
    validation_prompts: Rows,
    options: TrainOptions,
    seed: int,
    budget: Budget,
) -> tuple[list[dict[str, float]], FsdpBackend]:
    """Imitate further with weights and optimizer state of a warm start; returns history and trainer.

    The learning rate is the warm start's highest from the first step on and falls over the last share of the steps as
    it did there.

    Args:
        policy: trained in place; its weights are those of `start`.
        start: folder with weights and optimizer state.
        options: of the control, see `control_options`.
    """
    warm = options.warm_start.model_copy(update={"steps": budget.steps, "warmup_steps": 0, "stop_below": None})
    longer = options.model_copy(update={"warm_start": warm})
    backend = build_imitator(policy, warm)
    backend.load_state(start)
    history = imitate_teacher(policy, prompts, validation_prompts, longer, seed, backend, budget.first)
    return history, backend


def control_options(options: TrainOptions, control: ControlOptions) -> TrainOptions:
    """Options of the run with the control's teacher."""
    if control.imitate == "teacher":
        return options
    teacher = TeacherOptions(name="solver", patience=None, max_turns=options.warm_start.teacher.max_turns)
    return options.model_copy(update={"warm_start": options.warm_start.model_copy(update={"teacher": teacher})})


def drawn_levels(files: Iterable[Path]) -> Counter[str]:
    """How often GRPO drew each level: groups by `task_id`, dropped ones included, over all stored iterations."""
    groups: dict[tuple[int, int], str] = {}
    for file in files:
        table = read_trajectories(file, ["task_id", "iteration", "group_index"])
        columns = (table.column(name).to_pylist() for name in ("iteration", "group_index", "task_id"))
        groups |= {(iteration, group): level for iteration, group, level in zip(*columns, strict=True)}
    return Counter(groups.values())


def repeat_levels(prompts: Rows, times: Mapping[str, int]) -> list[dict[str, Any]]:
    """Each prompt as often as its level was drawn, as one pool from which demonstrations draw uniformly.

    Raises:
        ControlError: a drawn level is not among the prompts.
    """
    by_level: dict[str, dict[str, Any]] = {}
    for row in prompts:
        by_level.setdefault(str(row.get("level_hash") or row["id"]), row)
    unknown = sorted(set(times) - set(by_level))
    if unknown:
        raise ControlError(
            f"{len(unknown)} levels of the source run are not in sokoban.prompts (first: {unknown[0]}); "
            "the data were made anew with other settings. Make them with those of the run."
        )
    # Without a length all rows are of one difficulty; demonstrations draw a difficulty first, then a row of it.
    return [{**by_level[level], "solution_length": None} for level in sorted(times) for _ in range(times[level])]
