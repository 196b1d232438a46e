"""The default grader: the box, one spelling, verdict and deciding rule, and the labelled pairs and real labels."""

from __future__ import annotations

import math
import statistics
import time
from decimal import Decimal
from pathlib import Path

import numpy as np
import pytest
from benchmarks import graders as measurement
from hypothesis import given
from hypothesis import strategies as st

from geo_sokoban_pipeline.reporting.study_docs import read_section
from geo_sokoban_pipeline.rewards.math_answer.default import (
    MalformedError,
    examine_default,
    extract_answer,
    normalise,
    strip_unit,
    text_key,
)
from geo_sokoban_pipeline.rewards.math_answer.verdict import Undecided

RIGHT = [
    ("15", "15", "string"),
    ("15", 15, "string"),
    ("\\boxed{15}", "\\boxed{15}", "string"),
    ("15.0", "15", "numeric"),
    ("131", "131.00", "numeric"),
    ("1,234", "1234", "string"),
    ("1,234.5", "1234.5", "string"),
    ("26/2", "13", "numeric"),
    ("7 3/4", "7.75", "numeric"),
    ("-2 1/2 cm", "- \\frac { 5 } { 2 }", "numeric"),
    ("16\\frac{2}{3}", "\\frac { 50 } { 3 }", "numeric"),
    ("6.5\\sqrt2", "\\frac { 13 \\sqrt { 2 } } { 2 }", "numeric"),
    ("\\frac{8\\sqrt{3}\\pi}{3}", "\\frac { 8 } { \\sqrt 3 } \\pi", "numeric"),
    ("–8", "- 8", "string"),
    ("60 \\text{ square units}", "60", "string"),
    ("60\\mathrm{~cm}^{2}", "60", "string"),
    ("\\$60", "60", "string"),
    ("m\\angle ABC = 80^\\circ", "80", "string"),
    ("\\angle 1 = 80", "80", "string"),
    ("A_{1} = 80", "80", "string"),
    ("\\text{Area} = 80 \\text{ cm}^2", "80", "string"),
    ("\\approx 25.9", "25.9", "string"),
    ("x \\approx 25.9", "25.9", "string"),
    ("10:18", "5:9", "numeric"),
    ("\\frac{5}{9}", "5:9", "numeric"),
    ("(3.0, \\frac{8}{2})", "(3, 4)", "numeric"),
    ("50\\%", "0.5", "numeric"),
    ("\\overline{AD} \\text{ and } \\overline{BE}", "A D and B E", "string"),
    ("\\text{angles } 2, 3, 6, \\text{ and } 7", "angles 2,3, 6, and 7", "string"),
    ("\\angle8\\cong\\angle2", "\\angle 8 \\cong \\angle 2", "string"),
    ("90=a+b", "a + b = 90", "symbolic"),
    ("60 > x", "x < 60", "symbolic"),
    ("10y(2y-1)", "20 y^2 - 10 y", "symbolic"),
    ("y (20y-10)", "20 y^2 - 10 y", "symbolic"),
    ("\\sqrt[3]{8}", "2", "symbolic"),
    ("\\sqrt{6+2\\sqrt{5}}", "1+\\sqrt{5}", "symbolic"),
    # A chain is its first value.
    ("2\\sqrt{13} \\approx 7.21", "2 \\sqrt { 13 }", "string"),
    ("A = 9\\pi \\approx 28.27 \\text{ cm}^2", "9\\pi", "string"),
    ("\\frac{26}{2} = 13", "13", "numeric"),
    ("\\frac{1}{3} \\approx 33.3\\%", "\\frac{1}{3}", "string"),
    ("7 \\approx 7.2", "7", "string"),
    ("m\\angle A = m\\angle B = 40^\\circ", "40", "string"),
    ("12", "AB = CD = 12", "string"),
    ("2 \\sqrt { 13 }", "2\\sqrt{13} \\approx 7.21", "string"),
    ("\\sqrt[3]{2} \\approx 1.26", "\\sqrt[3]{2}", "symbolic"),
    ("\\pi \\approx 3.14159265358979323846", "\\pi", "symbolic"),
    ("e^2 \\approx 7.39", "e^2", "symbolic"),
    ("13 = \\sqrt[3]{2197}", "13", "symbolic"),
    ("2\\pi r h = 2 h r \\pi", "2 \\pi r h", "symbolic"),
    # Percent in words.
    ("30 percent", "30 \\%", "string"),
    ("30\\%", "30 percent", "string"),
    ("30 \\text{ per cent}", "0.3", "numeric"),
    # Case is free for choices and in words.
    ("a", "A", "string"),
    ("(e)", "E", "string"),
    ("YES", "Yes", "string"),
    ("no", "No", "string"),
    # Algebra: letters, indices and primes as they are written, products in any order.
    ("s \\cdot 4", "4 s", "symbolic"),
    ("2 h \\pi r", "2 \\pi r h", "symbolic"),
    ("b \\cdot h", "bh", "symbolic"),
    ("hwl", "l w h", "symbolic"),
    ("lwh \\text{ cubic units}", "l w h", "string"),
    ("CD \\cdot BA", "AB \\cdot CD", "symbolic"),
    ("L \\cdot W", "L W", "symbolic"),
    ("W \\times L \\times H", "LWH", "symbolic"),
    ("\\frac{S}{L*W}", "S/LW", "symbolic"),
    ("BA^2", "AB^2", "symbolic"),
    ("b^2a^2", "a^2 b^2", "symbolic"),
    ("y^{2n} x^{2}", "x^2 y^{2n}", "symbolic"),
    ("\\sin(x)", "sin x", "symbolic"),
    ("b₁+b₂", "b_2 + b_1", "symbolic"),
    ("h d", "d h", "symbolic"),
    ("A^{\\prime}+B", "B + A'", "symbolic"),
    ("A''+B", "B + A''", "symbolic"),
    ("x_{2}+x_1", "x_1+x_2", "symbolic"),
    ("a(b+c)", "ab + ac", "symbolic"),
    ("1\\frac{1}{2}x", "1.5x", "symbolic"),
    ("|3-x|", "|x-3|", "symbolic"),
    ("\\frac{a}{b}", "\\frac ab", "symbolic"),
    ("\\sqrt{4x}", "2\\sqrt x", "symbolic"),
    ("2\\sin x \\cos x", "\\sin 2x", "symbolic"),
    ("\\sin^{-1} x", "\\arcsin(x)", "symbolic"),
    ("\\sin^2 x", "(\\sin x)^2", "symbolic"),
    ("x^{-1}", "\\frac{1}{x}", "symbolic"),
    ("e^{x} \\cdot e", "e^{x+1}", "symbolic"),
    ("\\frac{\\ln x}{\\ln 2}", "\\log_2 x", "symbolic"),
    ("3\\ln 2", "\\ln 8", "symbolic"),
    ("2", "\\ln(e^2)", "symbolic"),
    ("2", "\\log 100", "symbolic"),
    ("\\frac{1}{2}", "\\sin(\\pi/6)", "symbolic"),
    ("-2", "\\sqrt[3]{-8}", "symbolic"),
    ("2^{1/3}", "\\sqrt[3]{2}", "symbolic"),
    ("\\infty", "-(-\\infty)", "symbolic"),
    ("x \\geqslant 2", "x ⩾ 2", "string"),
    ("(y+y, x]", "(2y, x]", "symbolic"),
    ("3, 2", "2, 3", "symbolic"),
    ("x>5 \\text{ or } x<3", "x<3 or x>5", "symbolic"),
    ("(3,x) \\cup (1,2)", "(1,2) \\cup (3,x)", "symbolic"),
    ("5>x>1", "1 < x < 5", "symbolic"),
    ("x \\in (1+1,3)", "x \\in (2,3)", "symbolic"),
    ("b \\neq a", "a \\neq b", "symbolic"),
    ("2a+2b=180", "a + b = 90", "symbolic"),
    ("xz = 2y", "\\frac{x}{y} = \\frac{2}{z}", "symbolic"),
    ("2x + y < 6", "x + 0.5y < 3", "symbolic"),
    ("x = 9 + y", "\\sqrt{x-y} = 3", "symbolic"),
    ("x-1=0", "(x-1)^2 = 0", "symbolic"),
    ("(x-2)(x+2)=0", "x^2 = 4", "symbolic"),
    ("x-3=0", "2^x = 8", "symbolic"),
    ("x^2=4", "|x| = 2", "symbolic"),
    ("\\sin x=\\frac12", "2\\sin x = 1", "symbolic"),
    ("CD=AB", "A B = C D", "symbolic"),
    ("b=a", "a = b", "symbolic"),
    ("bh", "A = b h", "string"),
    ("\\text{Area} = bh", "A = b h", "string"),
    ("bh = A", "A = b h", "symbolic"),
    ("3t = y", "y = 3 t", "symbolic"),
    ("2x - y + 3 = 0", "y = 2x + 3", "symbolic"),
    ("AB = 5", "x = 5", "string"),
    ("\\sin x", "y = \\sin x", "string"),
    ("x \\ne 3", "x \\neq 3", "string"),
    # A divisor is all that is multiplied without a sign, but a fraction of two numbers is a factor.
    ("AB/BC", "\\frac{AB}{BC}", "symbolic"),
    ("\\frac{AB}{BC}", "A B / B C", "symbolic"),
    ("C/2\\pi", "\\frac{C}{2\\pi}", "symbolic"),
    ("\\frac{C}{2\\pi}", "C / 2 \\pi", "symbolic"),
    ("a/2\\sqrt{3}", "\\frac{a}{2\\sqrt{3}}", "symbolic"),
    ("1/2x", "\\frac{1}{2x}", "symbolic"),
    ("1/2 bh", "\\frac{1}{2} b h", "symbolic"),
    ("1/2(a+b)h", "\\frac{(a+b) h}{2}", "symbolic"),
    ("4/3\\pi r^3", "\\frac{4}{3} \\pi r^3", "symbolic"),
    ("a/b \\cdot c", "\\frac{a c}{b}", "symbolic"),
    ("2a:2b", "a : b", "symbolic"),
    ("\\frac{2a}{3b}", "2 a : 3 b", "symbolic"),
    ("\\frac{a+b}{c}", "a + b : c", "symbolic"),
    # A clear unit may stand behind letters.
    ("2x \\text{ cm}", "2x", "string"),
    ("2x", "2x cm", "string"),
    ("y=2x\\text{ cm}", "y = 2x", "string"),
    ("x^2+2x\\text{ square units}", "x^2 + 2x", "string"),
    # Units of both sides agree.
    ("5 \\text{ meters}", "5 m", "string"),
    ("5.0 m", "5 metres", "numeric"),
    ("5 \\text{ sq. in.}", "5 \\text{ in}^2", "string"),
    ("5 \\text{ square centimeters}", "5 cm^2", "string"),
    ("5 \\text{ ft/s}", "5 feet per second", "string"),
    ("5 mph", "5 miles per hour", "string"),
    ("8\\pi \\text{ units}^2", "8 \\pi cm^2", "string"),
    ("5", "5 cm", "string"),
    ("5 cm", "5 \\text{ units}", "string"),
    # Lines above points are layout, the direction of a ray is not.
    ("\\overline{BA}", "AB", "symbolic"),
    ("\\overrightarrow{AB}", "A B", "string"),
    ("\\overrightarrow{AB} = (3, 4)", "(3,4)", "string"),
    ("\\overline{x} = 5", "5", "string"),
    # Rounded.
    ("10\\sqrt3 \\simeq 17.3", "10 \\sqrt 3", "string"),
    ("10\\sqrt3 ∼ 17.3", "10 \\sqrt 3", "string"),
    ("\\triangle ABC ∼ \\triangle DEF", "\\triangle A B C \\sim \\triangle D E F", "string"),
]
WRONG = [
    ("14", "15", "numeric"),
    ("15.04", "15", "numeric"),
    ("16.67", "\\frac { 50 } { 3 }", "numeric"),
    ("\\frac{8}{15}", "0.53", "numeric"),
    ("25.13", "8\\pi", "numeric"),
    ("1/0", "0", "numeric"),
    ("10^{400}", "13", "numeric"),
    ("", "13", "empty"),
    ("$", "13", "empty"),
    ("1" * 201, "13", "too_long"),
    ("13\x00", "13", "malformed"),
    ("13 or 14", "13", "hedge"),
    ("\\text{not } = 13", "13", "equation"),
    ("no x = 13", "13", "equation"),
    ("x \\text{ or } y = 13", "13", "equation"),
    ("neither x = 13", "13", "equation"),
    ("13 \\text{ or } 14", "13", "hedge"),
    ("either 13", "13", "hedge"),
    ("13, 14", "13", "hedge"),
    ("13;14", "13", "hedge"),
    ("13 14", "13", "hedge"),
    ("13 \\quad 14", "13", "hedge"),
    ("13 26/2", "13", "hedge"),
    ("13 1/2", "13", "numeric"),
    ("\\sqrt2 3/4", "1.06", "hedge"),
    ("13 \\\\ 14", "13", "hedge"),
    ("13|14", "13", "hedge"),
    ("\\{13\\}", "13", "hedge"),
    ("[13]", "13", "hedge"),
    ("13 \\pm 1", "13", "hedge"),
    ("13 \\cup 14", "13", "hedge"),
    ("13:14", "13", "hedge"),
    ("3,4", "(3, 4)", "hedge"),
    ("(3,4)", "3, 4", "hedge"),
    ("99=13", "13", "equation"),
    ("13=13", "13", "equation"),
    ("2x=26", "13", "equation"),
    ("2\\sqrt{13} = 7 \\approx 7.21", "2 \\sqrt { 13 }", "equation"),
    ("2\\sqrt{13} = 7.21", "2 \\sqrt { 13 }", "equation"),
    ("2\\sqrt{13} \\approx 7.22", "2 \\sqrt { 13 }", "equation"),
    ("\\frac{2}{3} \\approx 0.66", "\\frac{2}{3}", "equation"),
    ("\\frac{22}{7} \\approx \\pi", "\\frac{22}{7}", "equation"),
    ("\\frac{1}{0} = 13", "13", "equation"),
    ("2\\sqrt{13} \\approx 7.21", "7.2", "numeric"),
    ("2\\sqrt{13} \\approx 7.21", "7.21", "numeric"),
    ("\\sqrt[3]{2} \\approx 1.27", "\\sqrt[3]{2}", "symbolic"),
    ("\\pi \\approx 3.14159265358979323847", "\\pi", "symbolic"),
    ("13 = \\sqrt[3]{2198}", "13", "symbolic"),
    ("2\\pi r h = 2 h r", "2 \\pi r h", "symbolic"),
    ("2\\pi r h = \\pi d h", "2 \\pi r h", "equation"),
    ("30 percent", "30", "numeric"),
    # A letter at the end is no unit where the label has letters.
    ("2\\pi r", "2 \\pi r h", "string"),
    ("4", "4 s", "string"),
    ("x+2", "x + 2 t", "string"),
    ("a \\sqrt{3}", "a \\sqrt { 3 } s", "string"),
    ("y=3", "y = 3 t", "string"),
    ("5 s", "5 m", "string"),
    ("5 M", "5 m", "string"),
    ("5 mm", "5 cm", "string"),
    ("5 m", "5 cm", "string"),
    ("5 kg", "5 lb", "string"),
    ("5 cm^2", "5 cm", "string"),
    ("5 \\text{ square feet}", "5 \\text{ cubic feet}", "string"),
    ("2x \\text{ mm}", "2x \\text{ cm}", "string"),
    ("t<5", "t < 5 s", "string"),
    ("\\frac{1}{2}", "\\frac{1}{2} FT", "string"),
    # Case and primes.
    ("A", "A'", "string"),
    ("\\pi rrl", "\\pi Rrl", "string"),
    ("abcde", "ABCDE", "string"),
    # The order of points names a figure or a ray; a segment is no product of its ends.
    ("A C B", "A B C", "string"),
    ("A S S", "S A S", "string"),
    ("B'A'C'", "A' B' C'", "string"),
    ("\\overrightarrow{BA}", "\\overrightarrow{AB}", "string"),
    ("BA", "\\overrightarrow{AB}", "string"),
    ("AC \\cdot BD", "AB \\cdot CD", "symbolic"),
    ("b^{2^2}", "b^4", "string"),
    ("b^12^3", "b^{36}", "string"),
    ("b^2a^3", "a^2b^2", "symbolic"),
    ("\\overline{z}", "z", "string"),
    ("\\overline{A} + B", "A + B", "string"),
    ("ln x + ln y", "ln(x + y)", "symbolic"),
    ("x₂", "2x", "string"),
    ("xⁿ", "n x", "symbolic"),
    # An equation of another letter.
    ("x = 3", "y = 3", "string"),
    ("R = 5", "r = 5", "string"),
    ("x = 3t", "y = 3t", "string"),
    ("2x - y = 3", "y = 2x + 3", "symbolic"),
    ("2x = 6", "x = 3", "equation"),
    ("A'", "A", "string"),
    ("A''", "A'", "string"),
    ("r", "R", "string"),
    ("2R", "2 r", "string"),
    ("A", "a", "string"),
    ("2A+a", "A + 2a", "symbolic"),
    ("2A'+A", "A' + 2A", "symbolic"),
    ("abc", "ABC", "string"),
    ("x_2", "x_1", "string"),
    # Equality is exact.
    ("1.259921", "\\sqrt[3]{2}", "symbolic"),
    ("1.25992104989487316476721060727", "2 ^ { 1 / 3 }", "symbolic"),
    ("7.389056", "e ^ 2", "symbolic"),
    ("2.718281828", "e", "symbolic"),
    ("13e^0", "13", "string"),
    ("0.693147", "\\ln 2", "symbolic"),
    ("0.841471", "\\sin 1", "symbolic"),
    ("0.6435011", "\\arctan(0.75)", "symbolic"),
    ("x+1.4142135623730950488", "x + \\sqrt{2}", "symbolic"),
    ("x + 5", "2(3) + x", "symbolic"),
    ("3, 3, 2", "2, 2, 3", "symbolic"),
    ("(2, x)", "(x, 2)", "symbolic"),
    ("(2y, x)", "(2y, x]", "symbolic"),
    ("-x < 60", "x < 60", "symbolic"),
    ("x = 1", "(x-1)(x-2) = 0", "symbolic"),
    ("x^2+2=0", "x^2+1 = 0", "symbolic"),
    ("\\sqrt{x}=-2", "\\sqrt{x} = -1", "symbolic"),
    ("|x|+2=0", "|x|+1 = 0", "symbolic"),
    ("e^x=-1", "e^x+2 = 0", "symbolic"),
    ("x^3=1", "x - 1 = 0", "symbolic"),
    ("x^4=16", "x^2 = 4", "symbolic"),
    ("4\\tan x=4", "2x = \\frac{\\pi}{2}", "symbolic"),
    ("A/BC", "\\frac{A}{B} C", "symbolic"),
    ("a/2b", "\\frac{a}{2} b", "symbolic"),
    ("a:c:b", "a : b : c", "symbolic"),
    ("CD", "A B = C D", "equation"),
    ("EF=CD", "A B = C D", "string"),
    ("\\angle 3 = \\angle 2", "\\angle 1 = \\angle 2", "string"),
    ("6 \\sim 10", "6", "equation"),
    ("2\\sqrt{13} (\\approx 7.21)", "2 \\sqrt { 13 }", "equation"),
    ("square meters", "square feet", "string"),
    ("0.\\overline{3}", "0.3", "string"),
    ("0.3", "0 . \\overline { 3 }", "string"),
    ("(x-1)(y-2)+1=1", "x - 1 = 0y", "symbolic"),
    ("\\frac{2x}{0}", "\\frac{x}{0}", "symbolic"),
    ("||x||", "|x|", "symbolic"),
    ("13=x", "13", "equation"),
    ("=13", "13", "equation"),
    ("x=12=13", "13", "equation"),
    ("x=13, y=14", "13", "equation"),
    ("12 < 13", "13", "equation"),
    ("x=60", "x < 60", "symbolic"),
    ("90", "a + b = 90", "equation"),
    ("x\\leq 60", "x < 60", "symbolic"),
    ("a+b=180", "a + b = 90", "symbolic"),
    ("20y^2-10y+1", "20 y^2 - 10 y", "symbolic"),
    ("4:3", "3:4", "numeric"),
    ("(4,3)", "(3, 4)", "numeric"),
    ("\\angle 8 \\cong \\angle 4", "\\angle 8 \\cong \\angle 2", "string"),
    ("x", "13", "string"),
    ("3x", "3", "string"),
    ("13 apples", "13", "string"),
    ("the answer is 13", "13", "string"),
    ("13!", "13", "string"),
    ("10**10**10", "13", "string"),
    ("\\sum_{n=1}^{13} 1", "13", "equation"),
    ("\\int_0^{13} 1 dx", "13", "string"),
    ("\\begin{pmatrix}13\\end{pmatrix}", "13", "string"),
    ("__import__('os')", "13", "string"),
    ("13", "1/0", "symbolic"),
    ("13", "\x00", "no_label"),
    ("13", "", "no_label"),
    ("13", " ", "no_label"),
    ("13", None, "no_label"),
    ("13", "\\boxed{13", "no_label"),
]


