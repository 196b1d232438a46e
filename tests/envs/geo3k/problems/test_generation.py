"""Problems from a seed: the same in every process, none shared by splits, answers by hand, and tiny problems."""

from __future__ import annotations

import io
import random
from collections import Counter, defaultdict
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from geo_sokoban_pipeline.config.base import ParameterError, validate_parameters
from geo_sokoban_pipeline.envs.geo3k.config import ProblemOptions
from geo_sokoban_pipeline.envs.geo3k.figures.drawing import render_layout_png, text_mask
from geo_sokoban_pipeline.envs.geo3k.figures.exact import answer_form
from geo_sokoban_pipeline.envs.geo3k.figures.generation import (
    FAMILIES,
    generate_splits,
)
from geo_sokoban_pipeline.envs.geo3k.figures.problem import Problem, problem_key
from geo_sokoban_pipeline.envs.geo3k.figures.tiny_figures import (
    TINY_FAMILIES,
    assign_angles,
    family_angles,
    tiny_sketch,
)

COUNTS = {"eval": 640, "validation": 256, "train": 1024}


def draw(count: int, seed: int = 0, **options: Any) -> list[Problem]:
    return generate_splits({"train": count}, seed, ProblemOptions(**options))["train"]


def keys_of(problems: list[Problem]) -> list[str]:
    return [problem_key(problem.family, problem.sketch.numbers) for problem in problems]


def test_default_problems_have_many_answers_in_the_image_only_and_splits_share_no_figure():
    tiny = generate_splits(COUNTS, 0, ProblemOptions())
    for split, problems in tiny.items():
        assert len(problems) == COUNTS[split]
        labels = Counter(problem.sketch.label for problem in problems)
        assert len(labels) >= (25 if split == "validation" else 40)
        assert max(labels.values()) <= 0.1 * len(problems)
        families = Counter(problem.family for problem in problems)
        assert len(families) == 5 and max(families.values()) - min(families.values()) <= 1
    assert {problem.sketch.question for problem in tiny["train"]} == {"Find $x$."}
    for problem in tiny["eval"]:
        texts, numbers = {label.text for label in problem.layout.figure.labels}, dict(problem.sketch.numbers)
        assert texts == {f"{numbers['a']}°", "x°", str(numbers["length"])}
    # The length beside the angle decides nothing, so it must not be what keeps splits apart.
    pairs = {split: {(p.family, dict(p.sketch.numbers)["a"]) for p in problems} for split, problems in tiny.items()}
    assert {split: len(found) for split, found in pairs.items()} == {"eval": 52, "validation": 32, "train": 127}
    assert sum(map(len, pairs.values())) == len(set().union(*pairs.values()))
    keys = {split: keys_of(problems) for split, problems in tiny.items()}
    assert sum(map(len, keys.values())) == len(set().union(*keys.values()))
    # More training problems do not change the held-out ones.
    fewer = generate_splits({**COUNTS, "train": 10}, 0, ProblemOptions())
    assert (keys_of(fewer["eval"]), keys_of(fewer["train"])) == (keys["eval"], keys["train"][:10])


@settings(max_examples=15, deadline=None)
@given(st.integers(-(2**40), 2**40), st.integers(0, 40), st.sampled_from(["tiny", "easy", "medium", "hard", "mixed"]))
def test_problems_are_distinct_exact_and_determined_by_the_seed(seed, count, difficulty):
    problems = draw(count, seed, difficulty=difficulty)
    assert len(set(keys_of(problems))) == len(problems) == count
    assert draw(count + 3, seed, difficulty=difficulty)[:count] == problems
    for problem, key in zip(problems, keys_of(problems), strict=True):
        assert float(problem.sketch.value) > 0
        assert answer_form(problem.sketch.label) in ("integer", "decimal", "surd", "fraction", "pi")
        assert key == problem_key(problem.family, tuple(reversed(problem.sketch.numbers)))


def test_mixed_problems_hold_all_families_difficulties_and_forms():
    problems = draw(3 * len(FAMILIES), 3, difficulty="mixed")
    assert {problem.family for problem in problems} == set(FAMILIES)
    assert {problem.difficulty for problem in problems} == {"easy", "medium", "hard"}
    forms = {answer_form(problem.sketch.label) for problem in problems}
    assert forms == {"integer", "decimal", "surd", "fraction", "pi"}


