"""Exact values: lowest terms, labels in the forms of Geometry3K, decimals rounded half up."""

from __future__ import annotations

from fractions import Fraction

import pytest

from geo_sokoban_pipeline.envs.geo3k.figures.exact import answer_form, exact


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
