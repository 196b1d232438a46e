"""Register of families: those of each difficulty, and their functions to draw and lay out a problem."""

from __future__ import annotations

import difflib
import random
from collections.abc import Callable, Sequence

from geo_sokoban_pipeline.envs.geo3k.config import TINY_SIZE, Difficulty, ProblemOptions
from geo_sokoban_pipeline.envs.geo3k.figures import circles, lines, polygons, triangles
from geo_sokoban_pipeline.envs.geo3k.figures.drawing import FigureLayout, lay_out_fixed, lay_out_free
from geo_sokoban_pipeline.envs.geo3k.figures.problem import Sketch
from geo_sokoban_pipeline.envs.geo3k.figures.tiny_figures import FONT_SIZE, LINE_WIDTH, TINY_FAMILIES, tiny_sketch
from geo_sokoban_pipeline.envs.rows import DataError

DIFFICULTIES: tuple[Difficulty, ...] = ("easy", "medium", "hard")

FAMILIES: dict[str, Callable[[random.Random, Difficulty], Sketch]] = {
    "linear_pair": lines.linear_pair,
    "vertical_angles": lines.vertical_angles,
    "complementary_angles": lines.complementary_angles,
    "parallel_lines": lines.parallel_lines,
    "parallel_zigzag": lines.parallel_zigzag,
    "triangle_angles": polygons.triangle_angles,
    "exterior_angle": polygons.exterior_angle,
    "polygon_angles": polygons.polygon_angles,
    "pythagoras": triangles.pythagoras,
    "special_right_triangle": triangles.special_right_triangle,
    "similar_triangles": triangles.similar_triangles,
    "parallel_in_triangle": triangles.parallel_in_triangle,
    "triangle_area": polygons.triangle_area,
    "parallelogram_area": polygons.parallelogram_area,
    "trapezoid_area": polygons.trapezoid_area,
    "inscribed_angle": circles.inscribed_angle,
    "intercepted_arc": circles.intercepted_arc,
    "central_angle": circles.central_angle,
    "chord_angles": circles.chord_angles,
    "circle_circumference": circles.circle_circumference,
    "circle_area": circles.circle_area,
    "sector": circles.sector,
}


def family_names(difficulty: str) -> tuple[str, ...]:
    """Families of a difficulty (tiny, or any of the others), in a fixed order."""
    return tuple(TINY_FAMILIES) if difficulty == "tiny" else tuple(FAMILIES)


def family_shares(options: ProblemOptions) -> dict[str, float]:
    """Families to draw and their relative shares.

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
            raise DataError(f"families.{name}={share:g}: no family of difficulty {options.difficulty}. {hint}")
    return dict(options.families)


def draw_sketch(
    family: str,
    difficulty: Difficulty,
    generator: random.Random,
    options: ProblemOptions,
    angles: Sequence[int],
) -> Sketch:
    """A problem of a family, without an image; `angles` are the possible ones of a tiny family, degrees."""
    is_tiny = difficulty == "tiny"
    return tiny_sketch(family, generator, options, angles) if is_tiny else FAMILIES[family](generator, difficulty)


def lay_out(
    sketch: Sketch, difficulty: Difficulty, generator: random.Random, options: ProblemOptions
) -> FigureLayout | None:
    """The sketch's drawing in pixels, None if its labels do not fit."""
    scale = options.picture_scale
    if difficulty != "tiny":
        return lay_out_free(sketch.figure, generator, scale, upright=sketch.upright)
    width, height = (round(side * scale) for side in TINY_SIZE)
    return lay_out_fixed(sketch.figure, width, height, round(FONT_SIZE * scale), LINE_WIDTH * scale)
