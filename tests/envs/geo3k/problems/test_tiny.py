"""Tiny problems: rules by hand, digits in fixed places on the grid of patches, plausible rules for an expert."""

from __future__ import annotations

import io
import random
from collections import defaultdict

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from geo_sokoban_pipeline.envs.geo3k.config import ProblemOptions
from geo_sokoban_pipeline.envs.geo3k.figures import generate_problems
from geo_sokoban_pipeline.envs.geo3k.figures.drawing import render_layout_png, text_mask
from geo_sokoban_pipeline.envs.geo3k.figures.tiny_figures import (
    TINY_FAMILIES,
    assign_angles,
    family_angles,
    tiny_sketch,
)

PATCH = 16


@pytest.fixture(scope="module")
def problems():
    return generate_problems(300, 11)


@pytest.mark.parametrize(
    ("family", "angle", "label"),
    [
        ("vertical_angles", 52, "52"),
        ("linear_pair", 64, "116"),
        ("complementary_angles", 38, "52"),
        ("inscribed_angle", 70, "35"),
        ("intercepted_arc", 44, "88"),
        ("inscribed_angle", 75, "37.5"),
    ],
)
def test_answers(family, angle, label):
    assert find(family, angle, ProblemOptions(angle_step=5 if angle == 75 else 2)).label == label


def find(family, angle, options):
    assert angle in family_angles(family, options.angle_step)
    return tiny_sketch(family, random.Random(1), options, [angle])


@pytest.mark.parametrize(
    ("family", "step", "angles"),
    [
        ("inscribed_angle", 12, (60, 72, 84)),
        ("complementary_angles", 8, (32, 40, 48, 56)),
        ("intercepted_arc", 20, (40, 60)),
    ],
)
def test_angles_of_a_family(family, step, angles):
    assert family_angles(family, step) == angles


@given(
    st.lists(st.sampled_from(sorted(TINY_FAMILIES)), min_size=1, unique=True),
    st.integers(0, 2**40),
    st.integers(1, 8),
    st.tuples(st.floats(0.01, 0.45), st.floats(0.01, 0.45)),
)
def test_each_angle_of_a_family_belongs_to_one_split(families, seed, step, shares):
    options = ProblemOptions(angle_step=step, held_out_angles=dict(zip(("eval", "validation"), shares, strict=True)))
    assigned = assign_angles(families, ("eval", "validation", "train"), seed, options)
    for family, own in assigned.items():
        angles = family_angles(family, step)
        assert sorted(angle for part in own.values() for angle in part) == list(angles)
        assert all(own.values())
        for split, share in options.held_out_angles.items():
            assert len(own[split]) <= max(1, round(share * len(angles)))
    alone = assign_angles(families, ("eval",), seed, options)
    assert alone == {family: {"eval": own["eval"]} for family, own in assigned.items()}


@given(st.integers(0, 2**40))
def test_held_out_angles_are_trained_with_other_figures(seed):
    assigned = assign_angles(tuple(TINY_FAMILIES), ("eval", "validation", "train"), seed, ProblemOptions())
    trained = {angle for own in assigned.values() for angle in own["train"]}
    assert all(set(own["eval"]) | set(own["validation"]) <= trained for own in assigned.values())


def test_too_few_angles_are_refused():
    options = ProblemOptions(angle_step=20)
    with pytest.raises(ValueError, match=r"angle_step=20: intercepted_arc has 2 angles \[40, 60\]") as error:
        assign_angles(("intercepted_arc",), ("eval", "train"), 0, options)
    assert "needs 3. Lower angle_step" in str(error.value)


def test_splits_without_angles_of_their_own_share_them():
    options = ProblemOptions(held_out_angles={"eval": 0.5})
    assigned = assign_angles(("linear_pair",), ("eval", "validation", "train"), 3, options)["linear_pair"]
    assert assigned["validation"] == assigned["train"] and not set(assigned["eval"]) & set(assigned["train"])


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
    # Each rule holds in one family, so an expert that draws rules is right about once in as many.
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
    """Within a family the image of a number is the number's alone, wherever the lines run."""
    seen: dict[tuple[str, str, str], bytes] = {}
    for problem in problems[:100]:
        pixels = np.asarray(Image.open(io.BytesIO(render_layout_png(problem.layout))))
        for label, (left, top, right, bottom) in zip(problem.layout.figure.labels, problem.layout.boxes, strict=True):
            patch = pixels[top:bottom, left:right].tobytes()
            assert seen.setdefault((problem.family, label.kind, label.text), patch) == patch


def test_steps_lengths_and_scale_are_parameters():
    for problem in generate_problems(150, 0, ProblemOptions(angle_step=5, lengths=(20, 29), picture_scale=2.0)):
        numbers = dict(problem.numbers)
        assert numbers["a"] % 5 == 0 and 20 <= numbers["length"] <= 29
        # Images grow by whole tokens.
        assert (problem.layout.width, problem.layout.height, problem.layout.font_size) == (256, 192, 38)