@pytest.mark.parametrize(
    ("answer", "label", "rule", "correct"), [(*case, True) for case in RIGHT] + [(*case, False) for case in WRONG]
)
def test_verdict_and_rule(graded, answer, label, rule, correct):
    grade = graded(answer, label)
    assert (grade.correct, grade.rule) == (correct, rule)


@pytest.mark.parametrize(
    ("answer", "label", "correct"),
    [
        ("\\frac{8}{15}", "0.53", True),
        ("0.58", "0.53", True),
        ("0.59", "0.53", False),
        ("0.55", "0.5", True),  # binary floats differ by a little more
        ("8.66", "8.7", True),
        ("5\\sqrt{3}", "8.7", True),
        ("5\\sqrt{2}", "8.7", False),
        ("8\\pi", "25.1", True),
        ("8.66", "5\\sqrt{3}", False),  # an exact label is exact
        ("15.04", "15", False),
        ("(0.53, 1)", "(0.5, 1)", False),
    ],
)
def test_tolerance_is_for_decimal_labels(graded, answer, label, correct):
    assert graded(answer, label, tolerance=0.05).correct is correct


def test_real_labels_in_a_box_are_right_and_those_of_other_rows_wrong(graded, real_labels):
    labels = sorted(set(real_labels))
    assert len(real_labels) == 69
    assert all(graded(label, label).correct for label in labels)
    granted = [(a, b) for a in labels for b in labels if a != b and graded(a, b).correct]
    assert granted == []


