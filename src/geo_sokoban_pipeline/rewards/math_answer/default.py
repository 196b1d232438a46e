"""The default grader: safe rules first, algebra last.

The answer is the last box of what was said after the thoughts. Answer and label are brought to one spelling; equations
where the label is none, hedges and several values are refused; texts and exact numbers are compared; the rest
becomes a question to algebra, if both have the same letters. Units must agree where both sides have one; most labels
have none. No text is evaluated as Python.
"""

from __future__ import annotations

import re
import unicodedata
from dataclasses import dataclass
from functools import lru_cache

from geo_sokoban_pipeline.rewards.math_answer.exact_numbers import (
    NoNumberError,
    NoValueError,
    Surd,
    half_unit,
    read_number,
    within,
)
from geo_sokoban_pipeline.rewards.math_answer.verdict import ChainLink, Equivalence, Grade, Rule, Undecided
from geo_sokoban_pipeline.rewards.text import visible_text

LONGEST_ANSWER = 200  # characters within the box
LONGEST_LABEL = 1000

_Verdict = tuple[bool, Rule] | Equivalence


def examine_default(box: str, label: str, tolerance: float) -> Grade | Undecided:
    """Grade an answer against a label.

    Args:
        box: content of the last box of a response.
        label: ground truth, with or without a box; an empty one grants nothing.
        tolerance: largest difference that is granted where the label is a decimal; 0: labels are exact.
    """
    given = box.strip()
    truth = _label_form(label)
    if not truth:
        return Grade(False, "no_label", given)
    if not given:
        return Grade(False, "empty", given)
    if len(given) > LONGEST_ANSWER:
        return Grade(False, "too_long", given)
    try:
        answer = normalise(given)
    except MalformedError:
        return Grade(False, "malformed", given)
    verdict = _compare(answer, truth, tolerance)
    return Undecided(verdict, given) if isinstance(verdict, Equivalence) else Grade(*verdict, given)


@lru_cache(maxsize=8192)
def _label_form(label: str) -> str:
    """The normalised label; empty where there is none that could be compared."""
    inner = extract_answer(label) if "\\boxed" in label else label
    try:
        return normalise(inner or "") if len(label) <= LONGEST_LABEL else ""
    except MalformedError:
        return ""


def _compare(answer: str, truth: str, tolerance: float) -> _Verdict:
    if not answer:
        return False, "empty"
    if text_key(answer) == text_key(truth):
        return True, "string"
    pair = _reduce(answer, truth, tolerance)
    for rule in (_refuse_equation, _compare_texts, _refuse_hedge, _compare_numbers, _compare_formulas):
        verdict = rule(pair)
        is_granted = isinstance(verdict, tuple) and verdict[0]
        # A value is right only if all links of its chain hold, which algebra decides.
        if verdict is not None and not (is_granted and pair.links):
            return verdict
    return False, "string"


@dataclass(frozen=True)
class _Pair:
    """Answer and label, both normalised, without a name before an equals sign and without units that agree.

    Attributes:
        links: of the answer's chain, where numbers do not decide whether they hold.
        letters: whether the label holds letters that are no unit.
    """

    answer: str
    truth: str
    links: tuple[ChainLink, ...]
    letters: bool
    tolerance: float


def _reduce(answer: str, truth: str, tolerance: float) -> _Pair:
    value, links = value_of_chain(truth, letters=True)
    if not (links or _THING.fullmatch(value) or _is_other_equation(answer, truth, value)):
        truth = value
    letters = has_letters(strip_unit(truth, letters=True))
    links = ()
    if not is_relation(truth):
        answer, links = value_of_chain(answer, letters=letters)
    return _Pair(*_without_units(answer, truth, letters=letters), links, letters, tolerance)


