"""What the scoring tool answers. `full` explains and shows the form, `brief` costs next to no tokens.

An answer is quoted so that it stays text: it is cut to a length, and nothing in it is read as a mark of the chat.
"""

from __future__ import annotations

_CALL = '<tool_call>{"name": "calc_score", "arguments": {"answer": "<digits>"}}</tool_call>'
_WRONG = (
    "calc_score result: 0.0. The answer '{quoted}' is wrong. Look for another way to solve the problem, and do not "
    "repeat this answer."
)
_QUOTED_CHARACTERS = 100

NO_CALL = "no call"
OTHER_NAME = "other name"
NO_ANSWER = "no answer"
CORRECT = "correct"
WRONG = "wrong"
WRONG_LAST = "wrong, last chance"

_TEXTS = {
    "full": {
        NO_CALL: f"No tool call was found, so the conversation ends. A call looks like this: {_CALL}",
        OTHER_NAME: f'There is no tool "{{quoted}}". Call the scoring tool like this: {_CALL}',
        NO_ANSWER: f'The call holds no "answer". Put your numeric answer into its arguments: {_CALL}',
        CORRECT: "calc_score result: 1.0. The answer '{quoted}' matches the reference. You may stop reasoning now and "
        "give the final solution in \\boxed{}.",
        WRONG: _WRONG,
        WRONG_LAST: f"{_WRONG} One chance is left: do not call the tool again, end with Answer: \\boxed{{$Answer}}",
    },
    "brief": {
        NO_CALL: "no tool_call",
        OTHER_NAME: "no tool, try again",
        NO_ANSWER: "no answer, try again",
        CORRECT: "correct",
        WRONG: "wrong, try again",
        WRONG_LAST: "wrong, last chance",
    },
}


def feedback_text(case: str, style: str, quoted: str = "", *, raw: bool = False) -> str:
    """Text of an observation.

    Args:
        case: one of the names of this module.
        style: `full` or `brief`.
        quoted: answer or name that the text repeats.
        raw: repeat it as it is. The original's rule: an answer of any length then fills the context, and one that
            spells a mark of the chat, such as `<|image_pad|>`, breaks the episode.
    """
    return _TEXTS[style][case].replace("{quoted}", quoted if raw else _quote(quoted))


def warning_turn(max_turns: int) -> int:
    """Number (from 0) of the turn from which on feedback to wrong answers announces the last chance.

    One turn before the last one, so that a reply can follow it; the only turn where there is no second one.
    """
    return max(max_turns - 2, 0)


def _quote(text: str) -> str:
    shown = text if len(text) <= _QUOTED_CHARACTERS else f"{text[:_QUOTED_CHARACTERS]}…"
    # What is taken out may stand between the two characters of a mark, so marks are looked for behind it.
    return "".join(character for character in shown if character.isprintable()).replace("<|", "< |")