@pytest.mark.parametrize(
    ("label", "answer", "correct"),
    [
        (0.00001, "0.00001", True),
        (1e16, "10000000000000000", True),
        (0.1 + 0.2, "0.30000000000000004", True),
        (-2.50, "-2.5", True),
        (Decimal("1.10"), "1.1", True),
        (np.float32(0.1), "0.1", True),
        (1e-05, "1e-05", False),
        (float("nan"), "nan", False),
        (float("inf"), "inf", False),
        (float("-inf"), "-\\infty", False),
    ],
)
def test_labels_that_are_numbers(graded, label, answer, correct):
    grade = graded(answer, label)
    assert grade.correct is correct
    assert (grade.rule == "no_label") == (not math.isfinite(label))


def test_equal_concatenations_of_answer_and_label_are_two_questions(graded):
    assert graded("12", "12").correct
    assert not graded("1", "212").correct


def test_labelled_pairs(graded, math_pairs):
    """All clear pairs; no false positive of kind hack_*, no adversarial answer granted."""
    wrong, clear = [], 0
    for pair in math_pairs:
        box = extract_answer(pair["response"])
        correct = box is not None and graded(box, pair["ground_truth"]).correct
        if pair["kind"].startswith(("hack_", "adv_")):
            assert not correct or pair["expected"], pair
        if not pair["ambiguous"] and not pair["kind"].startswith("adv_"):
            clear += 1
            wrong += [] if correct == pair["expected"] else [pair]
    assert clear >= 140
    assert wrong == []