def _is_other_equation(answer: str, truth: str, value: str) -> bool:
    """Whether an answer is an equation that says more than the value of the label's letter: `3t = y` for `y = 3t`.

    `x = 3` is one for `y = 3`; other names, such as `AB` or `Area`, may stand for any letter.
    """
    wanted = _NAMED.match(truth)
    if wanted is None or not is_relation(answer):
        return False
    if given := _NAMED.match(answer):
        return identifier(given) != identifier(wanted)
    rest, links = value_of_chain(answer, letters=True)
    return has_letters(value) and (bool(links) or is_relation(rest) or IDENTIFIER.fullmatch(rest) is not None)


def _without_units(answer: str, truth: str, *, letters: bool) -> tuple[str, str]:
    """Answer and label without their units, which must agree where both have one."""
    wanted = _find_unit(truth, letters=False)
    given = wanted and _find_unit(answer, letters=False)
    if wanted is None or given is None or "unit" in (given[0] + wanted[0]).lower():
        return strip_unit(answer, letters=letters), strip_unit(truth, letters=True)
    if _short_unit(given[0]) != _short_unit(wanted[0]):
        return answer, truth
    return answer[: given.start()].rstrip(), truth[: wanted.start()].rstrip()


def _refuse_equation(pair: _Pair) -> _Verdict | None:
    is_value = is_relation(pair.answer) == is_relation(pair.truth) and (not pair.links or _has_same_letters(pair))
    return None if is_value else (False, "equation")


def _compare_texts(pair: _Pair) -> _Verdict | None:
    is_same = text_key(pair.answer) == text_key(pair.truth) or _is_choice(pair.answer, pair.truth)
    return (True, "string") if is_same else None


def _is_choice(answer: str, label: str) -> bool:
    """Whether both name one of the choices A to E; a small letter in a label is a side or another number."""
    given, wanted = _CHOICE.fullmatch(answer), _CHOICE.fullmatch(label)
    return given is not None and wanted is not None and given[1].upper() == wanted[1]


def _refuse_hedge(pair: _Pair) -> _Verdict | None:
    return (False, "hedge") if is_hedge(pair.answer, pair.truth) else None


def _compare_numbers(pair: _Pair) -> _Verdict | None:
    """Verdict on numbers and on tuples of numbers."""
    try:
        wanted = _numbers(pair.truth)
    except NoValueError:  # a label that is no value is compared as a text
        return None
    try:
        got = None if wanted is None else _numbers(pair.answer)
    except NoValueError:
        return False, "numeric"
    if wanted is None or got is None:
        return None
    is_decimal = "." in pair.truth and not pair.letters and wanted[0] == got[0] == ""
    if pair.tolerance > 0 and is_decimal and got != wanted:
        return within(got[1][0], wanted[1][0], pair.tolerance), "tolerance"
    return got == wanted, "numeric"


def _compare_formulas(pair: _Pair) -> _Verdict | None:
    """A question to algebra, if both have the same letters."""
    answer, truth = pair.answer, pair.truth
    # Capitals side by side are names where both sides have some, else factors: `LW` is `L \cdot W`.
    if not (_SIDE_BY_SIDE.search(answer) and _SIDE_BY_SIDE.search(truth)):
        answer, truth = _SIDE_BY_SIDE.sub(r"{\1}", answer), _SIDE_BY_SIDE.sub(r"{\1}", truth)
    if is_formula(answer) and is_formula(truth) and _has_same_letters(pair):
        return Equivalence(answer, truth, pair.links)
    return (False, "equation") if pair.links else None


def _has_same_letters(pair: _Pair) -> bool:
    """Whether all that must be equal has the same letters, with their case, index and primes; roundings have none.

    Euler's number may be missing on one side, unless the label has no letter at all.
    """
    equal = [pair.answer, pair.truth, *(side for link in pair.links if link.is_exact for side in link[:2])]
    near = [side for link in pair.links if not link.is_exact for side in link[:2]]
    is_known = pair.letters or not has_letters(pair.answer)
    return is_known and len({names(side) - {"e"} for side in equal}) == 1 and all(names(side) <= {"e"} for side in near)


