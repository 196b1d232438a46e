"""Grading an answer: rules at once, algebra in worker processes, every text only once.

Equal answers to equal labels share one grade, even while it is computed, so that environment and reward agree and the
work is done once. `grade_answer` serves a whole process: one grader for each set of rules, all with one pool.
"""

from __future__ import annotations

import atexit
import math
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from concurrent.futures import TimeoutError as WaitTimeoutError
from dataclasses import dataclass
from hashlib import blake2b
from typing import get_args

from cachetools import LRUCache

from geo_sokoban_pipeline.config.base import refuse_first
from geo_sokoban_pipeline.rewards.math_answer.default import examine_default, extract_answer
from geo_sokoban_pipeline.rewards.math_answer.exact_numbers import label_text
from geo_sokoban_pipeline.rewards.math_answer.pool import Decision, GradingPool
from geo_sokoban_pipeline.rewards.math_answer.slime_exact import (
    behind_thoughts,
    boxed_answer,
    examine_geo3k,
    examine_slime,
)
from geo_sokoban_pipeline.rewards.math_answer.verdict import Grade, GraderName, Undecided


class _Shared:
    """The pool and the graders of one process, behind `grade_answer` and `prepare_grade`."""

    def __init__(self) -> None:
        self.begin_anew()

    def begin_anew(self) -> None:
        """Forget everything: a forked child has neither the threads nor the workers of its parent."""
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


# One per process: rewards are plain functions, and a pool for each would start its own workers.
_shared = _Shared()
os.register_at_fork(after_in_child=_shared.begin_anew)


def grade_answer(
    response: str | None, ground_truth: object, *, grader: GraderName = "default", tolerance: float = 0.0
) -> Grade:
    """Grade the last boxed answer of a response.

    Args:
        response: text of the policy without observations.
        ground_truth: the label, a text or a number; without a label no answer is correct.
        grader: `default` is safe and lenient in spelling, `slime_exact` gives the original math checker's verdicts,
            `deepscaler` the same for what follows the thoughts (without them every answer is wrong), `geo3k` those of
            the historic geometry checker.
        tolerance: largest absolute difference that is granted: `geo3k` between all but integers and plain fractions,
            `default` where the label is a decimal. 0: none.

    Returns:
        Whether it is correct, which rule decided, and what was in the box.

    Raises:
        ValueError: the grader is unknown, or the tolerance negative or not this grader's.
        GradingWorkerError: algebra is needed and no worker process can be started.
    """
    return _shared.grader(grader, tolerance).grade(response, ground_truth)


def prepare_grade(
    response: str | None, ground_truth: object, *, grader: GraderName = "default", tolerance: float = 0.0
) -> Future[Grade]:
    """Begin to grade in the background; returns the future of `grade_answer` with the same arguments."""
    return _shared.grader(grader, tolerance).submit(response, ground_truth)


PATIENCE = 60.0  # seconds from submission, the wait for a worker included
CACHE_SIZE = 1 << 16  # grades


# How each grader finds the answer in a response, and how it compares it with a label.
_RULES: dict[str, tuple[Callable[[str], str | None], Callable[[str, str, float], Grade | Undecided]]] = {
    "default": (extract_answer, examine_default),
    "slime_exact": (boxed_answer, examine_slime),
    "deepscaler": (behind_thoughts, examine_slime),
    "geo3k": (boxed_answer, examine_geo3k),
}


@dataclass
class _Cached:
    grade: Future[Grade]
    expires: float = math.inf  # `time.monotonic()` from which it is worked on anew


class Grader:
    """Grades answers by one set of rules; thread-safe.

    Args:
        grader, tolerance: as for `grade_answer`.
        pool: of worker processes, shared with others and closed by its owner.

    Raises:
        ValueError: the grader is unknown, or the tolerance negative or not this grader's.
    """

    def __init__(self, grader: GraderName = "default", tolerance: float = 0.0, *, pool: GradingPool) -> None:
        known = get_args(GraderName)
        refuse_first(
            (grader not in known, f"grader={grader!r}: must be one of {', '.join(known)}"),
            (not 0 <= tolerance < math.inf, f"tolerance={tolerance}: must be a finite number of at least 0"),
            (
                tolerance != 0 and grader in ("slime_exact", "deepscaler"),
                f"tolerance={tolerance}: {grader} has none; use grader='geo3k', or tolerance=0",
            ),
        )
        self._extract, self._examine = _RULES[grader]
        self._tolerance = float(tolerance)
        self._pool = pool
        # Futures, so that what is being worked on is known too: `functools.lru_cache` holds results alone.
        self._cache: LRUCache[bytes, _Cached] = LRUCache(CACHE_SIZE)
        self._lock = threading.Lock()

    def submit(self, response: str | None, label: object, *, patience: float = PATIENCE) -> Future[Grade]:
        """Begin to grade a response; returns at once.

        Args:
            response: text of the policy; None counts as empty.
            label: see `label_text`.
            patience: seconds after which an answer that no worker has got to counts as wrong, with rule `timeout`.

        Returns:
            Its grade, done already where no algebra is needed.
        """
        truth = label_text(label)
        if not truth.strip():
            return _done(Grade(False, "no_label"))
        box = self._extract(response or "")
        if box is None:
            return _done(Grade(False, "no_box"))
        key = blake2b(f"{len(box)}:{box}{truth}".encode("utf-8", "surrogatepass"), digest_size=16).digest()
        with self._lock:
            known = self._cache.get(key)
            if known is not None and time.monotonic() < known.expires:
                return known.grade
            grade: Future[Grade] = Future()
            self._cache[key] = _Cached(grade)
        try:
            self._begin(grade, key, box, truth, patience)
        except BaseException as error:
            self._forget(key)
            grade.set_exception(error)
            raise
        return grade

    def grade(self, response: str | None, label: object, *, patience: float = PATIENCE) -> Grade:
        """Grade a response; see `submit`.

        Raises:
            GradingWorkerError: a worker process is needed and cannot be started.
        """
        try:
            return self.submit(response, label, patience=patience).result(patience)
        except WaitTimeoutError:
            return Grade(False, "timeout", self._extract(response or ""))

    def _begin(self, grade: Future[Grade], key: bytes, box: str, truth: str, patience: float) -> None:
        found = self._examine(box, truth, self._tolerance)
        if isinstance(found, Grade):
            grade.set_result(found)
            return
        decision = self._pool.submit(found.question, time.monotonic() + patience)
        decision.add_done_callback(lambda done: self._finalize(grade, key, found, done, patience))

    def _finalize(
        self, grade: Future[Grade], key: bytes, undecided: Undecided, decision: Future[Decision], patience: float
    ) -> None:
        try:
            answer = decision.result()
        except (Exception, CancelledError) as error:
            self._forget(key)
            grade.set_exception(error)
            return
        # `failed` is kept although the fault may be the machine's: the reward must not get another verdict than the
        # environment.
        if answer == "late":
            # The reward asks soon after the environment: it gets the same verdict and does not wait.
            with self._lock:
                if (known := self._cache.get(key)) is not None:
                    known.expires = time.monotonic() + patience
        if answer in ("yes", "no"):
            grade.set_result(undecided.grade(answer == "yes"))
        else:
            grade.set_result(undecided.grade(False, "failed" if answer == "failed" else "timeout"))

    def _forget(self, key: bytes) -> None:
        with self._lock:
            self._cache.pop(key, None)


def _done(grade: Grade) -> Future[Grade]:
    future: Future[Grade] = Future()
    future.set_result(grade)
    return future
