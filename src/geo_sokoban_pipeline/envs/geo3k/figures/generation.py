"""Geometry problems from a seed, no two alike, for splits that share no (family, numbers).

A tiny image also holds a number that no rule uses; splits share no (family, angle) either, whatever that number is.
Problem i is drawn from a seed of its own, derived from the root seed and i: the problems of a smaller count are the
first of a larger one's, in every process.
"""

from __future__ import annotations

import difflib
import random
from collections.abc import Callable, Mapping, Sequence

from geo_sokoban_pipeline.envs.geo3k.config import TINY_SIZE, Difficulty, ProblemOptions
from geo_sokoban_pipeline.envs.geo3k.figures import circles, lines, polygons
from geo_sokoban_pipeline.envs.geo3k.figures.drawing import FigureLayout, lay_out_fixed, lay_out_free
from geo_sokoban_pipeline.envs.geo3k.figures.problem import Problem, Sketch, problem_key
from geo_sokoban_pipeline.envs.geo3k.figures.tiny_figures import (
    FONT_SIZE,
    LINE_WIDTH,
    TINY_FAMILIES,
    assign_angles,
    tiny_sketch,
)
from geo_sokoban_pipeline.envs.rows import DataError
from geo_sokoban_pipeline.seeding import derive_seed

# Draws without a new problem after which a family counts as used up.
_MAX_ATTEMPTS = 400


class ProblemsExhaustedError(ValueError):
    """The families have fewer problems than wanted."""


def generate_splits(counts: Mapping[str, int], seed: int, options: ProblemOptions) -> dict[str, list[Problem]]:
    """Problems of several splits with pairwise different keys (family, numbers).

    Tiny problems of the splits that `held_out_angles` names share no (family, angle) with any other split. Families
    take turns by their shares; one that is used up leaves its turns to the others. The last split grows without a
    change to the others: list evaluation first and training last.

    Args:
        counts: problems of each split, in the order in which they are drawn.
        seed: root seed.
        options: families, difficulty, image size.

    Raises:
        ProblemsExhaustedError: all families are used up.
        ValueError: a value is out of range or a family unknown; the message names it.
    """
    shares = family_shares(options)
    assigned = assign_angles(tuple(shares), counts, seed, options) if options.difficulty == "tiny" else {}
    given: set[str] = set()  # keys of the problems drawn so far
    splits: dict[str, list[Problem]] = {}
    for split, count in counts.items():
        turns = dict.fromkeys(shares, 0)
        problems = splits[split] = []
        while len(problems) < count:
            if not turns:
                raise ProblemsExhaustedError(_explain(split, count, len(problems), options))
            # The family furthest behind its share; ties go to the first.
            family = min(turns, key=lambda name: (turns[name] + 1) / shares[name])
            turns[family] += 1
            own_seed = derive_seed(seed, "geo3k", "problems", len(given), family)
            angles = assigned[family][split] if assigned else ()
            problem = _draw(family, turns[family] - 1, own_seed, options, angles, given)
            if problem is None:
                del turns[family]
            else:
                problems.append(problem)
    return splits


def _draw(
    family: str, turn: int, own_seed: int, options: ProblemOptions, angles: Sequence[int], given: set[str]
) -> Problem | None:
    """A new problem, its key noted in `given`; None if the family gave none in many attempts."""
    generator = random.Random(own_seed)
    difficulty: Difficulty = (
        DIFFICULTIES[turn % len(DIFFICULTIES)] if options.difficulty == "mixed" else options.difficulty
    )
    for _ in range(_MAX_ATTEMPTS):
        sketch = draw_sketch(family, difficulty, generator, options, angles)
        key = problem_key(family, sketch.numbers)
        if key in given:
            continue
        if (layout := lay_out(sketch, difficulty, generator, options)) is None:
            continue
        given.add(key)
        return Problem(family, difficulty, sketch, layout, own_seed)
    return None


def _explain(split: str, count: int, found: int, options: ProblemOptions) -> str:
    way_out = (
        "Lower the counts or angle_step, widen lengths, name more families or change held_out_angles."
        if options.difficulty == "tiny"
        else "Lower the counts, name more families or take difficulty=mixed."
    )
    return (
        f"{split}={count}: the families hold only about {found} distinct problems of difficulty {options.difficulty} "
        f"for this split ({_MAX_ATTEMPTS} draws in a row brought nothing new). {way_out}"
    )


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
    "pythagoras": polygons.pythagoras,
    "special_right_triangle": polygons.special_right_triangle,
    "similar_triangles": polygons.similar_triangles,
    "parallel_in_triangle": polygons.parallel_in_triangle,
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


def family_shares(options: ProblemOptions) -> dict[str, float]:
    """Families to draw and their relative shares.

    Raises:
        ValueError: a family is unknown or does not exist at the difficulty.
    """
    known = tuple(TINY_FAMILIES if options.difficulty == "tiny" else FAMILIES)
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
