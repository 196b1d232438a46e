"""Normalisation: one spelling for what means the same.

Unicode characters become LaTeX, layout and fonts disappear, degrees and the marks of formulas with them. What could
change a value is never done: digits that a space separates stay apart, and no part of an answer is dropped but units
(`units`) and the name in front of an equals sign (`shape`).
"""

from __future__ import annotations

import re
import unicodedata

from geo_sokoban_pipeline.rewards.math_answer.extraction import matching_brace

_CHARACTERS = {
    **dict.fromkeys("−‐‑‒–—﹣", "-"),
    **dict.fromkeys("·⋅∙•∗", r"\cdot "),
    **dict.fromkeys("×✕", r"\times "),
    **dict.fromkeys("÷∕⁄", "/"),
    **dict.fromkeys("°˚º∘", r"^\circ "),
    **dict.fromkeys("∶：", ":"),
    **{"π": r"\pi ", "√": r"\sqrt ", "∞": r"\infty ", "±": r"\pm ", "∓": r"\mp ", "∠": r"\angle ", "∡": r"\angle "},
    **{
        "≤": r"\leq ",
        "≥": r"\geq ",
        "≠": r"\neq ",
        "≈": r"\approx ",
        "≅": r"\cong ",
        "∼": r"\sim ",
        "△": r"\triangle ",
    },
    **{"⊥": r"\perp ", "∥": r"\parallel ", "％": r"\%", "′": "'", "’": "'"},
    **{"α": r"\alpha ", "β": r"\beta ", "γ": r"\gamma ", "δ": r"\delta ", "ε": r"\epsilon ", "θ": r"\theta "},
    **{"λ": r"\lambda ", "μ": r"\mu ", "σ": r"\sigma ", "φ": r"\phi ", "ω": r"\omega "},
}
_SUPERSCRIPTS = {unicodedata.normalize("NFKC", c): c for c in "⁰¹²³⁴⁵⁶⁷⁸⁹⁻"}
_SUPERSCRIPT_RUN = re.compile(f"[{''.join(_SUPERSCRIPTS.values())}]+")
_VULGAR = re.compile("[¼-¾⅐-⅞]")
_GROUPED_DIGITS = re.compile(r"(?<=\d)(?:\\,|\\!|,\\!|\{,\}(?:\\!)?)(?=\d{3}(?!\d))")
_THOUSANDS = re.compile(r"(?<![\d,.])\d{1,3}(?:,\d{3})+(?![\d,])")
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
        (r"\\le(?![A-Za-z])", r"\\leq"),
        (r"\\ge(?![A-Za-z])", r"\\geq"),
        (r"\\(?:measuredangle|sphericalangle)(?![A-Za-z])", r"\\angle"),
        (r"(?<![A-Za-z\\])sqrt(?=\s*[({\d])", r"\\sqrt"),
        (r"(?<![A-Za-z\\])pi(?![A-Za-z])", r"\\pi"),
    )
)
_DEGREES = re.compile(
    r"\^\s*(?:\{\s*\\(?:circ|degree)\s*\}|\\(?:circ|degree)(?![A-Za-z]))|\\(?:degrees?|deg|textdegree)(?![A-Za-z])"
)
_FUNCTION = re.compile(r"\\(?:sin|cos|tan|cot|sec|csc)(?![A-Za-z])")
_WRAPPER = re.compile(
    r"\\(?:text(?:bf|rm|it|sf|tt|normal|up|sc)?|math(?:rm|bf|it|sf|tt|cal|normal)|operatorname\*?|boldsymbol|bm|[mh]box"
    r"|overline|underline|over(?:left)?rightarrow|wide(?:hat|paren|tilde)|over(?:arc|paren)|ensuremath|boxed)\s*(?=\{)"
)
_LONG_WORD = re.compile(r"(?<![\\A-Za-z])[A-Za-z]{3,}")
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
    text = _unwrap(text)
    if not _FUNCTION.search(text):  # the sine of 30 is not that of 30°
        text = _DEGREES.sub(" ", text)
    text = " ".join(text.split())
    if text[:1] not in "([":
        text = _THOUSANDS.sub(lambda found: found[0].replace(",", ""), text)
    return text[:-1].rstrip() if text.endswith(".") else text


def text_key(normalised: str) -> str:
    """Form in which normalised texts are compared: spaces only between digits, words in lower case, few braces."""
    text = _LONG_WORD.sub(lambda found: found[0].lower(), normalised)
    text = re.sub(r"(?<=\d) (?=\d)", "\0", text).replace(" ", "").replace("\0", " ")
    return _SMALL_GROUP.sub(r"\1\2", text)


def _as_latex(text: str) -> str:
    """ASCII where a character has a meaning in an answer; others stay as they are."""
    text = text.strip("\u200b\u200c\u200d\u2060\ufeff")
    text = _SUPERSCRIPT_RUN.sub(lambda found: f"^{{{unicodedata.normalize('NFKC', found[0])}}}".replace("−", "-"), text)
    text = _VULGAR.sub(
        lambda found: "\\frac{{{}}}{{{}}}".format(*unicodedata.normalize("NFKC", found[0]).split("⁄")), text
    )
    return "".join(c if c.isascii() else _as_ascii(c) for c in text)


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
    """The text without fonts, text blocks and lines above letters; their content stays, spaced."""
    while found := _WRAPPER.search(text):
        closing = matching_brace(text, found.end())
        if closing is None:
            return text
        text = f"{text[: found.start()]} {text[found.end() + 1 : closing]} {text[closing + 1 :]}"
    return text
