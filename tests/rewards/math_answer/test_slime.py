"""Parity with the original math checker: its worked examples, its recorded verdicts, its forms, and no `eval`."""

from __future__ import annotations

import pytest

from geo_sokoban_pipeline.rewards.math_answer import Grader
from geo_sokoban_pipeline.rewards.math_answer.slime_exact import (
    RefusedError,
    boxed_answer,
    difference_vanishes,
    latex_to_text,
    parse,
    string_form,
    symbolic_form,
)
from grading import grade_all


@pytest.mark.parametrize(
    ("answer", "label", "correct"),
    [
        ("270", "270", True),
        ("270.0", "270", True),
        ("1,234", "1234", True),
        ("1/2", "\\frac12", True),
        ("\\frac{8}{15}", "0.53", False),
        ("\\sqrt{12}", "2\\sqrt{3}", True),
        ("3.4641", "2\\sqrt{3}", False),
        ("45^\\circ", "45", True),
        ("45 degrees", "45", True),
        ("45 cm^2", "45", True),
        ("45\\text{ cm}", "45", True),
        ("A", "a", True),
        ("7 3/4", "7.75", True),
        ("\\pi", "3.14", False),
        ("6\\pi", "6 \\pi", True),
        ("5", "", False),
        ("5", None, False),
        ("5", "\\boxed{5}", True),
        ("x+1", "1+x", True),
        ("3 million", "3000000", False),
        # What the original grants and the default grader refuses.
        ("99=13", "13", True),
        ("13\\text{ or 20}", "13", True),
    ],
)
def test_worked_examples(graded, answer, label, correct):
    assert graded(answer, label, "slime_exact").correct is correct


@pytest.mark.parametrize(
    ("grader", "response", "label", "correct"),
    [
        ("deepscaler", "\\boxed{5}", "5", False),
        ("deepscaler", "5 </think> \\boxed{5}", "5", True),
        ("deepscaler", "\\boxed{5} </think> 5", "5", False),
        ("deepscaler", "</think> \\boxed{5} </think> \\boxed{4}", "5", False),
        ("deepscaler", "###Response: \\boxed{5}", "5", True),
        ("deepscaler", "\\boxed{5} ###Response: 5", "5", False),
        ("deepscaler", "###Response: \\boxed{4} </think> \\boxed{5}", "5", True),
        ("slime_exact", "270", "270", False),
        ("slime_exact", "\\boxed{1} then \\boxed{2}", "2", True),
        ("slime_exact", "\\boxed{1} then \\boxed{2}", "1", False),
        ("slime_exact", "\\boxed{\\frac{1}{2}", "\\frac{1}{2}", False),
        ("slime_exact", "\\boxed 5", "5", False),
        ("slime_exact", "\\fbox{5}", "5", False),
        ("slime_exact", "\\boxed{}", "5", False),
        ("slime_exact", "<think>\\boxed{5}</think>", "5", True),
    ],
)
def test_worked_examples_of_whole_responses(graded, grader, response, label, correct):
    assert graded(response, label, grader, whole=True).correct is correct


def test_recorded_verdicts(pool, math_pairs):
    grader = Grader("slime_exact", pool=pool)
    recorded = [pair for pair in math_pairs if pair["slime_default"] is not None]
    grades = grade_all(grader, [(pair["response"], pair["ground_truth"]) for pair in recorded], patience=900)
    differing = [p for p, g in zip(recorded, grades, strict=True) if g.correct != p["slime_default"]]
    assert len(recorded) > 200
    assert differing == []