def _numbers(text: str) -> tuple[str, list[Surd]] | None:
    """Brackets, empty around a single number, and the numbers; None: something is no number of the grammar."""
    brackets, elements = split_tuple(text) or ("", [text])
    # A ratio is the number that it is; how many colons there may be is a matter of shape.
    quotients = (element.replace(":", "/") if element.count(":") == 1 else element for element in elements)
    try:
        return brackets, [read_number(quotient) for quotient in quotients]
    except NoNumberError:
        return None


_BOX = "\\boxed"
_OPENING = re.compile(r"\\boxed\s*\{")
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)  # an escaped brace is a character of the answer


def extract_answer(response: str) -> str | None:
    """Content of the last box behind the last `</think>`, or in the whole text where there is none.

    Args:
        response: text of the policy, without the environment's.

    Returns:
        None: there is no box, or the last one has no brace or is not closed.
    """
    text = visible_text(response)
    opening = _OPENING.match(text, text.rfind(_BOX)) if _BOX in text else None
    if opening is None:
        return None
    closing = matching_brace(text, opening.end() - 1)
    return None if closing is None else text[opening.end() : closing]


def matching_brace(text: str, opening: int) -> int | None:
    """Index of the brace that closes the one at `opening`; None: it is not closed."""
    depth = 0
    for found in _BRACE.finditer(text, opening):
        depth += {"{": 1, "}": -1}.get(found[0], 0)
        if depth == 0:
            return found.start()
    return None


# Shape: the kind of a normalised text, so that an answer that commits to nothing is refused before any algebra.

_MACRO = r"\\[A-Za-z]+"
# One letter at a time: two ways to split a word would be exponentially many for a sentence.
_GREEK = "alpha|beta|gamma|delta|epsilon|theta|lambda|mu|sigma|phi|omega"
_NAME = re.compile(
    rf"(?:[A-Za-z]|\\(?:angle|triangle|ray|{_GREEK}|sin|cos|tan|odot)"
    r"(?![A-Za-z])|\\(?:overline|bar)\s*\{[\w\s]+\}|(?<=\\angle) ?\d+|_(?:\{\w+\}|\w)|'|\s)+"
)
# One letter, its index and its primes.
IDENTIFIER = re.compile(
    rf"([A-Za-z]|\\(?:{_GREEK})(?![A-Za-z]))(?:\s*_\s*(?:\{{\s*(\w+)\s*\}}|([A-Za-z0-9])))?((?:\s*')*)"
)
# Names that a label may set equal: an angle, a figure, points, or one letter; `bh` is a product.
_THING = re.compile(
    rf"m?\s*\\(?:angle|triangle|ray|odot)(?![A-Za-z])[^=]*|[A-Z\d_{{}}'\s]*[A-Z][A-Z\d_{{}}'\s]*|{IDENTIFIER.pattern}"
)
_NAMED = re.compile(rf"{IDENTIFIER.pattern}\s*=")
_WORD_OR_IDENTIFIER = re.compile(rf"\\(?!(?:{_GREEK})(?![A-Za-z]))[A-Za-z]+|{IDENTIFIER.pattern}")
_CHOICE = re.compile(r"\(?([A-Ea-e])\)?")
# Capitals are names of points and lines.
_NO_NAME = re.compile(r"(?<![A-Za-z\\])(?:or|and|either|neither|nor|not|no|never)(?![A-Za-z])")
_EQUALS = re.compile(r"(?<![<>!])=|\\approx(?![A-Za-z])")
_MARKS = (
    re.compile(r"(?<![A-Za-z\\])(?:or|and|either|between|to)(?![A-Za-z])", re.IGNORECASE),
    re.compile(r"\\(?:pm|mp|lor|land|vee|wedge|cup|cap)(?![A-Za-z])"),
    re.compile(r":"),
    re.compile(r"[|\[\]]|\\[{}|]"),
    re.compile(r"(?<!_)\d (?=\d)"),
)
_RELATION = re.compile(r"[<>]|\\(?:leq|geq|neq)(?![A-Za-z])")
_MIXED = re.compile(r"(?<![\w.^])(\d+) (\d+)/(\d+)(?!\d)")  # 7 3/4
_ROOT_DEGREE = re.compile(r"(?<=\\sqrt)\s*\[\w+\]")
_SEPARATOR = re.compile(r"[,;]")
_TOKEN = re.compile(
    r"\s+|\d+(?:\.\d*)?|\.\d+|[-+*/^(){}=<>,:|\[\]]|\\[{}]|(?<=[A-Za-z])_|(?<=[A-Za-z'])'"
    r"|\\(?:frac|sqrt|cdot|times|div|pi|infty|leq|geq|neq|pm|sin|cos|tan|cot|sec|csc|arcsin|arccos|arctan|log|ln"
    rf"|{_GREEK}|cup|cap|in)(?![A-Za-z])"
    r"|(?<![A-Za-z\\])[A-Za-z]{1,3}(?![A-Za-z])"
)
_POINT = r"[A-Z](?:\s|'|_\s*(?:\{\w+\}|\w))*"
_SIDE_BY_SIDE = re.compile(rf"({_POINT})(?=[A-Z])")
_FIGURE = re.compile(rf"(?:{_POINT}){{3}}")  # the order of its points counts
_PLAIN_EXPONENT = r"\s*(?:\d++|[A-Za-z]|\{[^{}^]*\})(?!\s*\^)"
_HUGE = re.compile(rf"\d{{31}}|\^\s*[{{(]?\s*-?\s*\d{{3}}|\^(?!{_PLAIN_EXPONENT})[^+\-*/=,<>]*\^|\*\s*\*")


