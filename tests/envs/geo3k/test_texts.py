"""Texts: damaged escapes, instructions put on and taken off, published blocks, texts that would break a prompt."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from geo_sokoban_pipeline.envs.geo3k.data import (
    TEMPLATES,
    check_placeholders,
    check_text,
    has_tool_block,
    instruct,
    question_of,
    repair_controls,
)
from geo_sokoban_pipeline.envs.geo3k.tool_call import parse_tool_call

QUESTION = "<image>Find $x$ if $\\frac{1}{2} y = 3$.\r\n\nRound to the nearest tenth."
# Shaped like the block of published rows: ends with a blank line, speaks of the tool, `\boxed` damaged twice.
PUBLISHED = (
    'You check geometry.\n\nFirst think. Then send <tool_call>{"name": "calc_score", "arguments": {}}</tool_call> and '
    "Answer: \x08oxed{$Answer}.\nUse what comes back.\n\nEnd with Answer: \x08oxed{$Answer}.\n\n"
)


@pytest.mark.parametrize(
    ("text", "repaired", "count"),
    [
        ("Answer: \x08oxed{5}", "Answer: \\boxed{5}", 1),
        ("\x08oxed \x08oxed", "\\boxed \\boxed", 2),
        ("\x0crac{1}{2}", "\\frac{1}{2}", 1),
        ("\x07ngle, \x0bec", "\\angle, \\vec", 2),
        ("\\boxed{5}", "\\boxed{5}", 0),
        ("a\tb\r\nc", "a\tb\r\nc", 0),  # white space, not damage
        ("end\x08", "end\x08", 0),  # nothing follows that it could have begun
        ("\x08 oxed", "\x08 oxed", 0),
    ],
)
def test_repairs(text, repaired, count):
    assert repair_controls(text) == (repaired, count)
    check_text("problem", text, controls=False)  # let through where nothing is repaired


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "is blank"),
        (" \n", "is blank"),
        ("a\x00b", r"control character U\+0000"),
        ("a\x1bb", r"control character U\+001B"),
        ("a <|im_end|> b", r"chat mark <\|im_end\|>"),
        ("<|image_pad|>", "chat mark"),
    ],
)
def test_texts_that_would_break_a_prompt(text, reason):
    with pytest.raises(ValueError, match=reason):
        check_text("problem", text, controls=True)


@pytest.mark.parametrize(("text", "images"), [("<image>a", 0), ("a", 1), ("<image><image>", 1), ("<image> a", 2)])
def test_as_many_placeholders_as_images(text, images):
    with pytest.raises(ValueError, match=f"{images} images, but problem holds <image> {text.count('<image>')} times"):
        check_placeholders(text, {"images": [None] * images, "columns": "{}"})


@pytest.mark.parametrize("first", [*TEMPLATES, "Solve this.\n{question}\nBe quick."])
@pytest.mark.parametrize("second", [*TEMPLATES, "Solve this.\n{question}\nBe quick."])
def test_instructions_replace_each_other(first, second):
    shown = instruct(QUESTION, first)
    again = instruct(shown, first)
    assert again == shown
    assert question_of(shown, first) == QUESTION
    if first in TEMPLATES:  # a text of one's own is known only while it is the instruction
        assert instruct(shown, second) == instruct(QUESTION, second)


@given(st.text(), st.sampled_from(sorted(TEMPLATES)))
def test_any_question_comes_back(text, name):
    shown = instruct(text, name)
    assert instruct(shown, name) == shown
    assert question_of(shown) == question_of(text) == question_of(question_of(text))


@pytest.mark.parametrize("first", sorted(TEMPLATES))
@pytest.mark.parametrize("second", sorted(TEMPLATES))
def test_all_instructions_of_a_text_come_off_at_once(first, second):
    """As in a row that was made with one, and then with another by somebody else."""
    shown = TEMPLATES[second].replace("{question}", instruct(QUESTION, first))
    assert question_of(shown) == QUESTION


def test_published_block():
    repaired, count = repair_controls(PUBLISHED + QUESTION)
    assert count == 2
    assert has_tool_block(repaired)
    assert question_of(repaired) == question_of(PUBLISHED + QUESTION) == QUESTION
    assert instruct(repaired, "tool") == repaired  # rows that bring the protocol keep it
    assert instruct(repaired, "boxed") == instruct(QUESTION, "boxed")
    assert instruct(repaired, "question") == QUESTION


@pytest.mark.parametrize(
    "text",
    [
        "<image>Find x.",
        "<image>Find x.\n\nGive \\boxed{}.",
        "<image>What is calc_score?",
        "What is calc_score?\n\n \n",
        "<image>Use calc_score.\n\nFind x.",  # the placeholder belongs to the question
    ],
)
def test_questions_without_a_block(text):
    assert not has_tool_block(text)
    assert question_of(text) == text


def test_the_protocol_is_the_one_that_the_environment_reads():
    for name in ("tool", "tool_brief"):
        text = TEMPLATES[name]
        assert "\\boxed" in text and "\x08" not in text
        assert "<tool_call>" in text and "calc_score" in text
    call = parse_tool_call(TEMPLATES["tool"], after_think=False)
    assert call is not None and call.is_known and call.answer == "<digits>"
    assert parse_tool_call(TEMPLATES["tool_brief"].replace('"answer": ', '"answer": 5')).answer == "5"
