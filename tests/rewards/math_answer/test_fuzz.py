"""Graders and hostile or senseless text: no exception, no hang, no growth of memory."""

from __future__ import annotations

import time
import tracemalloc

import psutil
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from geo_sokoban_pipeline.rewards.math_answer import Grade, Grader, GradingPool
from geo_sokoban_pipeline.rewards.math_answer.default import examine_default
from geo_sokoban_pipeline.rewards.math_answer.slime_exact import examine_slime
from grading import grade_all

PIECES = (
    *("\\boxed{", "}", "{", "\\frac", "\\frac{1}{2}", "\\sqrt", "\\sqrt{2}", "\\pi", "^", "^{2}", "_", "**", "!", "("),
    *(")", "[", "]", ",", ";", "=", "<", "\\leq ", ":", "/", "+", "-", "*", "\\cdot ", " ", "\n", "\\", "\\\\", "$"),
    *("1", "13", "0", "9", "1.5", "10^{9}", "1e9", "x", "y", "e", "i", "pi", "oo", "nan", "\\text{", "\\text{ cm}"),
    *(" or ", " and ", "\\pm", "\\infty", "%", "\\%", "°", "^\\circ", "½", "²", "π", "√", "−", "１", "\u200b", "\x00"),
    *("\\sin ", "\\log ", "\\sum_{k=1}^{9}", "\\int_0^1", "\\begin{pmatrix}", "\\end{pmatrix}", "&", "|", "'", "__"),
    *("</think>", "lambda", "import os", "().__class__", "million", "feet", "\\left(", "\\right)", "\\angle ", "😀"),
)
LABELS = ("13", "0.5", "5 \\sqrt { 3 }", "\\frac { 3 } { 7 }", "8 \\pi", "20 y^2 - 10 y", "x < 60", "a + b = 90", "2:3")
answers = st.one_of(
    st.lists(st.sampled_from(PIECES), max_size=8).map("".join),
    st.text(max_size=30),
    st.sampled_from(LABELS).flatmap(lambda label: st.sampled_from(PIECES).map(lambda piece: label + piece)),
)
responses = st.one_of(answers, answers.map("\\boxed{{{}}}".format))
labels = st.one_of(st.sampled_from(LABELS), answers)


@pytest.fixture(scope="module")
def graders(pool: GradingPool) -> list[Grader]:
    return [Grader("default", pool=pool), Grader("slime_exact", pool=pool), Grader("geo3k", 0.05, pool=pool)]


def check(graders: list[Grader], response: str, label: str) -> None:
    for grader in graders:
        grade = grader.grade(response, label, patience=600)
        assert isinstance(grade, Grade)
        assert not grade.correct or (grade.extracted is not None and label.strip())


@pytest.mark.slow
@settings(max_examples=2500, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(response=responses, label=labels)
def test_any_text(graders, response, label):
    check(graders, response, label)


@pytest.mark.parametrize(
    "answer",
    [
        f"{'a' * 150}1=13",
        f"{'a ' * 90}1=13",
        "\\angle " * 28 + "=13",
        "\\frac" * 39,
        "\\sqrt" * 5000,
        "\\mathbf" * 5000,
        "\\text{" * 5000 + "}" * 5000,
        "(" * 5000 + ")" * 5000,
        "^" * 190,
        "1," * 99,
        "1,111" * 5000,
        "1" * 100_000,
        "\\begin{array}" * 3000,
        "5 " * 99,
        "- " * 20_000 + "13",
    ],
    ids=range(15),
)
def test_texts_that_take_long_or_go_deep_in_careless_rules(graders, answer):
    start = time.process_time()
    check(graders, f"\\boxed{{{answer}}}", "13")
    check(graders, "\\boxed{13}", answer)
    assert time.process_time() - start < 2


def test_rules_hold_no_memory():
    """Grading the same amount again leaves nothing behind; what the rules remember of labels is bounded."""

    def run(start: int) -> None:
        for number in range(start, start + 200):
            examine_default(f"\\frac{{{number}}}{{7}}\\sqrt{{12}}", f"{number} \\pi", 0.0)
            examine_slime(f"\\frac{{{number}}}{{7}}\\sqrt{{12}}", f"{number} \\pi", 0.0)
            examine_default("{" * number, "13", 0.0)

    run(0)
    tracemalloc.start()
    run(1000)
    before = tracemalloc.get_traced_memory()[0]
    run(2000)
    grown = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    assert grown < 200_000


def test_the_cache_is_bounded_and_keeps_what_was_used_last(pool, monkeypatch):
    monkeypatch.setattr("geo_sokoban_pipeline.rewards.math_answer.grader.CACHE_SIZE", 10)
    grader = Grader(pool=pool)
    first = [grader.submit(f"\\boxed{{{number}}}", "13") for number in range(100)]
    again = {number: grader.submit(f"\\boxed{{{number}}}", "13") for number in (*range(90, 100), *range(90))}
    assert [number for number, grade in again.items() if grade is first[number]] == list(range(90, 100))


@pytest.mark.slow
def test_worker_does_not_grow(pool):
    """Many formulas of one size: after a first hundred, the worker's memory stays within ten megabytes."""
    grader = Grader(pool=pool)

    def run(start: int) -> int:
        pairs = [(f"\\boxed{{({n}+x)(x+1)}}", f"x^2 + {n + 1} x + {n}") for n in range(start, start + 100)]
        assert all(grade.correct for grade in grade_all(grader, pairs, patience=900))
        (pid,) = pool.worker_pids
        return psutil.Process(pid).memory_info().rss

    run(0)
    first = run(1000)
    assert run(2000) - first < 10 << 20
