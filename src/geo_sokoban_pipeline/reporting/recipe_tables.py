"""Recipes that a study compares with its own: one table, and one sentence on what differs for certain.

The seed is the unit of evidence: a difference is taken within each seed, which all recipes begin from one warm start,
and its interval is Student's over the seeds. With many recipes some would differ by chance, so p values are those of
Holm (1979), and intervals hold together (Bonferroni). Both are over the planned recipes that change the same
kind of estimator, finished or not: rows that finish later can make a difference certain, and never make it uncertain.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, stdev
from typing import Any

from geo_sokoban_pipeline.formats import DASH, number, percent, signed
from geo_sokoban_pipeline.reporting.study_tables import MODES, Results, markdown_table, name_seeds

_LEVEL = 0.05


@dataclass(frozen=True)
class Recipe:
    """A recipe over all seeds.

    Attributes:
        name: empty: that of the study itself.
        changes: options that it changes.
        rates: mean solve rate by mode.
        difference: mean over the seeds of its sampled rate less that of the study's own recipe; None: it is that one.
        half: half of the difference's interval, which holds together with those of its kind in 95 % of tables.
        p: of no difference, adjusted for its kind.
        spent: CPU-seconds, in multiples of those of the study's own recipe.
        iterations: of one seed.
        clipped: mean share of clipped tokens; None: the loss has none.
        weights_clipped: mean share of tokens whose importance weight the rule has changed; None: there is no rule.
    """

    name: str
    changes: Mapping[str, Any]
    rates: Mapping[str, float]
    difference: float | None
    half: float
    p: float
    spent: float
    iterations: int
    clipped: float | None
    weights_clipped: float | None

    @property
    def interval(self) -> tuple[float, float]:
        """Of the difference, within what is possible beside the rate of the study's own recipe."""
        middle, rate = self.difference or 0.0, self.rates[MODES[0]]
        own = rate - middle
        return max(-own, middle - self.half), min(1.0 - own, middle + self.half)


def compare_recipes(recipes: Sequence[Mapping[str, Any]], planned: Mapping[str, Mapping[str, Any]]) -> list[Recipe]:
    """The recipes of a study's results, in their order; the first one is its own.

    Args:
        recipes: see `studies.results`; at least two seeds each.
        planned: changes of all recipes of the study, by name.
    """
    from scipy.stats import t

    kinds = Counter(map(_kind, planned.values()))

    own = recipes[0]["seeds"]
    found = []
    for recipe in recipes:
        seeds = recipe["seeds"]
        gaps = [_rate(one, MODES[0]) - _rate(base, MODES[0]) for one, base in zip(seeds, own, strict=True)]
        error = stdev(gaps) / math.sqrt(len(gaps))
        size = kinds[_kind(recipe["changes"])] or 1
        found.append(
            Recipe(
                name=recipe["name"],
                changes=recipe["changes"],
                rates={mode: fmean(_rate(seed, mode) for seed in seeds) for mode in MODES},
                difference=fmean(gaps) if recipe is not recipes[0] else None,
                half=float(t.ppf(1 - _LEVEL / 2 / size, len(gaps) - 1)) * error,
                p=float(2 * t.sf(abs(fmean(gaps)) / error, len(gaps) - 1)) if error else float(not any(gaps)),
                spent=fmean(seed["spent"] for seed in seeds),
                iterations=seeds[0]["iterations"],
                clipped=_mean(seeds, "clipped"),
                weights_clipped=_mean(seeds, "weights_clipped"),
            )
        )
    return [found[0], *_adjust(found[1:], kinds)]


def _mean(seeds: Sequence[Mapping[str, Any]], name: str) -> float | None:
    values = [seed[name] for seed in seeds]
    return None if None in values else fmean(values)


def _kind(changes: Mapping[str, Any]) -> frozenset[str]:
    """The kinds of estimators that a recipe changes."""
    return frozenset(name.removesuffix("_args") for name in changes.get("grpo", {}))


def _rate(seed: Mapping[str, Any], mode: str) -> float:
    solved, episodes = seed[mode]
    return float(solved / episodes)


