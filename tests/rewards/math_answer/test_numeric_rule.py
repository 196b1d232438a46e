"""Numeric rule: what is read as which exact number, and what is not read."""

from __future__ import annotations

import math
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from geo_sokoban_pipeline.envs.geo3k.figures.exact import answer_form, exact
from geo_sokoban_pipeline.rewards.math_answer.exact_numbers import (
    NoNumberError,
    NoValueError,
    OutsideError,
    Surd,
    decimal_text,
    label_text,
    read_number,
)

SAME = [
    ("12.50", "25/2"),
    (".5", "\\frac12"),
    ("5.", "5"),
    ("+3", "3"),
    ("- 8", "-8"),
    ("-(3 - 5)", "2"),
    ("7 3/4", "7.75"),
    ("1\\frac{1}{2}", "\\frac{3}{2}"),
    ("-1 \\frac12", "-1.5"),
    ("6/14", "\\frac { 3 } { 7 }"),
    ("50\\%", "0.5"),
    ("50%", "1/2"),
    ("2^{10}", "1024"),
    ("2^10", "1024"),
    ("2^{2^2}", "16"),
    ("2^{-1}", "0.5"),
    ("4^{\\frac12}", "2"),
    ("\\sqrt{12}", "2\\sqrt3"),
    ("\\sqrt 12", "2 \\sqrt { 3 }"),
    ("\\sqrt(12)", "2\\cdot\\sqrt{3}"),
    ("\\sqrt{\\frac{1}{2}}", "\\frac{\\sqrt{2}}{2}"),
    ("\\sqrt{0.5}", "\\frac{1}{\\sqrt2}"),
    ("\\sqrt{0}", "0"),
    ("\\frac{15}{\\sqrt{3}}", "5 \\sqrt { 3 }"),
    ("\\frac{4}{5\\sqrt{2}}", "\\frac { 2 \\sqrt { 2 } } { 5 }"),
    ("2(20+7\\sqrt{2})", "40 + 14 \\sqrt { 2 }"),
    ("\\frac{1}{1+\\sqrt2}", "\\sqrt{2}-1"),
    ("(1+\\sqrt{2})(1-\\sqrt{2})", "-1"),
    ("9\\pi\\sqrt{2}", "9 \\sqrt 2 \\pi"),
    ("16(4-\\pi)", "64 - 16 \\pi"),
    ("\\frac{22\\pi}{5}", "\\frac { 22 } { 5 } \\pi"),
    ("\\frac { 8 } { \\sqrt 3 } \\pi", "\\frac{8\\sqrt{3}\\pi}{3}"),
    ("\\pi\\div\\pi", "1"),
    ("\\frac{\\pi}{4}", "0.25\\pi"),
    ("6\\times-2", "-12"),
    ("1\\frac{5}{2}", "2.5"),  # no mixed number: a product
]
OTHER = [
    ("15.000000000000000001", "15"),
    ("0.333333333333333333333333333333", "1/3"),
    ("\\sqrt{2}", "1.41421356237309504880"),
    ("3.14159265358979323846", "\\pi"),
    ("\\frac{22}{7}", "\\pi"),
    ("5\\sqrt{2}", "5\\sqrt{3}"),
    ("7\\frac{3}{4}", "\\frac{21}{4}"),
]


@pytest.mark.parametrize(
    ("text", "other", "equal"), [(*pair, True) for pair in SAME] + [(*pair, False) for pair in OTHER]
)
def test_numbers_are_equal_or_not(text, other, equal):
    assert (read_number(text) == read_number(other)) is equal


NO_NUMBER = (
    *(
        "",
        "x",
        "1 3",
        "1 5/2",
        "13 14",
        "1.2.3",
        "--5",
        "5-",
        "/5",
        "*5",
        "5!",
        "(5",
        "5)",
        "{5",
        "5}",
        "()",
        "\\sqrt{}",
    ),
    *("\\frac{1}", "\\frac", "\\sqrt", "\\sqrt[3]{8}", "8^{1/3}", "2^x", "2^2^2", "\\sqrt{-1}", "5=5"),
    *("\\sqrt{1+\\sqrt{2}}", "\\sqrt{\\pi}", "\\frac{1}{1+\\pi}", "\\pitchfork", "1e5", "5,5", "(" * 100 + "5"),
    *("\\frac{1}{\\sqrt2+\\sqrt3+\\sqrt5}", "2**3", "|5|", "[5]", "５", "\\text{5}", "5 \\cdot", "\\sqrt{10^{40}}"),
)
NO_VALUE = (
    *("1/0", "\\frac{1}{0}", "0^{-1}", "1/(2-2)", "2^{1000000000}", "10^{4000}", "(2^{999})^{999}"),
    *("0.1^{9999}", "2^{-99999}"),
)


