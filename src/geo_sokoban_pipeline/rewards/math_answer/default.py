"""The default grader: safe rules first, algebra last.

An answer is granted if it is the label's text in another spelling, the same exact number, or, where neither can tell,
the same formula to math-verify. Everything that would be granted without being one definite answer is refused before.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from geo_sokoban_pipeline.rewards.math_answer.extraction import extract_answer
from geo_sokoban_pipeline.rewards.math_answer.normalisation import MalformedError, normalise, text_key
from geo_sokoban_pipeline.rewards.math_answer.numeric_rule import NoValueError, UnreadableError, read_number, within
from geo_sokoban_pipeline.rewards.math_answer.shape import (
    has_letters,
    is_formula,
    is_hedge,
    is_relation,
    split_tuple,
    value_side,
)
from geo_sokoban_pipeline.rewards.math_answer.surds import Surd
from geo_sokoban_pipeline.rewards.math_answer.units import strip_unit
from geo_sokoban_pipeline.rewards.math_answer.verdict import Equivalence, Grade, Rule, Undecided

LONGEST_ANSWER = 200  # characters within the box
LONGEST_LABEL = 1000

_Verdict = tuple[bool, Rule] | Equivalence


def examine_default(box: str, label: str, tolerance: float) -> Grade | Undecided:
    """Grade an answer against a label.

    Args:
        box: content of the last box of a response.
        label: ground truth, with or without a box; an empty one grants nothing.
        tolerance: largest difference that is granted where the label is a decimal; 0: labels are exact.
    """
    given = box.strip()
    truth = _label_form(label)
    if not truth:
        return Grade(False, "no_label", given)
    refusal = _refusal_of_box(given)
    if refusal is not None:
        return Grade(False, refusal, given)
    try:
        answer = normalise(given)
    except MalformedError:
        return Grade(False, "malformed", given)
    verdict = _compare(answer, truth, tolerance)
    return Undecided(verdict, given) if isinstance(verdict, Equivalence) else Grade(*verdict, given)


def _refusal_of_box(given: str) -> Rule | None:
    if not given:
        return "empty"
    return "too_long" if len(given) > LONGEST_ANSWER else None


@lru_cache(maxsize=8192)
def _label_form(label: str) -> str:
    """The normalised label; empty where there is none that could be compared."""
    inner = extract_answer(label) if "\\boxed" in label else label
    try:
        return normalise(inner or "") if len(label) <= LONGEST_LABEL else ""
    except MalformedError:
        return ""


def _compare(answer: str, truth: str, tolerance: float) -> _Verdict:
    if not answer:
        return False, "empty"
    if text_key(answer) == text_key(truth):
        return True, "string"
    pair = _reduce(answer, truth, tolerance)
    for rule in (_refuse_equation, _compare_texts, _refuse_hedge, _compare_numbers, _compare_formulas):
        verdict = rule(pair)
        if verdict is not None:
            return verdict
    return False, "string"


@dataclass(frozen=True)
class _Pair:
    """Answer and label, both normalised, without a name before an equals sign and without a unit.

    Attributes:
        letters: whether the label holds letters.
    """

    answer: str
    truth: str
    letters: bool
    tolerance: float


def _reduce(answer: str, truth: str, tolerance: float) -> _Pair:
    truth = value_side(truth)
    answer = answer if is_relation(truth) else value_side(answer)
    letters = has_letters(truth)
    return _Pair(strip_unit(answer, letters=letters), strip_unit(truth, letters=True), letters, tolerance)


def _refuse_equation(pair: _Pair) -> _Verdict | None:
    return None if is_relation(pair.answer) == is_relation(pair.truth) else (False, "equation")


def _compare_texts(pair: _Pair) -> _Verdict | None:
    return (True, "string") if text_key(pair.answer) == text_key(pair.truth) else None


def _refuse_hedge(pair: _Pair) -> _Verdict | None:
    return (False, "hedge") if is_hedge(pair.answer, pair.truth) else None


def _compare_numbers(pair: _Pair) -> _Verdict | None:
    """Verdict on numbers and on tuples of numbers."""
    try:
        wanted = _numbers(pair.truth)
    except NoValueError:  # a label that is no value is compared as a text
        return None
    try:
        got = None if wanted is None else _numbers(pair.answer)
    except NoValueError:
        return False, "numeric"
    if wanted is None or got is None:
        return None
    is_decimal = "." in pair.truth and not pair.letters and wanted[0] == got[0] == ""
    if pair.tolerance > 0 and is_decimal and got != wanted:
        return within(got[1][0], wanted[1][0], pair.tolerance), "tolerance"
    return got == wanted, "numeric"


def _compare_formulas(pair: _Pair) -> _Verdict | None:
    """A question to algebra, unless the answer has unknowns and the label none."""
    is_question = pair.letters or not has_letters(pair.answer)
    if is_question and is_formula(pair.answer) and is_formula(pair.truth):
        return Equivalence(pair.answer, pair.truth)
    return None


def _numbers(text: str) -> tuple[str, list[Surd]] | None:
    """Brackets, empty around a single number, and the numbers; None: something is no number of the grammar."""
    brackets, elements = split_tuple(text) or ("", [text])
    # A ratio is the number that it is; how many colons there may be is a matter of shape.
    quotients = (element.replace(":", "/") if element.count(":") == 1 else element for element in elements)
    try:
        return brackets, [read_number(quotient) for quotient in quotients]
    except UnreadableError:
        return None
