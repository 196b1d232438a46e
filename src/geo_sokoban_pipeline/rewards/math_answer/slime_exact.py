"""Parity with the original math checker (`slime_exact`), with the same behind thoughts (`deepscaler`) and with its
historic form for geometry (`geo3k`), rule for rule.

Nothing here is improved: apparent faults (a short left side that vanishes, everything after a spaced text macro) is
how the original decides, and the `default` grader is where such answers are refused. No answer is evaluated as Python.
"""

from __future__ import annotations

import ast
import operator
import re
import unicodedata
from collections.abc import Callable
from functools import cache, partial
from typing import Any

from geo_sokoban_pipeline.rewards.math_answer.verdict import Differences, Grade, Undecided

_BOX = "\\boxed"
_THINK_END = "</think>"
_RESPONSE = "###Response"


def examine_slime(box: str, label: str, tolerance: float) -> Grade | Undecided:
    """Grade as the original does: equal as strings, or as elements of equal form whose difference vanishes.

    Args:
        box: content of the last box of a response.
        label: ground truth, with or without a box.
        tolerance: must be 0; the original has none.
    """
    expected = boxed_answer(label) if _BOX in label else label
    if not expected:
        return Grade(False, "no_label", box)
    if string_form(box) == string_form(expected):
        return Grade(True, "string", box)
    return _compare(box, expected, None)


def examine_geo3k(box: str, label: str, tolerance: float) -> Grade | Undecided:
    """Grade as the historic geometry checker does: no string form, and differences up to a tolerance vanish.

    Args:
        box: content of the last box of a response.
        label: ground truth without a box.
        tolerance: largest absolute difference that counts as zero; integers and plain fractions must agree exactly.
    """
    return _compare(box, label, tolerance) if label else Grade(False, "no_label", box)


def boxed_answer(text: str) -> str | None:
    """Content of the last box up to its matching brace; None: there is none, or it is not closed or not braced."""
    start = text.rfind(_BOX)
    if start < 0 or not text.startswith("{", start + len(_BOX)):
        return None
    start += len(_BOX)
    depth = 0
    for at in range(start, len(text)):
        depth += {"{": 1, "}": -1}.get(text[at], 0)
        if depth == 0:
            return text[start + 1 : at]
    return None


def behind_thoughts(text: str) -> str | None:
    """Content of the last box behind the last `</think>`, or else behind the first `###Response`; None: neither, or no
    box there.
    """
    if _THINK_END in text:
        return boxed_answer(text.rpartition(_THINK_END)[2])
    return boxed_answer(text.split(_RESPONSE)[1]) if _RESPONSE in text else None


def _compare(given: str, expected: str, tolerance: float | None) -> Grade | Undecided:
    label, answer = symbolic_form(expected), symbolic_form(given)
    if label == answer:
        return Grade(True, "string", given)
    differences = _differences(label, answer) if answer else None
    if differences is None or not all(is_evaluable(difference) for difference in differences):
        return Grade(False, "form", given)
    return Undecided(Differences(tuple(differences), tolerance), given) if differences else Grade(True, "form", given)


def _differences(label: str, answer: str) -> list[str] | None:
    """Differences that must vanish, element by element; None: the forms differ, or two plain fractions do."""
    labels, answers = split_elements(label), split_elements(answer)
    other_brackets = len(labels) > 1 and (label[0] != answer[0] or label[-1] != answer[-1])
    if other_brackets or len(labels) != len(answers):
        return None
    differences = []
    for wanted, got in zip(labels, answers, strict=True):
        if is_fraction(wanted) and is_fraction(got):
            if wanted != got:
                return None
        elif is_integer(wanted) != is_integer(got):
            return None
        else:
            differences.append(f"({wanted})-({got})")
    return differences


# The two normal forms: as a string, and as elements for symbolic algebra.

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


# LaTeX to plain text: symbols become characters, layout disappears.

_DEEPEST = 60  # groups and arguments within each other; the original gives up as well, on a recursion error