@pytest.mark.parametrize(
    ("text", "error"), [(text, NoNumberError) for text in NO_NUMBER] + [(text, NoValueError) for text in NO_VALUE]
)
def test_texts_without_a_number(text, error):
    with pytest.raises(error):
        read_number(text)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (15, "15"),
        (7.5, "7.5"),
        (2.0, "2.0"),
        (0.00001, "0.00001"),
        (1e16, "10000000000000000"),
        (-1.5e-7, "-0.00000015"),
        (0.1 + 0.2, "0.30000000000000004"),
        (Decimal("1.10"), "1.10"),
        (Decimal("1E+3"), "1000"),
        (np.int64(3), "3"),
        (np.float64(1e-5), "0.00001"),
        (True, None),
        (Fraction(1, 2), None),
        ("1e5", None),
        (None, None),
    ],
)
def test_digits_of_a_number(value, text):
    assert decimal_text(value) == text
    assert label_text(value) == (text or ("" if value is None else str(value)))


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, Decimal("NaN"), Decimal("1e999999999")])
def test_numbers_without_digits(value):
    with pytest.raises(ValueError, match="is no number of at most"):
        decimal_text(value)
    assert label_text(value) == ""


small = st.integers(-30, 30)
surds = st.builds(
    lambda a, b, n, c, m: (
        Surd.rational(Fraction(a, m)) + Surd.rational(b) * Surd.rational(n).root() + Surd.rational(c) * Surd.pi()
    ),
    small,
    small,
    st.integers(0, 200),
    small,
    st.integers(1, 12),
)


@given(surds, surds, surds)
def test_arithmetic_is_that_of_real_numbers(a, b, c):
    assert a * (b + c) == a * b + a * c
    assert math.isclose(float(a * b + c), float(a) * float(b) + float(c), rel_tol=1e-9, abs_tol=1e-6)


@given(surds, surds)
def test_division_undoes_multiplication(a, b):
    assume(b.terms)
    try:
        assert a * b / b == a
    except OutsideError:
        assert len(b.terms) > 1


@given(st.integers(0, 10**9))
def test_roots_are_square_free(number):
    root = Surd.rational(number).root()
    assert root * root == Surd.rational(number)
    assert all(radicand % (d * d) for radicand, _ in root.terms for d in range(2, 60))


# Answers of generated problems, and published labels: lowest terms, forms of Geometry3K, half rounded up.


@pytest.mark.parametrize(
    ("value", "label", "form"),
    [
        (exact(12), "12", "integer"),
        (exact(0, 7), "0", "integer"),
        (exact(-3), "- 3", "integer"),
        (exact(1, 93), r"\sqrt { 93 }", "surd"),
        (exact(5, 3), r"5 \sqrt { 3 }", "surd"),
        (exact(1, 24), r"2 \sqrt { 6 }", "surd"),
        (exact(1, 36), "6", "integer"),
        (exact(1, Fraction(1, 3)), r"\frac { \sqrt { 3 } } { 3 }", "surd"),
        (exact(Fraction(13, 2), 2), r"\frac { 13 \sqrt { 2 } } { 2 }", "surd"),
        (exact(Fraction(50, 3)), r"\frac { 50 } { 3 }", "fraction"),
        (exact(10, pi=True), r"10 \pi", "pi"),
        (exact(1, pi=True), r"\pi", "pi"),
        (exact(9, 2, pi=True), r"9 \sqrt { 2 } \pi", "pi"),
        (exact(Fraction(5, 3), pi=True), r"\frac { 5 } { 3 } \pi", "pi"),
        (exact(Fraction(1, 4), pi=True), r"\frac { \pi } { 4 }", "pi"),
        (exact(Fraction(1, 2), 3, pi=True), r"\frac { \sqrt { 3 } } { 2 } \pi", "pi"),
        # Published labels.
        (None, "- 8", "integer"),
        (None, "131.00", "decimal"),
        (None, "5/3", "fraction"),
        (None, r"\frac { 12 } { 5 } \sqrt { 11 }", "surd"),
        (None, r"10 \pi \sqrt { 2 }", "pi"),
        (None, "5:9", "other"),
        (None, "20 y^2 - 10 y", "other"),
        (None, "a + b = 90", "other"),
        (None, "not enough information", "other"),
    ],
)
def test_labels(value, label, form):
    assert value is None or value.label == label
    assert answer_form(label) == form


@pytest.mark.parametrize(
    ("value", "places", "text"),
    [
        (exact(Fraction(15, 2)), None, "7.5"),
        (exact(12), None, "12"),
        (exact(120), 1, "120"),
        (exact(1, 2), 1, "1.4"),
        (exact(1, pi=True), 2, "3.14"),
        (exact(Fraction(1, 20)), 1, "0.1"),  # half is rounded up
        (exact(6), 1, "6"),
        (exact(-3), None, "-3"),
    ],
)
def test_decimals(value, places, text):
    assert value.decimal(places) == text


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: exact(1, -2), "no positive rational number"),
        (exact(Fraction(1, 3)).decimal, "give the places to round to"),
        (exact(1, 2).decimal, "give the places to round to"),
        (exact(1, pi=True).decimal, "give the places to round to"),
    ],
)
def test_values_that_cannot_be_made_or_written(make, message):
    with pytest.raises(ValueError, match=message):
        make()