def value_of_chain(text: str, *, letters: bool) -> tuple[str, tuple[ChainLink, ...]]:
    """The value behind a name and signs of equality, such as `2\\sqrt{13}` of `x = 2\\sqrt{13} \\approx 7.21`.

    The first value counts. Each other one must equal the one before it, or one of the two must be the other, rounded.

    Args:
        letters: as for `strip_unit`.

    Returns:
        The value, and the links that numbers do not decide. The text as it is where it is no chain, or a link is false.
    """
    signs = [found[0] for found in _EQUALS.finditer(text)]
    if not signs or _RELATION.search(text):
        return text, ()
    first, *others = (part.strip() for part in _EQUALS.split(text))
    while signs and (_is_name(first) if first else signs[0] != "="):
        first, *others = others
        del signs[0]
    parts = [strip_unit(part, letters=letters) for part in (first, *others)]
    links = [ChainLink(left, right, sign == "=") for left, right, sign in zip(parts, parts[1:], signs, strict=False)]
    found = [_holds(link) for link in links]
    undecided = tuple(link for link, holds in zip(links, found, strict=True) if holds is None)
    is_chain = all(map(_is_balanced, parts)) and False not in found
    is_chain &= all(is_formula(side) and not _SEPARATOR.search(side) for link in undecided for side in link[:2])
    return (first, undecided) if is_chain else (text, ())


def _is_name(side: str) -> bool:
    return _NAME.fullmatch(side) is not None and _NO_NAME.search(side) is None


def _is_balanced(side: str) -> bool:
    """Whether a side of a sign is something, with as many brackets opened as closed."""
    return bool(side) and sum(map(side.count, "([{")) == sum(map(side.count, ")]}"))