# Lines of the labelled pairs that no rule decides, as at c1608b1.
ALGEBRA = [52, 109, 111, 112, 114, 154, 176, 180, 182, 184, 185]


def test_rules_decide_the_pairs_that_they_decided_and_take_half_a_millisecond(math_pairs):
    """In the median of all pairs, of which few reach algebra."""
    seconds, undecided = [], []
    for number, pair in enumerate(math_pairs):
        start = time.process_time()
        found = examine_default(extract_answer(pair["response"]) or "", pair["ground_truth"], 0.0)
        seconds.append(time.process_time() - start)
        undecided += [number] if isinstance(found, Undecided) else []
    assert set(undecided) <= set(ALGEBRA)
    assert statistics.median(seconds) < 0.5e-3


# Extraction: the last box, behind the thoughts, braced and closed.


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        ("\\boxed{5}", "5"),
        ("\\boxed{5} and \\boxed{6}.", "6"),
        ("\\boxed {5}", "5"),
        ("\\boxed{\n5\n}", "\n5\n"),
        ("\\boxed{\\frac{1}{2}}", "\\frac{1}{2}"),
        ("\\boxed{\\boxed{5}}", "5"),
        ("}}}\\boxed{5}{{{", "5"),
        ("\\boxed{\\{1, 2\\}}", "\\{1, 2\\}"),
        ("\\boxed{\\left\\{ 1 \\right.}", "\\left\\{ 1 \\right."),
        ("\\boxed{}", ""),
        ("<think>\\boxed{5}</think>\\boxed{6}", "6"),
        ("<think>\\boxed{5}</think> not sure", None),
        ("<think>a</think>\\boxed{5}<think>b</think>\\boxed{6}", "6"),
        ("<think>\\boxed{5}", "5"),  # thoughts that never end are all there is
        ("5", None),
        ("", None),
        ("\\boxed", None),
        ("\\boxed 5", None),
        ("\\fbox{5}", None),
        ("\\boxed{5", None),
        ("\\boxed{\\frac{1}{2}", None),
        ("\\boxed{\\}", None),
        ("\\boxed{5} then \\boxed{6", None),
        ("\\boxed{5} in the \\boxed form", None),
    ],
)
def test_last_box(response, answer):
    assert extract_answer(response) == answer