def _adjust(recipes: Sequence[Recipe], kinds: Mapping[frozenset[str], int]) -> list[Recipe]:
    """The recipes with Holm's p values; those that are not finished count as if their p were larger."""
    adjusted: dict[str, float] = {}
    for kind, size in kinds.items():
        members = [one for one in recipes if _kind(one.changes) == kind]
        largest = 0.0
        for place, recipe in enumerate(sorted(members, key=lambda one: one.p)):
            largest = max(largest, min(1.0, (size - place) * recipe.p))
            adjusted[recipe.name] = largest
    return [replace(recipe, p=adjusted[recipe.name]) for recipe in recipes]


def render_recipes(results: Results) -> str:
    """The section of a study that compares recipes, without heading."""
    seeds, planned = [seed["seed"] for seed in results["seeds"]], results["planned"]
    recipes = compare_recipes(results["recipes"], planned)
    lines = []
    for one in recipes:
        difference = DASH
        if one.difference is not None:
            difference = f"{signed(100 * one.difference, 1)} {_interval(one)}"
        lines.append(
            [
                one.name or "its own",
                _options(one.changes),
                *(percent(one.rates[mode], 1) for mode in MODES),
                difference,
                DASH if one.difference is None else _probability(one.p),
                str(one.iterations),
                number(one.spent, 2),
                *(DASH if share is None else percent(share, 2) for share in (one.clipped, one.weights_clipped)),
            ]
        )
    head = [
        "recipe",
        "options",
        *MODES,
        "sampled, less its own",
        "p",
        "iterations",
        "CPU-seconds",
        "clipped",
        "weights",
    ]
    missing = [name for name in planned if name not in {one.name for one in recipes}]
    parts = [
        f"Solve rates of the final policy, mean of {name_seeds(seeds)}, on {results['levels']['distinct']} "
        "evaluation prompts. Differences are within a seed, in points. Brackets are intervals over the seeds, which "
        "hold together for all recipes that change the same kind of estimator, in 95 % of tables; p is Holm's for "
        "these. CPU-seconds are multiples of those of the study's own recipe. Clipped are shares of the tokens "
        "trained on: by the loss, and by the importance rule.",
        markdown_table(head, lines),
        describe_differences(recipes) if len(recipes) > 1 else "",
        f"Not finished: {', '.join(missing)}." if missing else "",
    ]
    return "\n\n".join(part for part in parts if part)


def _probability(p: float) -> str:
    return "< 0.001" if p < 0.001 else number(p, 3)


def _interval(recipe: Recipe) -> str:
    low, high = (signed(100 * end, 1) for end in recipe.interval)
    return f"[{low}, {high}]"


def _options(changes: Mapping[str, Any]) -> str:
    """Options of a recipe as they are typed."""
    found = []

    def walk(prefix: str, value: Any) -> None:
        if isinstance(value, Mapping):
            for name, below in value.items():
                walk(f"{prefix}{name}.", below)
        else:
            found.append(f"`{prefix.rstrip('.')}={value if isinstance(value, str) else json.dumps(value)}`")

    walk("", changes)
    return ", ".join(found)


def describe_differences(recipes: Sequence[Recipe]) -> str:
    """Recipes that differ from the study's own for certain, and the difference that the others may have."""
    others = [one for one in recipes if one.difference is not None]
    certain = [one for one in others if one.p < _LEVEL]
    sides = {
        "Better": [one.name for one in certain if (one.difference or 0.0) > 0],
        "Worse": [one.name for one in certain if (one.difference or 0.0) < 0],
    }
    said = [f"**{side} for certain**: {', '.join(names)}." for side, names in sides.items() if names]
    open_ended = [one for one in others if one.p >= _LEVEL]
    if not said:
        said.append("**Nothing differs for certain.**")
    if open_ended:
        ranges = (f"{one.name} {_interval(one)}" for one in open_ended)
        said.append(f"No difference is shown for {', '.join(ranges)} points.")
    return " ".join(said)