def _holds(link: ChainLink) -> bool | None:
    """Whether two numbers are equal, or one is the other to the digits written; None: one is no exact number."""
    if text_key(link.left) == text_key(link.right):
        return False  # it says nothing, as `13=13`
    try:
        left, right = read_number(link.left), read_number(link.right)
    except NoNumberError:
        return None
    except NoValueError:
        return False
    if link.is_exact:
        return left == right
    halves = [half for side in link[:2] if (half := half_unit(side)) is not None]
    if not halves:
        return False
    # Floats do not tell irrational numbers apart that differ by less.
    is_fine = max(halves) < 1e-9 * max(1.0, abs(float(left)))
    return None if is_fine and (left + -right).as_rational() is None else within(left, right, max(halves))


def is_relation(text: str) -> bool:
    """Whether a text says that something equals, approximates, exceeds or differs from something."""
    return _EQUALS.search(text) is not None or _RELATION.search(text) is not None


def is_hedge(answer: str, label: str) -> bool:
    """Whether an answer names a choice, a range or another number of values, and the label does not."""
    answer, label = (_MIXED.sub(_without_fraction, _ROOT_DEGREE.sub("", text)) for text in (answer, label))
    if len(_SEPARATOR.findall(answer)) != len(_SEPARATOR.findall(label)):
        return True
    if _SEPARATOR.search(label) and (split_tuple(answer) is None) != (split_tuple(label) is None):
        return True
    return any(mark.search(answer) and not mark.search(label) for mark in _MARKS)


def _without_fraction(mixed: re.Match[str]) -> str:
    return mixed[1] if int(mixed[2]) < int(mixed[3]) else mixed[0]


def is_formula(text: str) -> bool:
    """Whether a text is built from what labels are built from, in sizes that algebra can handle.

    Words, names of figures, unknown macros, factorials, sums, integrals and huge or stacked powers are not.
    """
    at = 0
    while at < len(text):
        found = _TOKEN.match(text, at)
        if found is None:
            return False
        at = found.end()
    return bool(text) and _HUGE.search(text) is None and _FIGURE.search(text) is None


def names(text: str) -> frozenset[str]:
    """Letters of a formula, each with its index and primes; letters of macros such as `\\frac` are none."""
    return frozenset(identifier(found) for found in _WORD_OR_IDENTIFIER.finditer(text) if found[1])


def identifier(found: re.Match[str]) -> str:
    """One spelling of what `IDENTIFIER` has found."""
    index = found[2] or found[3]
    return found[1] + (f"_{index}" if index else "") + "".join(found[4].split())


def has_letters(text: str) -> bool:
    """Whether letters that are no macros are in a text."""
    return re.search("[A-Za-z]", re.sub(_MACRO, "", text)) is not None


def split_tuple(text: str) -> tuple[str, list[str]] | None:
    """Brackets and elements of a text such as `(1, 2)`; None: it is no tuple."""
    inner = text[1:-1]
    brackets = text[:1] + text[-1:]
    if brackets not in ("()", "[]", "(]", "[)") or "," not in inner or any(bracket in inner for bracket in "()[]"):
        return None
    return brackets, [element.strip() for element in inner.split(",")]


# Spelling: one for what means the same.

