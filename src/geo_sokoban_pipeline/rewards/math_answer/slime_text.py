"""The two normal forms of the original math checker, rule for rule, so that `slime_exact` keeps its verdicts.

Nothing here is improved: what looks wrong (a short left side that vanishes, everything after a spaced `\\text`) is how
the original decides, and the `default` grader is where such answers are refused. Pure text: no answer is evaluated.
"""

from __future__ import annotations

import re

from geo_sokoban_pipeline.rewards.math_answer.slime_latex import UnreadableError, latex_to_text

_UNITS = (
    *("degree", "cm", "centimeter", "meter", "mile", "second", "minute", "hour"),
    *("day", "week", "month", "year", "foot", "feet", "inch", "yard"),
)
_UNIT_PATTERNS = tuple(re.compile(rf"{unit}(?:es)?s? *(?:\^[0-9]+)?") for unit in _UNITS)
_TEXT_AROUND = re.compile(r"^\\text\{(.+?)\}$")
_THOUSANDS = re.compile(r"(\d),(\d\d\d)($|\D)")
_NAMED_CHARACTERS = {"√": "sqrt", "π": "pi", "∞": "inf", "∪": "U", "·": "*", "×": "*"}
_BRACKETS = "()[]"


def string_form(answer: str) -> str:
    """Form in which two answers are compared as strings; an unreadable answer stays as it is."""
    answer = answer.strip()
    if found := _TEXT_AROUND.search(answer):
        answer = found[1].strip()
    try:
        return _string_form(answer)
    except UnreadableError:
        return answer


def symbolic_form(answer: str) -> str:
    """Form whose elements are compared by symbolic algebra: lower case, no spaces, no braces, plain operators."""
    if found := _TEXT_AROUND.search(answer):
        answer = found[1]
    answer = answer.replace("\\%", "%").replace("\\$", "$").replace("$", "").replace("%", "")
    answer = answer.replace(" or ", " , ").replace(" and ", " , ")
    for word, power in (("million", 6), ("billion", 9), ("trillion", 12)):
        answer = answer.replace(word, f"*10^{power}")
    for pattern in _UNIT_PATTERNS:
        answer = pattern.sub("", answer)
    answer = re.sub(r"\^ *\\circ", "", answer)
    if answer.startswith("{") and answer.endswith("}"):
        answer = answer[1:-1]
    answer = re.sub(r",\\! *", "", answer)
    number = _whole_number(answer)
    if number is not None:
        answer = str(round(number))
    if "\\" in answer:
        answer = _plain_formula(answer)
    answer = re.sub("- *", "-", answer)
    answer = re.sub("([0-9]) +([0-9])", r"\1+\2", answer)  # 7 3/4 is 7+3/4
    answer = answer.replace(" ", "").replace("{", "").replace("}", "").lower()
    return str(int(float(answer.replace(",", "")))) if is_integer(answer) else answer


def is_integer(text: str) -> bool:
    """Whether a text is a whole number, thousands separators and a fraction of zeros allowed."""
    return _whole_number(drop_thousands(text)) is not None


def is_fraction(text: str) -> bool:
    """Whether a text is a plain fraction of integers; one more character may stand before the slash and at the end."""
    return re.search(r"^-?[0-9]+.?/0*[1-9][0-9]*.?$", text) is not None


def drop_thousands(text: str) -> str:
    """The text without commas that separate thousands."""
    while (shorter := _THOUSANDS.sub(r"\1\2\3", text)) != text:
        text = shorter
    return text


def split_elements(text: str) -> list[str]:
    """Elements of a bracketed tuple or interval; any other text is one element, an empty one none."""
    text = drop_thousands(text)
    if not text:
        return []
    inner = text[1:-1]
    bracketed = len(text) > 2 and text[0] in _BRACKETS and text[-1] in _BRACKETS
    if bracketed and not any(bracket in inner for bracket in _BRACKETS):
        return [element.strip() for element in inner.split(",")]
    return [text]


def is_evaluable(difference: str) -> bool:
    """Whether a difference is handed to symbolic algebra: at most two letters, no long, nested or bracketed powers."""
    letters = {letter for letter in difference.replace("sqrt", "").replace("frac", "") if letter.isalpha()}
    return len(letters) <= 2 and re.search(r"\^[{(]|\^[0-9]+\^|\^[0-9][0-9]", difference) is None


def _whole_number(text: str) -> float | None:
    try:
        number = float(text)
        return number if abs(number - round(number)) <= 1e-7 else None
    except (ValueError, OverflowError):  # no number; infinite
        return None


def _plain_formula(latex: str) -> str:
    latex = latex.replace("\\tfrac", "\\frac").replace("\\dfrac", "\\frac").replace("\\frac", " \\frac")
    try:
        latex = latex_to_text(latex)
    except UnreadableError:
        return latex
    for character, name in _NAMED_CHARACTERS.items():
        latex = latex.replace(character, name)
    return latex.strip()


def _string_form(text: str) -> str:
    text = text.replace("\n", "").replace("\\!", "").replace("\\\\", "\\")
    text = text.replace("tfrac", "frac").replace("dfrac", "frac").replace("\\left", "").replace("\\right", "")
    text = text.replace("^{\\circ}", "").replace("^\\circ", "").replace("\\$", "")
    text = _without_unit(text).replace("\\%", "")
    text = text.replace(" .", " 0.").replace("{.", "{0.")
    if not text:
        return text
    if text[0] == ".":
        text = f"0{text}"
    sides = text.split("=")
    if len(sides) == 2 and len(sides[0]) <= 2:
        text = sides[1]
    text = _brace_roots(text).replace(" ", "")
    text = _brace_fractions(text)
    return _slash_as_fraction("\\frac{1}{2}" if text == "0.5" else text)


def _without_unit(text: str) -> str:
    head, *units = text.split("\\text{ ")
    if len(units) > 1:
        raise UnreadableError("more than one unit")
    return head


def _brace_roots(text: str) -> str:
    head, *parts = text.split("\\sqrt")
    if not all(parts):
        raise UnreadableError("a root of nothing")
    return "\\sqrt".join([head, *(part if part[0] == "{" else f"{{{part[0]}}}{part[1:]}" for part in parts)])


def _brace_fractions(text: str) -> str:
    head, *parts = text.split("\\frac")
    braced = [head]
    for part in parts:
        if not part:
            raise UnreadableError("a fraction of nothing")
        if part[0] == "{":
            braced.append(part)
        elif len(part) < 2:
            return text
        else:
            lower = "{" if part[1] == "{" else f"{{{part[1]}}}"
            braced.append(f"{{{part[0]}}}{lower}{part[2:]}")
    return "\\frac".join(braced)


def _slash_as_fraction(text: str) -> str:
    try:
        upper, lower = (int(part) for part in text.split("/"))
    except ValueError:  # not two parts, or no integers
        return text
    return f"\\frac{{{upper}}}{{{lower}}}" if text == f"{upper}/{lower}" else text