def test_long_responses_take_linear_time():
    assert extract_answer("\\boxed{ noise {" * 20_000 + "\\boxed{13}") == "13"
    assert extract_answer("\\boxed{" * 20_000) is None


# Normalisation: one spelling, and no change of value.


SAME = [
    ("\\frac { 3 } { 7 }", "\\dfrac{3}{7}"),
    ("\\frac{3}{7}", "\\frac37"),
    ("x^{2}", "x^2"),
    ("5√3", "5\\sqrt{3}"),
    ("64−16π", "64-16\\pi"),
    ("8 pi", "8\\pi"),
    ("2×3", "2\\times 3"),
    ("80°", "80^{\\circ}"),
    ("80^\\circ", "80"),
    ("80\\degree", "80\\text{°}"),
    ("１３", "13"),
    ("١٣", "13"),
    ("60 cm²", "60 cm^2"),
    ("1½", "1\\frac{1}{2}"),
    ("$15$", "\\(15\\)"),
    ("1,200", "1{,}200"),
    ("1\\,200", "1200"),
    ("\\left( 1, 2 \\right)", "(1,2)"),
    ("\\text{x} = 13", "x=13"),
    ("\\mathbf{15}", "15"),
    ("\\overline{AB}", "AB"),
    ("\\\\frac{1}{2}", "\\frac{1}{2}"),
    ("15.", "15"),
    ("\\angle1\\cong\\angle4", "∠ 1 ≅ ∠ 4"),
    ("Not Enough Information", "not enough  information"),
    ("13\u200b", "13"),
    ("30 Percent", "30\\%"),
    ("x percent", "x\\%"),
    ("2\\pi percent", "2\\pi\\%"),
    ("0.\\widehat{3}", "0.\\overline{3}"),
    ("\\underline{13}", "13"),
    ("2\\overline{AB}", "2AB"),
    ("LEFT", "left"),
    ("Up", "up"),
    ("30 \\text{ per cent}", "30\\%"),
    ("A^\\prime", "A'"),
    ("A^{\\prime\\prime}", "A″"),
    ("A^{'}", "A'"),
    ("x^{n}", "xⁿ"),
    ("\\overline{A_1 B_{2}'}", "A_1 B_{2}'"),
    ("The sum of all", "the sum of all"),
    ("TRUE", "true"),
]
OTHER = [
    ("1 3", "13"),
    ("13 \\\\ 14", "1314"),
    ("\\frac{3}{7}5", "\\frac{3}{75}"),
    ("\\sqrt{2}3", "\\sqrt{23}"),
    ("12,34", "1234"),
    ("(1,200)", "(1200)"),
    ("x^{12}", "x^1 2"),
    ("A", "a"),
    ("SAS", "sas"),
    ("A'", "A"),
    ("what percent", "what\\%"),
    ("x₂", "x2"),
    ("\\overline{x}", "x"),
    ("Rrl", "rrl"),
    ("\\sin 30^\\circ", "\\sin 30"),
    ("1.\\overline{27}", "1.27"),
    ("2.\\underline{5}", "2.5"),
]


