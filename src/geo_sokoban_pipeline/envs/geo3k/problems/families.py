"""Register of families: which there are at each difficulty, and how one draws a problem and lays it out."""

from __future__ import annotations

import difflib
import random

from geo_sokoban_pipeline.envs.geo3k.problems.layout import Layout, lay_out_fixed
from geo_sokoban_pipeline.envs.geo3k.problems.problem import Sketch
from geo_sokoban_pipeline.envs.geo3k.problems.tiny import FONT_SIZE, LINE_WIDTH, TINY_FAMILIES, tiny_sketch
from geo_sokoban_pipeline.options.problems import TINY_SIZE, Difficulty, ProblemOptions

DIFFICULTIES: tuple[Difficulty, ...] = ("easy", "medium", "hard")


def family_names(difficulty: str) -> tuple[str, ...]:
    """Families of a difficulty, in a fixed order."""
    return tuple(TINY_FAMILIES)


def family_shares(options: ProblemOptions) -> dict[str, float]:
    """Families to be drawn and their relative shares.

    Raises:
        ValueError: a family is unknown or does not exist at the difficulty.
    """
    known = family_names(options.difficulty)
    if options.families is None:
        return dict.fromkeys(known, 1.0)
    for name, share in options.families.items():
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"Did you mean {near[0]}?" if near else f"Known are {', '.join(known)}."
            raise ValueError(f"families.{name}={share:g}: no family of difficulty {options.difficulty}. {hint}")
    return dict(options.families)


def draw_sketch(family: str, difficulty: Difficulty, generator: random.Random, options: ProblemOptions) -> Sketch:
    """A problem of a family, without a picture."""
    return tiny_sketch(family, generator, options)


def lay_out(sketch: Sketch, difficulty: Difficulty, generator: random.Random, options: ProblemOptions) -> Layout | None:
    """The sketch's drawing in pixels, None where its labels find no room."""
    scale = options.picture_scale
    width, height = (round(side * scale) for side in TINY_SIZE)
    return lay_out_fixed(sketch.figure, width, height, round(FONT_SIZE * scale), LINE_WIDTH * scale)
