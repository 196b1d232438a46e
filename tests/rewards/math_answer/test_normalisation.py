"""Normalisation: one spelling, and no change of value."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from geo_sokoban_pipeline.rewards.math_answer.default import MalformedError, normalise, strip_unit, text_key


@pytest.mark.parametrize(
    ("text", "same"),
    [
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
    ],
)
def test_spellings_of_the_same(text, same):
    assert text_key(normalise(text)) == text_key(normalise(same))


@pytest.mark.parametrize(
    ("text", "other"),
    [
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
    ],
)
def test_different_things_stay_different(text, other):
    assert text_key(normalise(text)) != text_key(normalise(other))


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
