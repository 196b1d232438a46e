"""What of an episode is graded, and the two forms of text that are counted."""

from __future__ import annotations

import pytest

from geo_sokoban_pipeline.rewards.text import assistant_text, has_box, has_format, repetition, visible_text


@pytest.mark.parametrize(
    ("response", "visible"),
    [("a", "a"), ("a</think>b", "b"), ("<think>a</think>b</think>c", "c"), ("a</think>", ""), ("<think>a", "<think>a")],
)
def test_visible_text(response, visible):
    assert visible_text(response) == visible


def test_assistant_text_takes_thoughts_out_of_each_response():
    responses = ["x</think>\\boxed{5}", "y</think>done"]
    assert assistant_text(responses) == "\\boxed{5}\ndone"
    assert assistant_text(responses, thoughts=True) == "x</think>\\boxed{5}\ny</think>done"
    assert assistant_text([]) == ""


@pytest.mark.parametrize(("text", "expected"), [("\\boxed{", True), ("\\boxed", False), ("\\fbox{5}", False)])
def test_has_box(text, expected):
    assert has_box(text) is expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("<think>a</think> \\boxed{5}", True),
        ("a</think> \\boxed{5}", True),
        ("<think>a</think> b </think> \\boxed{\\frac{1}{2}}", True),
        ("<think>a \\boxed{5} </think>", False),
        ("<think>a \\boxed{5}", False),
        ("\\boxed{5} <think>a</think>", False),
        ("<think>a</think> \\boxed{5", False),
        ("\\boxed{5}", False),
    ],
)
def test_has_format(text, expected):
    assert has_format(text) is expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a" * 10_001, True),
        ("a" * 10_000, False),
        ("x" * 10 + "up, left; " * 2000, True),
        ("a" * 20_000 + " ".join(str(number * 7919 % 10_007) for number in range(3000)), False),  # only the end counts
        ("", False),
        ("é\ud800" * 6000, True),  # a lone surrogate must not stop the metrics
    ],
)
def test_repetition(text, expected):
    assert repetition(text) is expected