@pytest.mark.parametrize(
    ("families", "expected"),
    [
        (
            {"linear_pair": 3.0, "inscribed_angle": 1.0},
            {"linear_pair": range(75, 76), "inscribed_angle": range(25, 26)},
        ),
        # A family that is used up leaves its turns to the others.
        ({"complementary_angles": 1.0, "trapezoid_area": 1.0}, {"complementary_angles": range(36)}),
    ],
)
def test_shares_of_families(families, expected):
    difficulty = "tiny" if "linear_pair" in families else "easy"
    found = Counter(problem.family for problem in draw(100, difficulty=difficulty, families=families))
    assert found.total() == 100 and all(found[family] in counts for family, counts in expected.items())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"families": {"linear_pear": 1.0}},
            "families.linear_pear=1: no family of difficulty tiny. Did you mean linear_pair",
        ),
        ({"families": {"sector": 1.0}}, "no family of difficulty tiny"),
        (
            {"difficulty": "easy", "families": {"complementary_angles": 1.0}},
            r"train=50: .* about (2[5-9]|3[0-5]) distinct problems of difficulty easy .* Lower the counts",
        ),
        (
            {"angle_step": 20, "families": {"vertical_angles": 1.0}, "lengths": (10, 10)},
            r"about 1 distinct problems .* Lower the counts or angle_step",
        ),
        (
            {"angle_step": 20, "families": {"intercepted_arc": 1.0}},
            r"angle_step=20: intercepted_arc has 2 angles \[40, 60\].* needs 3. Lower angle_step",
        ),
    ],
)
def test_errors_name_the_way_out(options, message):
    with pytest.raises(ValueError, match=message):
        draw(50, **options)


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"difficulty": "tyny"}, "Did you mean tiny"),
        ({"lengths": [50, 10]}, "rising order"),
        ({"held_out_angles": {"eval": 0.5, "validation": 0.5}}, "leave none for training"),
        ({"held_out_angles": {"eval": 0.0}}, "greater than 0"),
        ({"held_out_angles": {"test": 0.2}}, "held_out_angles.test"),
        ({"lengths": [10, 120]}, "less than or equal to 99"),
        ({"families": {}}, "families is empty"),
        ({"picture_scale": 0}, "picture_scale"),
    ],
)
def test_options_are_checked(params, message):
    with pytest.raises(ParameterError, match=message):
        validate_parameters(params, ProblemOptions, prefix="geo3k.problems")


# Answers worked out by hand, family by family.

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


# Tiny problems: rules by hand, digits in fixed places on the grid of patches, plausible rules for an expert.

PATCH = 16


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
def test_tiny_answers(family, angle, label):
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


def test_splits_without_angles_of_their_own_share_them():
    options = ProblemOptions(held_out_angles={"eval": 0.5})
    assigned = assign_angles(("linear_pair",), ("eval", "validation", "train"), 3, options)["linear_pair"]
    assert assigned["validation"] == assigned["train"] and not set(assigned["eval"]) & set(assigned["train"])


def test_candidates_are_every_rule_applied_to_the_angle():
    sketch = find("linear_pair", 64, ProblemOptions())
    assert {(one.rule, one.label) for one in sketch.candidates} == {
        ("a", "64"),
        ("180 - a", "116"),
        ("90 - a", "26"),
        ("a / 2", "32"),
        ("2 a", "128"),
    }
    for problem in draw(60, 11):
        rule = TINY_FAMILIES[problem.family].rule
        assert [one.label for one in problem.sketch.candidates if one.rule == rule] == [problem.sketch.label]
    # Each rule holds in one family, so an expert that draws rules is right about once in as many.
    assert sorted(kind.rule for kind in TINY_FAMILIES.values()) == sorted(one.rule for one in sketch.candidates)


def test_digits_have_patches_of_their_own_and_look_equal_in_places_that_depend_on_the_family_alone():
    """Within a family the image of a number is the number's alone, wherever the lines run."""
    places, seen = defaultdict(set), {}
    for problem in draw(100, 11):
        layout = problem.layout
        assert (layout.width, layout.height) == (128, 96)
        pixels = np.asarray(Image.open(io.BytesIO(render_layout_png(layout))))
        for label, pen, box in zip(layout.figure.labels, layout.pens, layout.boxes, strict=True):
            left, top, right, bottom = box
            patch = pixels[top:bottom, left:right].tobytes()
            assert seen.setdefault((problem.family, label.kind, label.text), patch) == patch
            places[problem.family, "x" if "x" in label.text else label.kind].add(pen)
            if "x" not in label.text:
                assert label.at.real % PATCH == 0
                # A digit fills no more than 12 px.
                assert text_mask(label.text, layout.font_size).width <= 2 * PATCH - 8
    assert all(len(pens) == 1 for pens in places.values()), places


def test_steps_lengths_and_scale_are_parameters():
    for problem in draw(150, angle_step=5, lengths=(20, 29), picture_scale=2.0):
        numbers = dict(problem.sketch.numbers)
        assert numbers["a"] % 5 == 0 and 20 <= numbers["length"] <= 29
        # Images grow by whole tokens.
        assert (problem.layout.width, problem.layout.height, problem.layout.font_size) == (256, 192, 38)