_CHARACTERS = {
    **dict.fromkeys("−‐‑‒–—﹣", "-"),
    **dict.fromkeys("·⋅∙•∗", r"\cdot "),
    **dict.fromkeys("×✕", r"\times "),
    **dict.fromkeys("÷∕⁄", "/"),
    **dict.fromkeys("°˚º∘", r"^\circ "),
    **dict.fromkeys("∶：", ":"),
    **{"π": r"\pi ", "√": r"\sqrt ", "∞": r"\infty ", "±": r"\pm ", "∓": r"\mp ", "∠": r"\angle ", "∡": r"\angle "},
    **{
        **dict.fromkeys("≤⩽", r"\leq "),
        **dict.fromkeys("≥⩾", r"\geq "),
        "≠": r"\neq ",
        "≈": r"\approx ",
        "≅": r"\cong ",
        "∼": r"\sim ",
        "△": r"\triangle ",
    },
    **{"⊥": r"\perp ", "∥": r"\parallel ", "％": r"\%", "′": "'", "’": "'", "″": "''"},
    **{"α": r"\alpha ", "β": r"\beta ", "γ": r"\gamma ", "δ": r"\delta ", "ε": r"\epsilon ", "θ": r"\theta "},
    **{"λ": r"\lambda ", "μ": r"\mu ", "σ": r"\sigma ", "φ": r"\phi ", "ω": r"\omega "},
}
_SCRIPT = re.compile("[⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻ⁿ]+|[₀₁₂₃₄₅₆₇₈₉ₐₑₒₓₕₖₗₘₙₚₛₜ]+")
_VULGAR = re.compile("[¼-¾⅐-⅞]")
_GROUPED_DIGITS = re.compile(r"(?<=\d)(?:\\,|\\!|,\\!|\{,\}(?:\\!)?)(?=\d{3}(?!\d))")
_THOUSANDS = re.compile(r"(?<![\d,.])\d{1,3}(?:,\d{3})+(?![\d,])")
_LINES = "overline|underline|overleftrightarrow|wide(?:hat|paren|tilde)|over(?:arc|paren)"
_POINTS = rf"\{{\s*{_POINT}[A-Z]"  # elsewhere, a line makes a mean or the conjugate
_REWRITES: tuple[tuple[re.Pattern[str], str], ...] = tuple(
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"\\\\(?=[A-Za-z%])", r"\\"),  # escaped once too often
        (r"\\\\", " "),
        (r"\\[()\[\]]|\\?\$", ""),
        (r"\\!", ""),
        (r"\\[,;:> ]|~|\\(?:quad|qquad|thinspace|displaystyle|textstyle|limits|rm|bf|it)(?![A-Za-z])", " "),
        (r"\\(?:left|right)(?![A-Za-z])\.?|\\[bB]igg?[lrm]?(?![A-Za-z])", ""),
        (r"\\[dtc]frac(?![A-Za-z])", r"\\frac"),
        (r"\\lt(?![A-Za-z])", "<"),
        (r"\\gt(?![A-Za-z])", ">"),
        (r"\\le(?:qslant|qq)?(?![A-Za-z])", r"\\leq"),
        (r"\\ge(?:qslant|qq)?(?![A-Za-z])", r"\\geq"),
        (r"\\ne(?![A-Za-z])", r"\\neq"),
        (r"\\(?:simeq|doteq|approxeq|thickapprox)(?![A-Za-z])|\\sim(?=\s*[\d.])", r"\\approx"),
        (rf"(?<=[\d.])\s*\\(?:{_LINES})\s*(?=\{{\s*\d)", r"\\repeating"),  # 0.3 is not 0.333…
        (r"\\overrightarrow(?![A-Za-z])", r"\\ray\\overline"),
        (r"\\(?:measuredangle|sphericalangle)(?![A-Za-z])", r"\\angle"),
        (r"(?<![A-Za-z\\])sqrt(?=\s*[({\d])", r"\\sqrt"),
        (r"(?<![A-Za-z\\])(pi|(?:arc)?(?:sin|cos|tan)|cot|ln|log)(?![A-Za-z])", r"\\\1"),
        (r"\\prime(?![A-Za-z])", "'"),
        (r"\^\s*(?:\{((?:\s*')+)\s*\}|('))", r"\1\2"),
    )
)
_PERCENT = re.compile(
    r"(?:(?<=[\d.)}])|(?<=\\pi)|(?<=[A-Za-z])(?<![A-Za-z\\][A-Za-z]))\s*per ?cent(?![A-Za-z])", re.IGNORECASE
)
_DEGREES = re.compile(
    r"\^\s*(?:\{\s*\\(?:circ|degree)\s*\}|\\(?:circ|degree)(?![A-Za-z]))|\\(?:degrees?|deg|textdegree)(?![A-Za-z])"
)
_FUNCTION = re.compile(r"\\(?:sin|cos|tan|cot|sec|csc)(?![A-Za-z])")
_WRAPPER = re.compile(
    r"\\(?:(?:text(?:bf|rm|it|sf|tt|normal|up|sc)?|math(?:rm|bf|it|sf|tt|cal|normal)|operatorname\*?|boldsymbol|bm"
    rf"|[mh]box|underline|ensuremath|boxed)\s*(?=\{{)|(?:{_LINES})\s*(?={_POINTS}))"
)
# A capital may begin a word. Capitals name a figure, and three letters are a product, unless they are one of these.
_WORD = re.compile(
    r"(?<![\\A-Za-z])(?:[A-Z][a-z]{3,}|(?i:yes|no|not|none|all|the|true|false|ok|up|down|left|right))(?![A-Za-z])"
)
_SMALL_GROUP = re.compile(r"(?<=[^A-Za-z])\{([A-Za-z0-9])\}(?!\s*\d)|(?<=[A-Za-z])\{(\d)\}(?!\s*\d)")


