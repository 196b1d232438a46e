"""Answers worked out by hand, family by family."""

from __future__ import annotations

import random

import pytest

from geo_sokoban_pipeline.envs.geo3k.figures.families import FAMILIES

CASES = [
    ("linear_pair", "easy", {"a": 64}, "116"),
    ("linear_pair", "easy", {"a": 121}, "59"),
    ("vertical_angles", "easy", {"a": 71}, "71"),
    ("complementary_angles", "easy", {"a": 38}, "52"),
    ("parallel_lines", "easy", {"a": 65}, ("65", "115")),  # equal angles or supplementary ones
    ("parallel_zigzag", "easy", {"a": 40, "b": 50}, "90"),
    ("parallel_zigzag", "medium", {"a": 40, "sum": 85}, "45"),
    ("triangle_angles", "easy", {"a": 50, "b": 60}, "70"),
    ("triangle_angles", "medium", {"base": 40}, "100"),
    ("triangle_angles", "medium", {"top": 45}, "67.5"),
    ("exterior_angle", "easy", {"a": 40, "b": 70}, "110"),
    ("exterior_angle", "medium", {"a": 40, "exterior": 100}, "60"),
    ("pythagoras", "easy", {"leg": 9, "other": 12}, "15"),
    ("pythagoras", "easy", {"hypotenuse": 13, "leg": 5}, "12"),
    ("pythagoras", "medium", {"leg": 4, "other": 6}, r"2 \sqrt { 13 }"),
    ("pythagoras", "medium", {"hypotenuse": 9, "leg": 6}, r"3 \sqrt { 5 }"),
    ("special_right_triangle", "easy", {"degrees": 45, "leg": 7}, r"7 \sqrt { 2 }"),
    ("special_right_triangle", "easy", {"degrees": 60, "leg": 5}, ("10", r"5 \sqrt { 3 }")),
    ("special_right_triangle", "medium", {"degrees": 45, "hypotenuse": 9}, r"\frac { 9 \sqrt { 2 } } { 2 }"),
    ("special_right_triangle", "medium", {"degrees": 60, "other": 12}, (r"4 \sqrt { 3 }", r"8 \sqrt { 3 }")),
    ("special_right_triangle", "hard", {"degrees": 45, "hypotenuse": 6, "root": 6}, r"6 \sqrt { 3 }"),
    ("similar_triangles", "easy", {"base": 20, "side": 24, "small": 10}, "12"),
    ("parallel_in_triangle", "easy", {"near": 10, "far": 5, "other": 12}, "6"),
    ("parallel_in_triangle", "medium", {"near": 9, "far": 5, "other": 12}, r"\frac { 20 } { 3 }"),
    ("parallel_in_triangle", "hard", {"near": 8, "far": 4, "base": 12}, "8"),
    ("triangle_area", "easy", {"base": 12, "height": 7}, "42"),
    ("triangle_area", "easy", {"base": 9, "height": 5}, "22.5"),
    ("triangle_area", "hard", {"base": 10, "side": 13}, "60"),
    ("triangle_area", "hard", {"base": 8, "side": 6}, r"8 \sqrt { 5 }"),
    ("parallelogram_area", "easy", {"base": 20, "height": 12}, "240"),
    ("parallelogram_area", "hard", {"base": 10, "side": 8, "degrees": 60}, r"40 \sqrt { 3 }"),
    ("parallelogram_area", "hard", {"base": 10, "side": 8, "degrees": 30}, "40"),
    ("trapezoid_area", "easy", {"short": 10, "long": 16, "height": 6}, "78"),
    ("trapezoid_area", "hard", {"leg": 8, "short": 6, "degrees": 60}, r"40 \sqrt { 3 }"),
    ("trapezoid_area", "hard", {"long": 14, "short": 6, "degrees": 45}, "40"),
    ("inscribed_angle", "easy", {"a": 100}, "50"),
    ("inscribed_angle", "easy", {"a": 75}, "37.5"),
    ("intercepted_arc", "easy", {"a": 35}, "70"),
    ("central_angle", "easy", {"a": 100, "b": 120}, "140"),
    ("chord_angles", "easy", {"a": 40, "b": 60}, "50"),
    ("chord_angles", "medium", {"arc": 50, "angle": 60}, "70"),
    ("circle_circumference", "easy", {"radius": 6}, r"12 \pi"),
    ("circle_circumference", "medium", {"diameter": 50}, "15.7"),  # 5.0
    ("circle_circumference", "hard", {"square": 8}, r"8 \sqrt { 2 } \pi"),
    ("circle_circumference", "hard", {"leg": 6, "other": 8}, r"10 \pi"),
    ("circle_area", "easy", {"radius": 5}, r"25 \pi"),
    ("circle_area", "easy", {"diameter": 5}, r"\frac { 25 } { 4 } \pi"),
    ("circle_area", "medium", {"radius": 30}, "28.3"),  # 3.0
    ("circle_area", "hard", {"square": 6}, r"18 \pi"),
    ("sector", "easy", {"degrees": 90, "radius": 6}, r"9 \pi"),
    ("sector", "easy", {"degrees": 60, "radius": 5}, r"\frac { 25 } { 6 } \pi"),
    ("sector", "hard", {"degrees": 90, "radius": 4}, r"2 \pi"),
    ("sector", "hard", {"degrees": 45, "radius": 3}, r"\frac { 3 } { 4 } \pi"),
]


@pytest.mark.parametrize(("family", "difficulty", "given", "label"), CASES)
def test_answers(family, difficulty, given, label):
    generator = random.Random(0)
    for _ in range(60_000):
        sketch = FAMILIES[family](generator, difficulty)
        if given.items() <= dict(sketch.numbers).items():
            assert sketch.label in (label if isinstance(label, tuple) else (label,))
            return
    pytest.fail(f"{family} never drew {given}")


def test_every_family_has_a_case():
    assert {case[0] for case in CASES} | {"polygon_angles"} == set(FAMILIES)
