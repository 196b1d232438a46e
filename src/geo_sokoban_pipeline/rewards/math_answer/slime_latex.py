"""LaTeX to plain text as the original math checker sees it: symbols become characters, layout disappears.

The original uses a general converter; this one knows what answers contain (fractions, roots, fonts, accents, matrices,
the usual symbols) and gives the same text for it. A macro it does not know vanishes and its arguments stay, as there.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable
from functools import partial

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
