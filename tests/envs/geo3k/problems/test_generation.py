"""Problems from a seed: the same in every process, no two alike, none shared by splits, no answer too frequent."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from geo_sokoban_pipeline.config.base import ParameterError, validate_parameters
from geo_sokoban_pipeline.envs.geo3k.config import ProblemOptions
from geo_sokoban_pipeline.envs.geo3k.figures import (
    ProblemsExhaustedError,
    family_names,
    generate_problems,
    generate_splits,
    problem_key,
)

COUNTS = {"eval": 640, "validation": 256, "train": 1024}
MIXED = ProblemOptions(difficulty="mixed")


@pytest.fixture(scope="module")
def tiny():
    return generate_splits(COUNTS, 0)


def test_default_problems_have_many_answers_and_none_is_frequent(tiny):
    for split, problems in tiny.items():
        assert len(problems) == COUNTS[split]
        labels = Counter(problem.label for problem in problems)
        assert len(labels) >= (25 if split == "validation" else 40)
        assert max(labels.values()) <= 0.1 * len(problems)
        families = Counter(problem.family for problem in problems)
        assert len(families) == 5 and max(families.values()) - min(families.values()) <= 1


def test_numbers_of_default_problems_are_in_the_image_only(tiny):
    assert {problem.question for problem in tiny["train"]} == {"Find $x$."}
    for problem in tiny["eval"]:
        texts = {label.text for label in problem.layout.figure.labels}
        assert texts == {f"{dict(problem.numbers)['a']}°", "x°", str(dict(problem.numbers)["length"])}


def test_splits_share_no_family_with_its_numbers(tiny):
    keys = [(problem.family, problem.numbers) for problems in tiny.values() for problem in problems]
    assert len(keys) == len(set(keys))


def test_splits_share_no_figure_with_its_given_angle(tiny):
    """The length beside it decides nothing, so it must not be what keeps splits apart."""
    decisive = {
        split: {(problem.family, dict(problem.numbers)["a"]) for problem in problems}
        for split, problems in tiny.items()
    }
    assert {split: len(pairs) for split, pairs in decisive.items()} == {"eval": 52, "validation": 32, "train": 127}
    assert sum(map(len, decisive.values())) == len(set().union(*decisive.values()))


def test_more_training_problems_do_not_change_the_held_out_ones(tiny):
    fewer = generate_splits({**COUNTS, "train": 10}, 0)
    assert [p.key for p in fewer["eval"]] == [p.key for p in tiny["eval"]]
    assert [p.key for p in fewer["train"]] == [p.key for p in tiny["train"][:10]]


@settings(max_examples=15, deadline=None)
@given(st.integers(-(2**40), 2**40), st.integers(0, 40), st.sampled_from(["tiny", "easy", "medium", "hard", "mixed"]))
def test_problems_are_distinct_exact_and_determined_by_the_seed(seed, count, difficulty):
    options = ProblemOptions(difficulty=difficulty)
    problems = generate_problems(count, seed, options)
    assert len({problem.key for problem in problems}) == len(problems) == count
    again = generate_problems(count + 3, seed, options)[:count]
    assert [(p.label, p.numbers, p.layout) for p in again] == [(p.label, p.numbers, p.layout) for p in problems]
    for problem in problems:
        assert float(problem.value) > 0
        assert problem.form in ("integer", "decimal", "surd", "fraction", "pi")
        assert problem.key == problem_key(problem.family, tuple(reversed(problem.numbers)))


def test_mixed_problems_hold_all_families_difficulties_and_forms():
    problems = generate_problems(3 * len(family_names("mixed")), 3, MIXED)
    assert {problem.family for problem in problems} == set(family_names("mixed"))
    assert {problem.difficulty for problem in problems} == {"easy", "medium", "hard"}
    assert {problem.form for problem in problems} == {"integer", "decimal", "surd", "fraction", "pi"}


def test_other_processes_draw_the_same_images():
    script = (
        "import hashlib; from geo_sokoban_pipeline.envs.geo3k.figures import generate_problems;"
        "from geo_sokoban_pipeline.envs.geo3k.config import ProblemOptions as O;"
        "rows = generate_problems(12, 5) + generate_problems(30, 5, O(difficulty='mixed'));"
        "print(hashlib.sha256(b''.join(p.png + p.key.encode() + p.label.encode() for p in rows)).hexdigest())"
    )
    rows = generate_problems(12, 5) + generate_problems(30, 5, MIXED)
    ours = hashlib.sha256(b"".join(p.png + p.key.encode() + p.label.encode() for p in rows)).hexdigest()
    run = subprocess.run(
        [sys.executable, "-c", script],
        env={"PYTHONHASHSEED": "12345", "PYTHONPATH": ":".join(sys.path)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert run.stdout.strip() == ours


def test_shares_of_families():
    options = ProblemOptions(families={"linear_pair": 3.0, "inscribed_angle": 1.0})
    families = Counter(problem.family for problem in generate_problems(80, 0, options))
    assert families == {"linear_pair": 60, "inscribed_angle": 20}


def test_used_up_families_leave_their_turns_to_the_others():
    options = ProblemOptions(difficulty="easy", families={"complementary_angles": 1.0, "trapezoid_area": 1.0})
    families = Counter(problem.family for problem in generate_problems(100, 0, options))
    assert families["complementary_angles"] <= 35 and families.total() == 100


def test_when_all_are_used_up_the_error_says_so():
    options = ProblemOptions(difficulty="easy", families={"complementary_angles": 1.0})
    with pytest.raises(ProblemsExhaustedError, match=r"count=100: .* about \d\d distinct problems") as error:
        generate_problems(100, 0, options)
    assert 25 <= len(error.value.problems) <= 35


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"families": {"linear_pear": 1.0}},
            "families.linear_pear=1: no family of difficulty tiny. Did you mean linear_pair",
        ),
        ({"families": {"sector": 1.0}}, "no family of difficulty tiny"),
        ({"angle_step": 20, "families": {"vertical_angles": 1.0}, "lengths": (10, 10)}, "distinct problems"),
    ],
)
def test_errors_name_the_way_out(options, message):
    with pytest.raises(ValueError, match=message):
        generate_problems(50, 0, ProblemOptions(**options))


def test_negative_counts_are_refused():
    with pytest.raises(ValueError, match="count=-1"):
        generate_problems(-1, 0)


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