@pytest.mark.parametrize(
    ("answer", "label", "tolerance", "correct"),
    [
        ("\\frac{8}{15}", "0.53", 0.05, True),
        ("\\frac{8}{15}", "0.53", 0.0, False),
        ("0.58", "0.53", 0.05, True),
        ("0.59", "0.53", 0.05, False),
        ("0.53", "0.53", 0.0, True),
        ("8.66", "5 \\sqrt { 3 }", 0.05, True),
        ("8.66", "5 \\sqrt { 3 }", 0.0, False),
        ("\\sqrt{12}", "2\\sqrt{3}", 0.0, True),
        ("15.04", "15", 0.05, False),  # integers come first
        ("\\frac{6}{14}", "\\frac{3}{7}", 0.05, False),  # and so do plain fractions
        ("0.43", "\\frac{3}{7}", 0.05, True),
        ("x", "y", 0.05, False),
        ("5", "\\boxed{5}", 0.05, True),
        ("5", "", 0.05, False),
        ("99=13", "13", 0.05, False),  # no string form, so no left side vanishes
    ],
)
def test_geo3k(graded, answer, label, tolerance, correct):
    assert graded(answer, label, "geo3k", tolerance).correct is correct


@pytest.mark.parametrize(
    ("text", "string", "symbolic"),
    [
        ("\\frac12", "\\frac{1}{2}", "1/2"),
        ("0.5", "\\frac{1}{2}", "0.5"),
        ("\\text{15}", "15", "15"),
        ("\\sqrt 3", "\\sqrt{}3", "sqrt(3)"),
        ("x=15", "15", "x=15"),
        ("abc=15", "abc=15", "abc=15"),
        ("45 cm^2", "45cm^2", "45"),
        ("5\\%", "5", "5"),
        ("1,234,567", "1,234,567", "1234567"),
        ("13 \\text{ or } 14", "13", "13,14"),
        ("13\\frac{1}{3}", "13\\frac{1}{3}", "13+1/3"),
        ("\\frac", "\\frac", "\\frac"),
        ("", "", ""),
    ],
)
def test_forms(text, string, symbolic):
    assert (string_form(text), symbolic_form(text)) == (string, symbolic)


@pytest.mark.parametrize(
    ("latex", "text"),
    [
        (" \\frac { 3 } { 7 }", "  3 / 7 "),
        ("9 \\sqrt 2 \\pi", "9 √(2) π"),
        ("\\sqrt[3]{27}", "√(27)"),
        ("60\\mathrm{~cm}^{2}", "60\xa0cm^2"),
        ("\\begin{pmatrix}1&2\\\\3&4\\end{pmatrix}", "[ 1 2; 3 4 ]"),
        ("\\angle 1 \\cong \\angle 4", "∠1 ≅∠4"),
        ("\\unknown{a}{b} c", "ab c"),
        ("\\mathbf{x}\\mathbb{R}", "𝐱ℝ"),
        ("\\hat{x}", "x̂"),
        ("\\left\\{1\\right\\}", "{1}"),
    ],
)
def test_latex_as_text(latex, text):
    assert latex_to_text(latex) == text


@pytest.mark.parametrize(
    ("difference", "vanishes"),
    [
        ("(2*sqrt(3))-(sqrt(12))", True),
        ("(x+1)-(1+x)", True),
        ("(7.75)-(7+3/4)", True),
        ("(9sqrt(2)pi)-(9*pi*sqrt(2))", True),
        ("(3!)-((3!))", True),
        ("(5)-(6)", False),
        ("(x)-(y)", False),
        ("(5)-(", False),
        ("(x)-(x.y)", False),
        ("(1)-(id(1))", False),
        ("(9**9**9)-(9**9**9)", False),
        ("(99999999!)-(x)", False),
        ("(1/0)-(1/0)", False),
    ],
)
def test_differences(difference, vanishes):
    assert difference_vanishes(difference, None) is vanishes


@pytest.mark.parametrize(
    "text",
    ["__import__('os')", "().__class__", "x.y", "[1 for x in (1,)]", "open('x','w')", "x if x else y", "id(1)", "1<2"],
)
def test_python_has_no_meaning(text):
    with pytest.raises((RefusedError, SyntaxError, TypeError)):
        parse(text)


def test_unclosed_boxes_take_linear_time():
    assert boxed_answer("\\boxed{" * 50_000) is None
