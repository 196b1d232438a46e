"""Extraction: last box, behind the thoughts, braced and closed."""

from __future__ import annotations

import pytest

from geo_sokoban_pipeline.rewards.math_answer.default import extract_answer


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
