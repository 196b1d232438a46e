"""Results of grading an answer: a grade, or a question for symbolic algebra.

Graders are pure functions that return one or the other at once; the worker pool answers the questions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

GraderName = Literal["default", "slime_exact", "deepscaler", "geo3k"]
Rule = Literal[
    "string",  # the texts are equal, or differ where only texts can be compared
    "numeric",  # both are exact numbers
    "tolerance",  # both are numbers, within the tolerance
    "form",  # slime_exact, deepscaler, geo3k: integers, fractions and tuples of another form
    "symbolic",  # symbolic algebra in a worker process
    "no_label",
    "no_box",
    "empty",
    "too_long",
    "malformed",
    "hedge",
    "equation",  # an equation or relation where the label is none, or the other way round
    "timeout",  # not decided within the time limit or by the deadline
    "failed",  # the worker process ran out of memory or died over it
]


@dataclass(frozen=True, slots=True)
class Grade:
    """Verdict on one answer.

    Attributes:
        correct: whether the answer is granted.
        rule: the rule that decided.
        extracted: text of the box that was graded; None where there was none.
    """

    correct: bool
    rule: Rule
    extracted: str | None = None


class ChainLink(NamedTuple):
    """A link of a chain such as `2\\sqrt{13} \\approx 7.21`: the sides are equal, or so to the digits written."""

    left: str
    right: str
    is_exact: bool


@dataclass(frozen=True, slots=True)
class Equivalence:
    """Question to algebra: are an answer and a label, as LaTeX without a box, the same, and do all links hold?"""

    answer: str
    label: str
    links: tuple[ChainLink, ...] = ()


@dataclass(frozen=True, slots=True)
class Differences:
    """Question to symbolic algebra by the original's rules: do all differences vanish?

    Attributes:
        texts: `(label)-(answer)` for each element.
        tolerance: None: exactly; else the largest absolute value that counts as zero.
    """

    texts: tuple[str, ...]
    tolerance: float | None = None


@dataclass(frozen=True, slots=True)
class Undecided:
    """An answer whose grade is the answer to a question."""

    question: Equivalence | Differences
    extracted: str

    def grade(self, correct: bool, rule: Rule = "symbolic") -> Grade:
        """The grade for an answer to the question, or for none."""
        return Grade(correct, rule, self.extracted)
