"""Answer sheet: the replies of an episode, the reference, and the grader; all verdicts and numbers come from here.

Only what the policy wrote is graded. A missing reference makes every answer wrong.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future

from geo_sokoban_pipeline.envs.geo3k.problems.exact import answer_form
from geo_sokoban_pipeline.options.geo3k_play import GradingOptions
from geo_sokoban_pipeline.rewards.answer_text import assistant_text, has_box, repetition
from geo_sokoban_pipeline.rewards.math_answer import Grade, prepare_grade


class AnswerSheet:
    """What an episode is graded on.

    Args:
        ground_truth: the reference, a text or a number; None: there is none.
        options: grader and tolerance.
        family: of the problem; None: it is not known.

    Attributes:
        replies: of the policy, in order.
        truncated: whether the episode was cut off.
    """

    def __init__(self, ground_truth: object, options: GradingOptions, family: str | None = None) -> None:
        self.ground_truth = None if ground_truth is None else str(ground_truth)
        self._family = family
        self._options = options
        self.clear()

    def clear(self) -> None:
        """Forget the episode."""
        self._grades: dict[str, Future[Grade]] = {}
        self.replies: list[str] = []
        self.truncated = False

    def prepare(self, response: str) -> Future[Grade]:
        """Begin to grade a text in the background; every text is asked for once, whatever becomes of it."""
        if response not in self._grades:
            options = self._options
            self._grades[response] = prepare_grade(
                response, self.ground_truth, grader=options.grader, tolerance=options.tolerance
            )
        return self._grades[response]

    def grade(self, response: str) -> Grade:
        """Verdict on the last box of a text; waits for it."""
        return self.prepare(response).result()

    def text(self, replies: Sequence[str] | None = None) -> str:
        """What is graded of replies; None: of those so far."""
        return assistant_text(self.replies if replies is None else replies, thoughts=self._options.keeps_thoughts)

    def conclude(self, replies: Sequence[str], status: str) -> None:
        """Take all replies of a finished episode, those that ended it included."""
        self.replies = list(replies)
        self.truncated = status == "truncated"

    def metrics(self) -> dict[str, float]:
        """Numbers that both tasks have.

        Keys: success (0 or 1, the last box of all replies), has_answer (whether there is a box), grading_timeout
        (whether the verdict is that of the time limit), truncated, repetition, `form_<class>` = 1 for the class of the
        reference (integer, decimal, surd, fraction, pi or other), and `family_<name>` = 1.
        """
        text = self.text()
        verdict = self.grade(text)
        numbers = {
            "success": float(verdict.correct),
            "has_answer": float(has_box(text)),
            "grading_timeout": float(verdict.rule == "timeout"),
            "truncated": float(self.truncated),
            "repetition": float(repetition("\n".join(self.replies))),
        }
        if self.ground_truth is not None:
            numbers[f"form_{answer_form(self.ground_truth)}"] = 1.0
        if self._family is not None:
            numbers[f"family_{self._family}"] = 1.0
        return numbers
