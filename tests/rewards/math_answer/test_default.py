"""The default grader: verdict and deciding rule, case by case, and on the labelled pairs and real labels."""

from __future__ import annotations

import statistics
import time

import pytest

from geo_sokoban_pipeline.rewards.math_answer.default import examine_default, extract_answer

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


def test_what_was_extracted(graded):
    assert graded(" 15.0 ", "15").extracted == "15.0"
    assert graded("15", "15", "slime_exact").extracted == "15"


@pytest.mark.parametrize(
    ("answer", "label", "correct"),
    [
        ("\\frac{8}{15}", "0.53", True),
        ("0.58", "0.53", True),
        ("0.59", "0.53", False),
        ("8.66", "8.7", True),
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


def test_labelled_pairs(graded, math_pairs):
    """Bars: 97 % of the clear pairs, no false positive of kind hack_*, no adversarial answer granted."""
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
    assert len(wrong) <= 0.03 * clear, wrong


def test_string_and_numeric_rules_take_less_than_a_millisecond(math_pairs):
    spent: dict[str, list[float]] = {"string": [], "numeric": []}
    for pair in math_pairs:
        start = time.process_time()
        box = extract_answer(pair["response"])
        grade = None if box is None else examine_default(box, pair["ground_truth"], 0.0)
        seconds = time.process_time() - start
        if getattr(grade, "rule", "") in spent:
            spent[grade.rule].append(seconds)
    assert min(len(times) for times in spent.values()) > 50
    assert {rule: statistics.median(times) < 1e-3 for rule, times in spent.items()} == {"string": True, "numeric": True}
