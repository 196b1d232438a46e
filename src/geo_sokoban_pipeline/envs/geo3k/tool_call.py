"""Grammar of the scoring call: `<tool_call>{"name": …, "arguments": {"answer": …}}</tool_call>`, the last one counts.

Policies write LaTeX into JSON as they write it elsewhere, with one backslash. Such answers are read as they were meant.
Reading takes time linear in the text and never raises, whatever the text holds: a text without a call gives None.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

from geo_sokoban_pipeline.rewards.math_answer.exact_numbers import decimal_of_json, label_text
from geo_sokoban_pipeline.rewards.text import visible_text

TOOL_NAMES = ("calc_score", "calc_geo3k_reward")
CALL_MARK = "<tool_call>"

# Two patterns in place of the original's `<tool_call>\s*(\{.*?\})\s*</tool_call>`: they find the same calls, but that
# one reads to the end of the text again for each call that nothing closes.
_OPEN = re.compile(r"<tool_call>\s*\{")
_CLOSE = re.compile(r"\}\s*</tool_call>")
# Macros that begin like an escape of JSON. A form feed or a backspace before a letter is always one.
_MACROS = (
    "n(?:abla|atural|cong|earrow|e|eq|eg|ewline|exists|geq|gtr|i|leq|less|mid|ot|otin|parallel|sim|u|warrow)"
    "|r(?:angle|brace|brack|ceil|floor|ho|ight|ightarrow|ightleftharpoons|lap|m|oot|[vV]ert)"
    "|t(?:ag|an|anh|au|binom|ext|ext[a-z]+|frac|herefore|heta|hickapprox|hinspace|ilde|imes|o|op|riangle|riangleq)"
)
_ESCAPE = re.compile(rf"""(\\(?:["\\/]|u[0-9A-Fa-f]{{4}}|[bf](?![A-Za-z])|(?!(?:{_MACROS})(?![A-Za-z]))[nrt]))|\\""")
_LONGEST_INTEGER = 600  # digits; more are no number of `label_text`, so they stay text


@dataclass(frozen=True)
class ToolCall:
    """A parsed call.

    Attributes:
        name: as written, without white space around it; any name.
        answer: the argument `answer` as text, not blank; None where it is missing, null or blank.
        malformed_arguments: whether the arguments are no JSON object; there is no answer then.
    """

    name: str
    answer: str | None
    malformed_arguments: bool = False

    @property
    def is_known(self) -> bool:
        """Whether the name is one of `TOOL_NAMES`."""
        return self.name in TOOL_NAMES


def parse_tool_call(
    text: str, *, after_think: bool = True, earlier_call_counts: bool = False, tolerate_latex: bool = True
) -> ToolCall | None:
    """The scoring call of a response.

    The body is a JSON object with `name` and `arguments`, or with both in an object `function`; arguments may be JSON
    text. Tags are read in lower case only.

    Args:
        text: the whole response.
        after_think: read only what follows the last `</think>`, if there is one. Off is the original's rule.
        earlier_call_counts: where the last call cannot be read, take the last one that can. Off is the original's rule.
        tolerate_latex: read `"\\frac{1}{2}"` and `"5\\sqrt{3}"` as if their backslashes were doubled, and numbers by
            their digits. Off is the original's rule: what JSON and `str` make of them.

    Returns:
        None where there is no call, or the one that counts is not JSON, has no name, or has arguments in JSON text that
        cannot be decoded.
    """
    if after_think:
        text = visible_text(text)
    bodies = _bodies(text)
    for body in reversed(bodies if earlier_call_counts else bodies[-1:]):
        if (call := _read_body(body, tolerate_latex)) is not None:
            return call
    return None


def call_answers(text: str) -> list[str]:
    """Answers of all calls of a text that can be read, in order."""
    calls = (_read_body(body, tolerate_latex=True) for body in _bodies(text))
    return [call.answer for call in calls if call is not None and call.answer is not None]


def without_calls(text: str) -> str:
    """The text without its calls."""
    for body in _bodies(text):
        text = text.replace(body, " ", 1)
    return text.replace(CALL_MARK, " ").replace("</tool_call>", " ")


def _bodies(text: str) -> list[str]:
    """Texts in braces between the tags, in order; a call ends at the first closing tag after a brace."""
    bodies: list[str] = []
    at = 0
    while (opened := _OPEN.search(text, at)) and (closed := _CLOSE.search(text, opened.end())):
        bodies.append(text[opened.end() - 1 : closed.start() + 1])
        at = closed.end()
    return bodies


def _read_body(body: str, tolerate_latex: bool) -> ToolCall | None:
    load = _load_latex if tolerate_latex else json.loads
    try:
        payload = load(body)
        function = payload.get("function")
        function = function if isinstance(function, dict) else {}
        arguments = payload.get("arguments") or function.get("arguments") or {}
        if isinstance(arguments, str):
            arguments = load(arguments)
        given = arguments.get("answer") if isinstance(arguments, dict) else None
        if tolerate_latex and isinstance(given, list):  # the values it holds, without Python's brackets and quotes
            given = ", ".join(map(label_text, given))
        text = label_text(given) if tolerate_latex or given is None else str(given)
    except (ValueError, RecursionError):  # not JSON, a number of thousands of digits, nesting beyond the stack
        return None
    name = payload.get("name") or function.get("name")
    if not isinstance(name, str):
        return None
    return ToolCall(_printable(name), _printable(text) or None, not isinstance(arguments, dict))


def _load_latex(text: str) -> Any:
    """Value of a JSON text in which backslashes of LaTeX may be single."""
    return _DECODER.decode(_ESCAPE.sub(lambda found: found[1] or r"\\", text))


def _integer(text: str) -> int | str:
    return int(text) if len(text) <= _LONGEST_INTEGER else text


# Made once: each decoder is garbage that only the collector of cycles frees.
_DECODER = json.JSONDecoder(parse_float=decimal_of_json, parse_int=_integer)


def _printable(text: str) -> str:
    """Text that UTF-8 can hold: JSON may escape half a surrogate pair."""
    return text.strip().encode("utf-8", "replace").decode("utf-8")
