"""Tiny problems: rules by hand, digits in fixed places on the grid of patches, plausible rules for a teacher."""

from __future__ import annotations

import random
from collections import defaultdict

import numpy as np
import pytest

from geo_sokoban_pipeline.envs.geo3k.problems import generate_problems
from geo_sokoban_pipeline.envs.geo3k.problems.glyphs import text_mask
from geo_sokoban_pipeline.envs.geo3k.problems.render import render_layout
from geo_sokoban_pipeline.envs.geo3k.problems.tiny import TINY_FAMILIES, tiny_sketch
from geo_sokoban_pipeline.options.problems import ProblemOptions

PATCH = 16


@pytest.fixture(scope="module")
def problems():
    return generate_problems(300, 11)


@pytest.mark.parametrize(
    ("family", "given", "label"),
    [
        ("vertical_angles", 52, "52"),
        ("linear_pair", 64, "116"),
        ("complementary_angles", 38, "52"),
        ("inscribed_angle", 70, "35"),
        ("intercepted_arc", 44, "88"),
    ],
)
def test_answers(family, given, label):
    sketch = find(family, given, ProblemOptions())
    assert sketch.label == label


def find(family, given, options):
    generator = random.Random(1)
    while True:
        sketch = tiny_sketch(family, generator, options)
        if dict(sketch.numbers)["a"] == given:
            return sketch


def test_halves_are_decimals():
    assert find("inscribed_angle", 75, ProblemOptions(angle_step=5)).label == "37.5"


def test_candidates_are_every_rule_applied_to_the_angle(problems):
    sketch = find("linear_pair", 64, ProblemOptions())
    assert {(one.rule, one.label) for one in sketch.candidates} == {
        ("a", "64"),
        ("180 - a", "116"),
        ("90 - a", "26"),
        ("a / 2", "32"),
        ("2 a", "128"),
    }
    for problem in problems:
        rule = TINY_FAMILIES[problem.family].rule
        assert [one.label for one in problem.candidates if one.rule == rule] == [problem.label]
    # Each rule holds in one family, so a teacher that draws rules is right about once in as many.
    assert sorted(kind.rule for kind in TINY_FAMILIES.values()) == sorted(one.rule for one in sketch.candidates)


def test_digits_have_patches_of_their_own_in_places_that_depend_on_the_family_alone(problems):
    places = defaultdict(set)
    for problem in problems:
        layout = problem.layout
        assert (layout.width, layout.height) == (128, 96)
        for label, pen in zip(layout.figure.labels, layout.pens, strict=True):
            places[problem.family, "x" if "x" in label.text else label.kind].add(pen)
            if "x" in label.text:
                continue
            assert label.at.real % PATCH == 0
            assert text_mask(label.text, layout.font_size).width <= 2 * PATCH - 8  # a digit fills no more than 12 px
    assert all(len(pens) == 1 for pens in places.values()), places


def test_equal_digits_look_equal(problems):
    """Within a family the picture of a number is the number's alone, wherever the lines run."""
    seen: dict[tuple[str, str, str], bytes] = {}
    for problem in problems[:100]:
        pixels = np.asarray(render_layout(problem.layout))
        for label, (left, top, right, bottom) in zip(problem.layout.figure.labels, problem.layout.boxes, strict=True):
            patch = pixels[top:bottom, left:right].tobytes()
            assert seen.setdefault((problem.family, label.kind, label.text), patch) == patch


def test_pictures_grow_by_whole_tokens():
    (problem,) = generate_problems(1, 0, ProblemOptions(picture_scale=2.0))
    assert (problem.layout.width, problem.layout.height) == (256, 192)
    assert problem.layout.font_size == 38


def test_steps_and_lengths_are_parameters():
    options = ProblemOptions(angle_step=5, lengths=(20, 29))
    for problem in generate_problems(150, 0, options):
        numbers = dict(problem.numbers)
        assert numbers["a"] % 5 == 0 and 20 <= numbers["length"] <= 29