@pytest.mark.parametrize(
    ("text", "other", "same"), [(*pair, True) for pair in SAME] + [(*pair, False) for pair in OTHER]
)
def test_one_spelling_for_the_same_and_for_nothing_else(text, other, same):
    assert (text_key(normalise(text)) == text_key(normalise(other))) is same


@pytest.mark.parametrize("text", ["13\x00", "\x08oxed", "1\u200b3", "1\ud800", "\x7f"])
def test_invisible_characters_are_refused(text):
    with pytest.raises(MalformedError):
        normalise(text)


@given(st.text(alphabet=st.characters(codec="utf-8"), max_size=60))
def test_once_is_enough(text):
    try:
        first = normalise(text)
    except MalformedError:
        return
    assert isinstance(text_key(first), str)
    assert "  " not in first


@pytest.mark.parametrize(
    ("text", "letters", "rest"),
    [
        ("60 cm", False, "60"),
        ("60cm^2", False, "60"),
        ("60 cm ^{2}", False, "60"),
        ("60 square units", False, "60"),
        ("60 sq. ft.", False, "60"),
        ("60 feet squared", False, "60"),
        ("60 m/s", False, "60"),
        ("60 miles per hour", False, "60"),
        ("60 degrees", False, "60"),
        ("8 \\pi in^2", False, "8 \\pi"),
        ("\\frac{3}{7} m", False, "\\frac{3}{7}"),
        ("60 m", False, "60"),
        ("60 m", True, "60 m"),
        ("60 cm", True, "60"),
        ("60 Feet Squared", True, "60"),
        ("60 CM", False, "60"),
        ("60 CM", True, "60 CM"),
        ("xy units", True, "xy"),
        ("A'B' cm", True, "A'B'"),
        ("2\\pi r ft", True, "2\\pi r"),
        ("square feet", True, "square feet"),
        ("miles per hour", True, "miles per hour"),
        ("60 apples", False, "60 apples"),
        ("cm", False, "cm"),
        ("x m", False, "x m"),
        ("60 or 70 cm", False, "60 or 70"),
    ],
)
def test_units(text, letters, rest):
    assert strip_unit(text, letters=letters) == rest


# `docs/graders.md`: its figures are those of a fresh measurement.

ROOT = Path(__file__).parents[3]
DOCUMENT = ROOT / "docs" / "graders.md"


def columns(table: str) -> dict[str, dict[str, str]]:
    """A Markdown table as {name in the first column: {head of the column: value}}."""
    head, _, *rows = ([cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines())
    return {row[0]: dict(zip(head[1:], row[1:], strict=True)) for row in rows}


@pytest.mark.slow
def test_tables_are_those_of_a_fresh_measurement(shared_data):
    pairs = measurement.load_pairs(shared_data / "math_pairs.jsonl")
    names = ["default", "slime_exact"]
    found, _ = measurement.judge_pairs(pairs, names)
    text = DOCUMENT.read_text(encoding="utf-8")
    written = columns(read_section(text, "graders:accuracy", DOCUMENT))
    assert {kind: {"pairs": row["pairs"], **{n: row[n] for n in names}} for kind, row in written.items()} == columns(
        measurement.accuracy_table(pairs, found)
    )
    summary = columns(read_section(text, "graders:summary", DOCUMENT))
    assert {name: summary[name] for name in names} == columns(measurement.summary_table(pairs, found))