_SYMBOLS = r"""
    alpha=α beta=β gamma=γ delta=δ epsilon=ϵ zeta=ζ eta=η theta=θ iota=ι kappa=κ lambda=λ mu=μ nu=ν xi=ξ omicron=ο
    pi=π rho=ρ sigma=σ tau=τ upsilon=υ phi=ϕ chi=χ psi=ψ omega=ω varepsilon=ε vartheta=ϑ varpi=ϖ varrho=ϱ varsigma=ς
    varphi=φ Gamma=Γ Delta=Δ Theta=Θ Lambda=Λ Xi=Ξ Pi=Π Sigma=Σ Upsilon=Υ Phi=Φ Psi=Ψ Omega=Ω times=× cdot=· div=÷
    pm=± mp=∓ ast=∗ star=⋆ circ=∘ bullet=∙ oplus=⊕ otimes=⊗ odot=⊙ le=≤ leq=≤ ge=≥ geq=≥ leqslant=⩽ geqslant=⩾ ll=≪
    gg=≫ neq=≠ approx=≈ equiv=≡ sim=∼ simeq=≃ cong=≅ propto=∝ angle=∠ measuredangle=∡ sphericalangle=∢ rightangle=∟
    perp=⊥ parallel=∥ nparallel=∦ square=□ bigtriangleup=△ vartriangle=▵ therefore=∴ because=∵ infty=∞ partial=∂
    nabla=∇ ell=ℓ prime=' surd=√ emptyset=∅ varnothing=∅ cup=∪ cap=∩ in=∈ notin=∉ ni=∋ subset=⊂ subseteq=⊆ supset=⊃
    supseteq=⊇ setminus=∖ forall=∀ exists=∃ wedge=∧ vee=∨ lnot=¬ to=→ rightarrow=→ leftarrow=← longrightarrow=⟶
    leftrightarrow=↔ Rightarrow=⇒ Leftarrow=⇐ Leftrightarrow=⇔ mapsto=↦ ldots=… dots=… cdots=⋯ vdots=⋮ sum=∑ prod=∏
    int=∫ mid=| vert=| lvert=| rvert=| Vert=‖ langle=⟨ rangle=⟩ lfloor=⌊ rfloor=⌋ lceil=⌈ rceil=⌉ lbrace={ rbrace=}
    backslash=\ textbackslash=\ textdegree=° textpm=± dag=† ss=ß sin=sin cos=cos tan=tan arcsin=arcsin arccos=arccos
    arctan=arctan sinh=sinh cosh=cosh tanh=tanh ln=ln log=log exp=exp max=max min=min sup=sup inf=inf lim=lim
"""
_TEXTS = {
    **dict(symbol.split("=") for symbol in _SYMBOLS.split()),
    **dict.fromkeys((",", ";", ":", " ", "\n"), " "),
    **{character: character for character in "{}$%&#_"},
    **{"\\": "\n", "-": "\xad", "quad": "  ", "qquad": "    "},
}
_FONTS = {"mathbf": "BOLD", "mathit": "ITALIC", "mathsf": "SANS-SERIF", "mathtt": "MONOSPACE"}
_FONTS |= {"mathbb": "DOUBLE-STRUCK", "mathcal": "SCRIPT", "mathscr": "SCRIPT", "mathfrak": "FRAKTUR"}
_ACCENTS = {"hat": "\u0302", "bar": "\u0305", "vec": "\u20d7", "dot": "\u0307", "ddot": "\u0308", "tilde": "\u0303"}
_ACCENTS |= {"not": "\u0338", "check": "\u030c", "breve": "\u0306", "acute": "\u0301", "grave": "\u0300"}
_PLAIN = """
    text textrm textit textbf textsc textsl emph mathrm overline underline widehat widetilde wideparen overrightarrow
    overleftarrow overleftrightarrow overbrace underbrace ensuremath
"""
_DROPPED = "mbox textup vphantom hspace label"
_MATRICES = ("pmatrix", "bmatrix", "smallmatrix", "array")
_LIGATURES = (("---", "—"), ("--", "–"), ("``", "“"), ("''", "”"))
_MACRO = re.compile(r"\\([a-zA-Z]+|.)\s*", re.DOTALL)
_ROOT_DEGREE = re.compile(r"\s*\[[^\]]*\]")
_BRACED_NAME = re.compile(r"\s*\{([a-zA-Z]+\*?)\}")


class UnreadableError(ValueError):
    """A text that the rules of the original cannot take apart."""


def latex_to_text(latex: str) -> str:
    """Plain text of a LaTeX formula.

    Raises:
        UnreadableError: groups are nested too deeply, or an argument is missing.
    """
    return _Reader(latex).read_until(None)


