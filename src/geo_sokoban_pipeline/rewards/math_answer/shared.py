"""Graders of this process: one for each set of rules, all with one pool, made when first used and closed at the end."""

from __future__ import annotations

import atexit
import os
import threading
from concurrent.futures import Future

from geo_sokoban_pipeline.rewards.math_answer.grader import Grader
from geo_sokoban_pipeline.rewards.math_answer.pool import GradingPool
from geo_sokoban_pipeline.rewards.math_answer.verdict import Grade, GraderName


class _Shared:
    """The pool and the graders of one process."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.pool: GradingPool | None = None
        self.graders: dict[tuple[str, float], Grader] = {}

    def grader(self, grader: GraderName, tolerance: float) -> Grader:
        with self.lock:
            if self.pool is None:
                self.pool = GradingPool()
                atexit.register(self.pool.close)
            key = (grader, float(tolerance))
            if key not in self.graders:
                self.graders[key] = Grader(grader, tolerance, pool=self.pool)
            return self.graders[key]


_shared = _Shared()


def _begin_anew() -> None:
    """A forked child has neither the threads nor the workers of its parent."""
    global _shared  # noqa: PLW0603
    _shared = _Shared()


os.register_at_fork(after_in_child=_begin_anew)


def grade_answer(
    response: str | None, ground_truth: object, *, grader: GraderName = "default", tolerance: float = 0.0
) -> Grade:
    """Grade the last boxed answer of a response.

    Args:
        response: text of the policy; what an environment said must not be in it.
        ground_truth: the label, a text or a number; None or an empty one grants nothing.
        grader: `default` is safe and lenient in spelling, `slime_exact` gives the original math checker's verdicts,
            `deepscaler` the same for what follows the thoughts, `geo3k` those of the historic geometry checker.
        tolerance: largest absolute difference that is granted: `geo3k` between all but integers and plain fractions,
            `default` where the label is a decimal. 0: none.

    Returns:
        Whether it is correct, which rule decided, and what was in the box.

    Raises:
        ValueError: the grader is unknown, or the tolerance negative or not this grader's.
        WorkerError: algebra is needed and no worker process can be started.
    """
    return _shared.grader(grader, tolerance).grade(response, ground_truth)


def prepare_grade(
    response: str | None, ground_truth: object, *, grader: GraderName = "default", tolerance: float = 0.0
) -> Future[Grade]:
    """Begin to grade in the background; returns at once what `grade_answer` with the same arguments will give."""
    return _shared.grader(grader, tolerance).submit(response, ground_truth)
