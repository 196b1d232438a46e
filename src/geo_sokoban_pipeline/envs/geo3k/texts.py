"""Texts of problems: damaged escapes repaired, instructions put around a question and taken off again.

`question_of(instruct(question, …)) == question`, so processing a processed row changes nothing, and a question is
recognised whatever instruction it comes with.
"""

from __future__ import annotations

import re

from geo_sokoban_pipeline.options.geo3k import QUESTION_MARK

PLACEHOLDER = "<image>"

_CALL = '<tool_call>{"name": "calc_score", "arguments": {"answer": "<digits>"}}</tool_call>'

TOOL = f"""You are an expert in geometry, and you check your results before you hand them in. You have a scoring tool, \
calc_score, which compares an answer with the reference. Solve the problem below in these steps:
1. Think inside <think> and </think> until you have an answer.
2. Call calc_score at least once, with your answer as a number. The call is JSON between its tags, which must be there:
{_CALL}
In the same message, also write Answer: \\boxed{{$Answer}} with that answer.
3. Read the result of the call. If the answer is wrong, look for the mistake, and try another way.
4. Write your last message in the same form and end it with Answer: \\boxed{{$Answer}}

{QUESTION_MARK}"""

TEMPLATES = {
    "question": QUESTION_MARK,
    "boxed": f"{QUESTION_MARK}\nThink step by step, then write the answer inside \\boxed{{}}.",
    "tool_brief": f'{QUESTION_MARK}\n<tool_call>{{"name": "calc_score", "arguments": {{"answer": }}}}</tool_call>'
    " \\boxed{}",
    "tool": TOOL,
}

# What Python makes of \a, \b, \v and \f in a text that should have been raw; before a letter it was LaTeX.
_ESCAPES = {"\a": "\\a", "\b": "\\b", "\v": "\\v", "\f": "\\f"}
_DAMAGED_ESCAPE = re.compile("[\a\b\v\f](?=[A-Za-z])")
_CONTROL = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]")
_CHAT_MARK = re.compile(r"<\|[a-z_]+\|>")
# Words that the block of published multi-turn rows holds and no question does.
_TOOL_WORDS = re.compile(r"calc_score|calc_geo3k_reward|</?tool_call>|(\\b|\x08)oxed")


def repair_controls(text: str) -> tuple[str, int]:
    """The text with LaTeX where control characters stand for it, and how many there were."""
    return _DAMAGED_ESCAPE.subn(lambda found: _ESCAPES[found[0]], text)


def check_text(name: str, text: str, *, controls: bool) -> None:
    """See that a text can be shown to a policy.

    Args:
        name: of the column, for the message.
        controls: refuse control characters other than tabs and line ends.

    Raises:
        ValueError: blank, or it holds a control character or a mark of the chat markup, which would break the prompt.
    """
    if not text.strip():
        raise ValueError(f"{name} is blank")
    if found := _CHAT_MARK.search(text):
        raise ValueError(f"{name} holds the chat mark {found[0]}")
    if controls and (found := _CONTROL.search(text)):
        raise ValueError(f"{name} holds the control character U+{ord(found[0]):04X}")


def check_placeholders(text: str, images: int) -> None:
    """See that there is one placeholder for each picture.

    Raises:
        ValueError: there are more or fewer.
    """
    if text.count(PLACEHOLDER) != images:
        raise ValueError(
            f"{images} images, but problem holds {PLACEHOLDER} {text.count(PLACEHOLDER)} times; it stands for one each"
        )


def instruct(own: str, instruction: str) -> str:
    """Text of a prompt: the question with the instruction around it.

    Args:
        own: the row's text, with or without an instruction; one with the tool's protocol stays for `tool`.
        instruction: name of a template, or a text that holds `{question}`.
    """
    if instruction == "tool" and has_tool_block(own):
        return own
    return TEMPLATES.get(instruction, instruction).replace(QUESTION_MARK, question_of(own, instruction))


def question_of(text: str, instruction: str = "question") -> str:
    """The question in a row's text: without instructions of our own, and without the block of published rows.

    Args:
        instruction: a text of your own, to be recognised like the named ones.
    """
    while (less := _without_one(text, instruction)) != text:
        text = less
    return text


def _without_one(text: str, instruction: str) -> str:
    for template in [*TEMPLATES.values(), TEMPLATES.get(instruction, instruction)]:
        before, _, after = template.partition(QUESTION_MARK)
        around = len(before) + len(after)
        if 0 < around <= len(text) and text.startswith(before) and text.endswith(after):
            return text[len(before) : len(text) - len(after)]
    end = _block_end(text)
    return text[end:] if end else text


def has_tool_block(text: str) -> bool:
    """Whether a text begins with a block that explains the scoring tool, ours or a published one."""
    return _block_end(text) > 0


def plain_question(question: str) -> str:
    """A question as splits compare it: without placeholders, any white space one blank."""
    return " ".join(question.replace(PLACEHOLDER, " ").split())


def _block_end(text: str) -> int:
    """Where a block about the tool ends: behind the blank line that follows the last mention of it; 0 without one.

    Placeholders belong to the question, so a text with one before that line has no such block.
    """
    if "calc_score" not in text and "calc_geo3k_reward" not in text:
        return 0
    last = max(found.end() for found in _TOOL_WORDS.finditer(text))
    blank = text.find("\n\n", last)
    if blank < 0 or PLACEHOLDER in text[:blank] or not text[blank:].strip():
        return 0
    return blank + 2