class _Reader:
    """A position in a formula, moved on by everything that reads from it."""

    def __init__(self, latex: str) -> None:
        self.latex = latex
        self.at = 0
        self.depth = 0

    def read_until(self, closing: str | None) -> str:
        """Text up to a closing brace or `\\end`, which is read too; None: up to the end of the formula."""
        self._descend()
        parts: list[str] = []
        while self.at < len(self.latex):
            if closing == "}" and self.latex[self.at] == "}":
                self.at += 1
                break
            if closing == "\\end" and self.latex.startswith("\\end", self.at):
                self.at += len("\\end")
                self._skip(_BRACED_NAME)
                break
            parts.append(self._read_one())
        self.depth -= 1
        return "".join(parts)

    def _read_one(self) -> str:
        """Text of the next macro, group, ligature or character."""
        character = self.latex[self.at]
        if character == "\\":
            return self._read_macro()
        for ligature, text in _LIGATURES:
            if self.latex.startswith(ligature, self.at):
                self.at += len(ligature)
                return text
        self.at += 1
        if character == "{":
            return self.read_until("}")
        return {"}": "", "$": "", "~": "\xa0", "&": "   "}.get(character, character)

    def _read_macro(self) -> str:
        found = _MACRO.match(self.latex, self.at)
        if found is None:  # a backslash at the very end
            self.at += 1
            return ""
        name = found[1]
        self.at = found.end() if name.isalpha() else found.start() + 1 + len(name)
        if name in _TEXTS:
            return _TEXTS[name]
        if name in ("frac", "nicefrac"):
            upper = self._read_argument()
            return f"{upper}/{self._read_argument()}"
        if name == "begin":
            return self._read_environment()
        if name == "sqrt":
            self._skip(_ROOT_DEGREE)
        elif self.at >= len(self.latex):
            return ""
        return _ONE_ARGUMENT[name](self._read_argument()) if name in _ONE_ARGUMENT else ""

    def _read_argument(self) -> str:
        self._skip(re.compile(r"\s+"))
        if self.at >= len(self.latex) or self.latex[self.at] == "}":
            raise UnreadableError("an argument is missing")
        self._descend()
        argument = self._read_one()
        self.depth -= 1
        return argument

    def _read_environment(self) -> str:
        found = _BRACED_NAME.match(self.latex, self.at)
        if found is None:
            raise UnreadableError("an environment without a name")
        self.at = found.end()
        if found[1] == "array":
            self._read_argument()
        body = self.read_until("\\end")
        if found[1] not in _MATRICES:
            return body
        rows = (" ".join(cell.strip() for cell in row.split("   ")) for row in body.strip().split("\n"))
        return f"[ {'; '.join(row.strip() for row in rows)} ]"

    def _descend(self) -> None:
        self.depth += 1
        if self.depth > _DEEPEST:
            raise UnreadableError("groups are nested too deeply")

    def _skip(self, pattern: re.Pattern[str]) -> None:
        if found := pattern.match(self.latex, self.at):
            self.at = found.end()


def _in_font(font: str, text: str) -> str:
    """A text with its Latin letters in one of the alphabets of formulas."""
    return "".join(_letter_in_font(font, c) if c.isascii() and c.isalpha() else c for c in text)


def _letter_in_font(font: str, letter: str) -> str:
    case = "CAPITAL" if letter.isupper() else "SMALL"
    for name in (f"MATHEMATICAL {font} {case} {letter.upper()}", f"{font} {case} {letter.upper()}"):
        try:
            return unicodedata.lookup(name)
        except KeyError:
            continue
    return "\N{PLANCK CONSTANT}" if (font, letter) == ("ITALIC", "h") else letter


def _with_accent(accent: str, text: str) -> str:
    return "".join(unicodedata.normalize("NFC", character + accent) for character in text)


_ONE_ARGUMENT: dict[str, Callable[[str], str]] = {
    "sqrt": "√({})".format,
    **dict.fromkeys(_PLAIN.split(), str),
    **dict.fromkeys(_DROPPED.split(), lambda _: ""),
    **{name: partial(_in_font, font) for name, font in _FONTS.items()},
    **{name: partial(_with_accent, accent) for name, accent in _ACCENTS.items()},
}


# Symbolic algebra without `eval`; runs in a worker process.

