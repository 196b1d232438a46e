"""Tags of geometry's episodes: how a response goes wrong, from its text, the reference and the environment's info."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from geo_sokoban_pipeline.envs.geo3k.tool_call import CALL_MARK, call_answers, without_calls
from geo_sokoban_pipeline.rewards.math_answer.default import (
    MalformedError,
    extract_answer,
    is_hedge,
    normalise,
)
from geo_sokoban_pipeline.rewards.math_answer.exact_numbers import NoNumberError, NoValueError, Surd, read_number
from geo_sokoban_pipeline.rewards.text import assistant_text, visible_text

if TYPE_CHECKING:
    from geo_sokoban_pipeline.trajectories.index import StoredEpisode

# Possessive: a long run of digits is read once, not again from each of its digits.
_NUMBER = r"(?<![\d.])\d++(?:\.\d++)?+"
_BRACE = re.compile(r"\\boxed\s*\{|\\.|[{}]", re.DOTALL)  # an escaped brace is a character
_GIVEN = re.compile(rf"(?<![A-Za-z\\])([A-Za-z])\s*+=\s*+(-?{_NUMBER})")
# Degenerate responses must not cost time: characters of a response that are read, of a box; expressions.
_LONGEST, _LONGEST_BOX, _MOST_EXPRESSIONS = 4000, 200, 64


def tag_answer(episode: StoredEpisode) -> dict[str, int]:
    """Tags of an episode.

    Returns:
        `malformed_call`: responses with a tool call that the tool could not score. `no_answer`: 1, no response has a
        box. `hedge`: responses that give several answers, in boxes, calls or one box. `right_rule_wrong_arithmetic`:
        responses of an unsolved episode with another answer than an expression of theirs, which has the value of the
        reference.
    """
    texts = [visible_text(said.text)[-_LONGEST:] for said in episode.responses]
    unsolved = episode.success is False and episode.label is not None
    found = {
        "malformed_call": sum(
            said.info.get("tool_executed") is False and CALL_MARK in text
            for said, text in zip(episode.responses, texts, strict=True)
        ),
        "no_answer": int(episode.metrics.get("has_answer", 1.0) < 0.5),
        "hedge": sum(_names_several(text, episode.label) for text in texts),
        "right_rule_wrong_arithmetic": sum(_miscalculates(text, episode.label) for text in texts)
        if unsolved and episode.label
        else 0,
    }
    return {name: count for name, count in found.items() if count}


def last_answer(episode: StoredEpisode) -> str | None:
    """The last box of an episode, else its last scored answer, without spaces."""
    if (found := extract_answer(assistant_text(said.text for said in episode.responses))) is None:
        found = next((said.action for said in reversed(episode.responses) if said.action), None)
    return None if found is None else found.replace(" ", "") or None


def _names_several(text: str, label: str | None) -> bool:
    boxes = [box for _, _, box in _boxes(text) if len(box) <= _LONGEST_BOX]
    answers = {answer.replace(" ", "") for answer in (*boxes, *call_answers(text))}
    return len(answers) > 1 or (label is not None and any(_is_choice(box, label) for box in boxes))


def _is_choice(box: str, label: str) -> bool:
    try:
        return is_hedge(normalise(box), normalise(label))
    except MalformedError:
        return False


def _boxes(text: str) -> list[tuple[int, int, str]]:
    """(start, end, content) of each closed box without another box in it, in time linear in the text."""
    found: list[tuple[int, int, str]] = []
    open_braces: list[tuple[int, int, bool]] = []
    for token in _BRACE.finditer(text):
        if token[0] == "}" and open_braces:
            start, inside, is_box = open_braces.pop()
            if is_box:
                found.append((start, token.end(), text[inside : token.start()]))
        elif token[0].endswith("{") and token[0] != "\\{":
            is_box = len(token[0]) > 1
            if is_box:
                # A box around this one is not the innermost.
                open_braces = [(start, inside, False) for start, inside, _ in open_braces]
            open_braces.append((token.start(), token.end(), is_box))
    return found


def _miscalculates(text: str, label: str) -> bool:
    """Whether a response writes an expression of the reference's value, and another answer."""
    wanted, boxes = _value(label), _boxes(text)
    given = [_value(answer) for answer in (*(box for _, _, box in boxes), *call_answers(text))]
    if wanted is None or not given or wanted in given:
        return False
    for start, end, _ in reversed(boxes):
        text = f"{text[:start]} ; {text[end:]}"
    return any(_value(expression) == wanted for expression in _expressions(without_calls(text)))


def _value(text: str) -> Surd | None:
    try:
        return read_number(normalise(text))
    except (MalformedError, NoNumberError, NoValueError):
        return None


def _expressions(text: str) -> list[str]:
    """Expressions of a text, with the numbers that it gives to letters in their place.

    Two operands or more, or a number beside a letter. A letter alone is one only at the end of the working: elsewhere
    it may be a word.
    """
    given = dict(_GIVEN.findall(text))
    text = _GIVEN.sub(" ; ", text)
    letter = f"(?<![A-Za-z\\\\])[{''.join(given)}](?![A-Za-z])" if given else r"(?!)"
    group, bracket = r"\{[^{}]*\}", r"\([^()]*\)"
    macro = rf"\\sqrt\s*{group}|\\frac\s*{group}\s*{group}|\\pi"
    atom = rf"(?:{_NUMBER}(?:\s*{letter})?|{letter}|{macro}|{bracket})"
    sign = r"\s*(?:[-+*/]|\\times|\\cdot|\\div)\s*"
    pattern = rf"{atom}(?:{sign}{atom}|\s*{bracket})+|{_NUMBER}\s*{letter}|{letter}(?=[\s;.]*$)"
    found = list(dict.fromkeys(match[0] for match in re.finditer(pattern, text.rstrip())))[-_MOST_EXPRESSIONS:]
    return [re.sub(letter, lambda name: f"({given[name[0]]})", expression) for expression in found]
