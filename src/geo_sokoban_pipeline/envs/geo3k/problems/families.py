"""Register of families: which there are at each difficulty, and how one draws a problem and lays it out."""

from __future__ import annotations

import difflib
import random
from collections.abc import Callable, Sequence

from geo_sokoban_pipeline.envs.geo3k.problems import (
    areas,
    circle_angles,
    circle_sizes,
    lines,
    polygons,
    right_triangles,
    similarity,
)
from geo_sokoban_pipeline.envs.geo3k.problems.layout import Layout, lay_out_fixed, lay_out_free
from geo_sokoban_pipeline.envs.geo3k.problems.problem import Sketch
from geo_sokoban_pipeline.envs.geo3k.problems.tiny import FONT_SIZE, LINE_WIDTH, TINY_FAMILIES, tiny_sketch
from geo_sokoban_pipeline.envs.row_files import DataError
from geo_sokoban_pipeline.options.problems import TINY_SIZE, Difficulty, ProblemOptions

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
    "pythagoras": right_triangles.pythagoras,
    "special_right_triangle": right_triangles.special_right_triangle,
    "similar_triangles": similarity.similar_triangles,
    "parallel_in_triangle": similarity.parallel_in_triangle,
    "triangle_area": areas.triangle_area,
    "parallelogram_area": areas.parallelogram_area,
    "trapezoid_area": areas.trapezoid_area,
    "inscribed_angle": circle_angles.inscribed_angle,
    "intercepted_arc": circle_angles.intercepted_arc,
    "central_angle": circle_angles.central_angle,
    "chord_angles": circle_angles.chord_angles,
    "circle_circumference": circle_sizes.circle_circumference,
    "circle_area": circle_sizes.circle_area,
    "sector": circle_sizes.sector,
}


def family_names(difficulty: str) -> tuple[str, ...]:
    """Families of a difficulty (tiny, or any of the others), in a fixed order."""
    return tuple(TINY_FAMILIES) if difficulty == "tiny" else tuple(FAMILIES)


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
            raise DataError(f"families.{name}={share:g}: no family of difficulty {options.difficulty}. {hint}")
    return dict(options.families)


def draw_sketch(
    family: str,
    difficulty: Difficulty,
    generator: random.Random,
    options: ProblemOptions,
    angles: Sequence[int],
) -> Sketch:
    """A problem of a family, without a picture; `angles` are those that a tiny one may give, degrees."""
    if difficulty == "tiny":
        return tiny_sketch(family, generator, options, angles)
    return FAMILIES[family](generator, difficulty)


def lay_out(sketch: Sketch, difficulty: Difficulty, generator: random.Random, options: ProblemOptions) -> Layout | None:
    """The sketch's drawing in pixels, None where its labels find no room."""
    scale = options.picture_scale
    if difficulty != "tiny":
        return lay_out_free(sketch.figure, generator, scale, upright=sketch.upright)
    width, height = (round(side * scale) for side in TINY_SIZE)
    return lay_out_fixed(sketch.figure, width, height, round(FONT_SIZE * scale), LINE_WIDTH * scale)