_MOST_BITS = 1 << 17  # of a power or factorial of numbers; larger ones are where the original hangs
_MOST_FACTORIAL = 2000
# Names that SymPy's reader takes for functions and that are short enough to get past the original's count of letters.
_REFUSED = ("all", "eye", "fft", "fu", "gff", "hn1", "hn2", "id", "jn", "ntt", "yn")
_FUNCTIONS = ("csc", "ff", "frac", "im", "li", "ln", "re", "rf", "sqrt")
_CONSTANTS = ("nan", "oo", "pi", "zoo")
_MADE_BY_READER = ("Float", "Integer", "Number", "Rational", "Symbol")
_FACTORIALS = ("factorial", "factorial2")
_OPERATORS: dict[type[ast.AST], Callable[..., Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.USub: operator.neg,
    ast.UAdd: operator.pos,
}


class RefusedError(ValueError):
    """An expression that is not evaluated; the message says which part."""


def difference_vanishes(difference: str, tolerance: float | None) -> bool:
    """Whether a difference of two answers is zero.

    Args:
        difference: `(label)-(answer)`, in the symbolic form of the original.
        tolerance: None: the simplified difference must be zero; else its absolute value is at most this.
    """
    from sympy import simplify

    try:
        simplified = simplify(parse(difference))
        return bool(simplified == 0) if tolerance is None else bool(abs(simplified) <= tolerance)
    except MemoryError:
        raise
    except Exception:  # whatever goes wrong in reading or algebra means unequal, as in the original
        return False


def parse(text: str) -> Any:
    """SymPy expression of a text in Python's notation, `^` for powers and implied products allowed.

    Raises:
        RefusedError: it holds something that has no meaning here, or a number that would be too large.
    """
    from sympy.parsing import sympy_parser

    rules = (*sympy_parser.standard_transformations, sympy_parser.implicit_multiplication_application)
    code = sympy_parser.stringify_expr(text.replace("^", "**"), {}, _names(), rules)
    return _value(ast.parse(code.strip(), mode="eval").body)


@cache
def _names() -> dict[str, Any]:
    import sympy

    names = {name: getattr(sympy, name) for name in (*_FUNCTIONS, *_FACTORIALS, *_CONSTANTS, *_MADE_BY_READER)}
    return {**names, "Function": sympy.Function, **dict.fromkeys(_REFUSED, _refuse)}


def _refuse(*_: Any) -> Any:
    raise RefusedError("a function that answers have no use for")


def _value(node: ast.expr) -> Any:
    match node:
        case ast.BinOp(left=left, op=ast.Pow(), right=right):
            return _power(_value(left), _value(right))
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
            return _OPERATORS[type(op)](_value(left), _value(right))
        case ast.UnaryOp(op=op, operand=operand) if type(op) in _OPERATORS:
            return _OPERATORS[type(op)](_value(operand))
        case ast.Name(id=name) if name in _CONSTANTS:
            return _names()[name]
        case ast.Call(func=ast.Name(id=name), args=arguments, keywords=[]) if name in _MADE_BY_READER:
            return _names()[name](*(_literal(argument) for argument in arguments))
        case ast.Call(func=function, args=arguments, keywords=[]):
            return _function(function)(*(_value(argument) for argument in arguments))
        case _:
            raise RefusedError(f"{type(node).__name__} has no meaning in an answer")


def _function(node: ast.expr) -> Callable[..., Any]:
    match node:
        case ast.Name(id=name) if name in _FUNCTIONS or name in _REFUSED:
            return _names()[name]
        case ast.Name(id=name) if name in _FACTORIALS:
            return lambda number: _factorial(name, number)
        case ast.Call(func=ast.Name(id="Function"), args=[ast.Constant(value=str(name))]):
            return _names()["Function"](name)
        case _:
            raise RefusedError("a call of something that is no function")


def _literal(node: ast.expr) -> Any:
    """A number or name as it stands in the code, or the number that such a call has made already."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str | int):
        return node.value
    return _value(node)


def _power(base: Any, exponent: Any) -> Any:
    """The power, unless it is a number of too many digits."""
    if base.is_number and exponent.is_Integer:
        rationals = [int(atom.p) * int(atom.q) for atom in base.atoms() if atom.is_Rational]
        bits = max(map(int.bit_length, rationals or [2]))
        if bits * abs(int(exponent)) > _MOST_BITS:
            raise RefusedError("a power of too many digits")
    elif base.is_number and exponent.is_number and (exponent.is_infinite or abs(exponent) > _MOST_BITS):
        raise RefusedError("a power of too many digits")
    return base**exponent


def _factorial(name: str, number: Any) -> Any:
    if number.is_number and (not number.is_finite or abs(number) > _MOST_FACTORIAL):
        raise RefusedError("a factorial of too many digits")
    return _names()[name](number)