class MalformedError(ValueError):
    """A text with characters that no answer has."""


def normalise(text: str) -> str:
    """LaTeX of an answer or label in one spelling.

    Raises:
        MalformedError: it holds control characters, or invisible ones between others.
    """
    if not text.isascii():
        text = _as_latex(text)
    if not all(c.isprintable() or c in "\t\n\r" for c in text):
        raise MalformedError("control or invisible characters")
    text = _GROUPED_DIGITS.sub("", text).replace("{,}", ",")
    for pattern, replacement in _REWRITES:
        text = pattern.sub(replacement, text)
    text = _PERCENT.sub(r"\\%", _unwrap(text))
    if not _FUNCTION.search(text):  # the sine of 30 is not that of 30°
        text = _DEGREES.sub(" ", text)
    text = " ".join(text.split())
    if text[:1] not in "([":
        text = _THOUSANDS.sub(lambda found: found[0].replace(",", ""), text)
    return text[:-1].rstrip() if text.endswith(".") else text


def text_key(normalised: str) -> str:
    """Form in which normalised texts are compared: spaces only between digits, words in lower case, few braces."""
    text = _WORD.sub(lambda found: found[0].lower(), normalised.replace("\\ray", ""))
    text = re.sub(r"(?<=\d) (?=\d)", "\0", text).replace(" ", "").replace("\0", " ")
    return _SMALL_GROUP.sub(r"\1\2", text)


def _as_latex(text: str) -> str:
    """ASCII where a character has a meaning in an answer; others stay as they are."""
    text = text.strip("\u200b\u200c\u200d\u2060\ufeff")
    text = _SCRIPT.sub(_as_script, text)
    text = _VULGAR.sub(
        lambda found: "\\frac{{{}}}{{{}}}".format(*unicodedata.normalize("NFKC", found[0]).split("⁄")), text
    )
    return "".join(c if c.isascii() else _as_ascii(c) for c in text)


def _as_script(found: re.Match[str]) -> str:
    sign = "^" if "<super>" in unicodedata.decomposition(found[0][0]) else "_"
    return f"{sign}{{{unicodedata.normalize('NFKC', found[0])}}}".replace("−", "-")


def _as_ascii(character: str) -> str:
    if character in _CHARACTERS:
        return _CHARACTERS[character]
    if character.isspace():
        return " "
    if character.isdecimal():
        return str(unicodedata.decimal(character))
    plain = unicodedata.normalize("NFKC", character)
    return plain if len(plain) == 1 and plain.isascii() else character


def _unwrap(text: str) -> str:
    """The text without fonts, text blocks and lines above points; their content stays, spaced."""
    while found := _WRAPPER.search(text):
        closing = matching_brace(text, found.end())
        if closing is None:
            return text
        text = f"{text[: found.start()]} {text[found.end() + 1 : closing]} {text[closing + 1 :]}"
    return text


