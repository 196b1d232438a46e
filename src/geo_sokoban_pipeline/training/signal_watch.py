"""Warnings of the GRPO loop where its groups carry no signal: the policy solves everything, or nothing."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from geo_sokoban_pipeline.envs.base import Task

logger = logging.getLogger(__name__)

SOLVED_AT_START = 0.95  # validated solve rate from which a warm start leaves GRPO little to learn
_SCARCE = 0.9  # share of groups without a signal that counts as scarce
_SCARCE_ITERATIONS = 5  # in a row before the warning


class SignalWatch:
    """Warns once if most groups carry no signal, and reports at the end how many iterations trained nothing.

    A group whose episodes are all solved, or all unsolved, has advantages of 0. The numbers of each iteration are in
    its metrics (`rollout/dynamic_filter/…`, `rollout/trained_ratio`).
    """

    def __init__(self, task: Task) -> None:
        self.task = task
        self.seen = self.idle = self.scarce = 0
        self.warned = False

    def observe_start(self, solve_rate: float | None, steps: int) -> None:
        """Warn where the policy that GRPO starts from solves nearly everything.

        Args:
            solve_rate: of the validation, sampled, in [0, 1]; None: not validated.
            steps: of the warm start.
        """
        if solve_rate is None or solve_rate < SOLVED_AT_START:
            return
        run, words = self.task.run, self.task.words
        who, way_out = ("the starting policy", f"take harder {words.units}")
        if steps:
            who = "the warm start"
            way_out = (
                f"shorten it ({run}.warm_start.steps={steps}, or {run}.warm_start.stop_below), let it train on an "
                f"expert that is not always right ({run}.warm_start.teacher), or take harder {words.units}"
            )
        logger.warning(
            "%s already solves %.1f %% of the validation %s: GRPO has little left to learn and may lower that; %s",
            who,
            100 * solve_rate,
            words.units,
            way_out,
        )

    def observe(self, iteration: int, metrics: Mapping[str, float | None]) -> None:
        """Note an iteration; warn at the first without a trained group, or at the fifth scarce one in a row."""
        groups = int(metrics.get("rollout/groups") or 0)
        solved, unsolved = (
            int(metrics.get(f"rollout/dynamic_filter/drop_{name}_solved") or 0) for name in ("all", "none")
        )
        equal = sum(int(value or 0) for name, value in metrics.items() if name.startswith("rollout/zero_std/count_"))
        without = max(solved + unsolved, equal)
        idle = not metrics.get("rollout/trained_ratio")
        self.seen += 1
        self.idle += idle
        self.scarce = self.scarce + 1 if groups and without >= _SCARCE * groups else 0
        if self.warned or not (idle or self.scarce >= _SCARCE_ITERATIONS):
            return
        self.warned = True
        run, words = self.task.run, self.task.words
        rate = float(metrics.get("rollout/success_rate") or 0.0)
        if rate >= 0.5:
            why = f"{100 * rate:.0f} % of the episodes are solved"
            way_out = f"stop here, or start a run with harder {words.units} or fewer {run}.warm_start.steps"
        else:
            why = f"only {100 * rate:.0f} % of the episodes are solved"
            way_out = (
                f"raise {run}.warm_start.steps or {run}.grpo.group_size, take easier {words.units}, or give a reward "
                "for parts of a solution"
            )
        logger.warning(
            "iteration %d: no group to train on%s (%d groups, %d without a signal): %s; %s. Logged only once.",
            iteration,
            "" if idle else " but few",
            groups,
            without,
            why,
            way_out,
        )

    def close(self) -> None:
        """Log how many iterations trained nothing."""
        if self.idle:
            logger.warning(
                "%d of %d iterations trained nothing: none of their groups carried a signal "
                "(rollout/trained_ratio is 0 in their metrics)",
                self.idle,
                self.seen,
            )
