"""A generated problem: question, drawing, exact answer, and the key by which splits are kept apart."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cached_property

from geo_sokoban_pipeline.envs.geo3k.problems.exact import AnswerForm, ExactValue, answer_form
from geo_sokoban_pipeline.envs.geo3k.problems.figure import Figure
from geo_sokoban_pipeline.envs.geo3k.problems.layout import Layout
from geo_sokoban_pipeline.envs.geo3k.problems.render import render_layout_png
from geo_sokoban_pipeline.options.problems import Difficulty
from geo_sokoban_pipeline.seeding import content_hash

Numbers = tuple[tuple[str, int], ...]


@dataclass(frozen=True, slots=True)
class Candidate:
    """Answer of one plausible rule to a problem, such as `180 - a`; one of a problem's candidates is the right one."""

    rule: str
    label: str


@dataclass(frozen=True, slots=True)
class Sketch:
    """What a family draws from a generator: a problem without a picture.

    Attributes:
        question: as in Geometry3K, without `<image>`.
        numbers: all that the answer and the lengths and angles follow from, by name; orientation is not in it.
        value: exact, also where the label is rounded.
        label: spaced LaTeX.
        figure: to scale.
        upright: whether level lines stay level in the picture.
        candidates: answers of the family's plausible rules, the right one among them; empty where none are known.
    """

    question: str
    numbers: Numbers
    value: ExactValue
    label: str
    figure: Figure
    upright: bool = True
    candidates: tuple[Candidate, ...] = ()


@dataclass(frozen=True)
class Problem:
    """One problem; `png` and `key` are computed when they are asked for.

    Attributes:
        family: name of the rule, such as `linear_pair`.
        difficulty: tiny, easy, medium or hard.
        question, numbers, value, label, candidates: as in `Sketch`.
        layout: the drawing in pixels, its labels placed.
        seed: of the generator that drew it.
    """

    family: str
    difficulty: Difficulty
    question: str
    numbers: Numbers
    value: ExactValue
    label: str
    candidates: tuple[Candidate, ...]
    layout: Layout
    seed: int

    @property
    def form(self) -> AnswerForm:
        """integer, decimal, surd, fraction or pi."""
        return answer_form(self.label)

    @cached_property
    def key(self) -> str:
        """Hash of family and numbers: no two problems of a call share it, and no two splits."""
        return problem_key(self.family, self.numbers)

    @cached_property
    def png(self) -> bytes:
        """RGB PNG file; equal problems give equal bytes."""
        return render_layout_png(self.layout)


def problem_key(family: str, numbers: Numbers) -> str:
    """Content key of a family and its numbers, equal in every process."""
    return content_hash("geo3k problem", family, json.dumps(sorted(numbers), separators=(",", ":")))