# Units: words that may stand behind a number without being part of it. One letter is a unit only where the label
# holds no letter, since in algebra it is a factor.

_WORDS = {  # and their short forms
    **{"degree": "deg", "radian": "rad", "unit": "unit", "meter": "m", "metre": "m", "inche": "in", "inch": "in"},
    **{"feet": "ft", "foot": "ft", "yard": "yd", "mile": "mi", "gram": "g", "pound": "lb", "hour": "h"},
    **{"minute": "min", "second": "s", "dollar": "$", "cent": "cent", "liter": "L", "litre": "L", "gallon": "gal"},
}
_MULTIPLES = {"centi": "c", "milli": "m", "kilo": "k", "deci": "d"}
_ABBREVIATIONS = "deg|rad|[cmkd]m|in|ft|yds?|mi|mph|kg|lbs?|hrs?|mins?|secs?"
_SHORT = "[msghL]"
_PREFIX = r"(?:(?:square|sq\.?|cubic|cu\.?)\s*)?"
_POWER = r"(?:\s*(?:\^\s*\{?\s*[23]\s*\}?|(?i:squared|cubed)))?"


def _pattern(words: str, behind: str = r"(?:(?<=[\d.)}%])|(?<=\\pi))") -> re.Pattern[str]:
    # A unit follows a number: a digit, a closed group, a percent sign or π.
    unit = rf"(?i:{_PREFIX})(?:{words})\.?{_POWER}"
    return re.compile(rf"{behind}\s*{unit}(?:\s*(?:/|(?i:per))\s*{unit})?$")


_WORD_OF_UNIT = f"(?:{'|'.join(_MULTIPLES)})?(?:{'|'.join(_WORDS)})s?"
_ANY = _pattern(f"(?i:{_WORD_OF_UNIT}|{_ABBREVIATIONS}|{_SHORT})")
_CLEAR = f"(?i:{_WORD_OF_UNIT})|{_ABBREVIATIONS}"  # capitals such as `FT` name a segment
_UNMISTAKABLE = _pattern(_CLEAR)
_BEHIND_LETTER = _pattern(_CLEAR, r"(?<=[A-Za-z'] )")
_LONG = {"squared": "2", "cubed": "3", "per": "/", **_MULTIPLES, **_WORDS}
_LONG_ABBREVIATIONS = {
    **{"mph": "mi/h", "yds": "yd", "lbs": "lb", "mins": "min"},
    **{"hrs": "h", "hr": "h", "secs": "s", "sec": "s"},
}
_LONGER = re.compile(rf"(?i:({'|'.join(_LONG)})s?)|{'|'.join(_LONG_ABBREVIATIONS)}")


def strip_unit(text: str, *, letters: bool) -> str:
    """A normalised text without the unit at its end.

    Args:
        letters: whether the label holds letters that are factors, so that a single one is no unit.
    """
    found = _find_unit(text, letters=letters)
    return text if found is None else text[: found.start()].rstrip()


def _find_unit(text: str, *, letters: bool) -> re.Match[str] | None:
    if (found := (_UNMISTAKABLE if letters else _ANY).search(text)) is not None:
        return found
    found = _BEHIND_LETTER.search(text)
    # The last word of others, as in `square feet`, is no unit.
    return found if found is not None and is_formula(text[: found.start()]) else None


def _short_unit(text: str) -> str:
    """One spelling of a unit: `cm2` for `square centimeters` and `cm^2`."""
    text = _LONGER.sub(lambda found: _LONG[found[1].lower()] if found[1] else _LONG_ABBREVIATIONS[found[0]], text)
    text = re.sub(r"[\s.{}^]", "", text)
    return re.sub(r"(?i)(?:square|sq)([^/]*)", r"\g<1>2", re.sub(r"(?i)(?:cubic|cu)([^/]*)", r"\g<1>3", text))
