"""Options of `credit_<task>`, and the advantages that each of its tables has."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import Field, field_validator

from geo_sokoban_pipeline.config.base import Count, Iterations
from geo_sokoban_pipeline.config.grpo import GrpoOptions, RolloutPipelineOptions, SourceOptions

# The registered advantages that need no further model and no continuations, and their kinds.
_ROWS: tuple[dict[str, Any], ...] = (
    {"advantage": "grpo"},
    {"advantage": "dr_grpo"},
    {"advantage": "dr_grpo", "filter": "mixed_success"},
    {"advantage": "rloo"},
    {"advantage": "reinforce_pp"},
    {"advantage": "reinforce_pp_baseline"},
    {"advantage": "gigpo"},
    {"advantage": "gigpo", "advantage_args": {"scale": "none"}},
    {"advantage": "turn_return"},
    *(
        {"advantage": "turn_return", "advantage_args": {"gamma": 1.0, **further}}
        for further in (
            {},
            {"leave_one_out": True},
            {"scale": "std"},
            {"baseline": "state"},
            {"baseline": "state", "leave_one_out": True},
            {"baseline": "state_turn"},
            {"baseline": "state_turn", "leave_one_out": True},
        )
    ),
)
# Rows of the recipe as it is, and of the best that a baseline can do.
RECIPE, CEILING = "as trained", "reward less true value"
# Nothing is scaled, clipped or dropped.
_BARE: Mapping[str, Any] = {
    "filter": "none",
    "normalize": "none",
    "advantage_clip": None,
    "overlong": None,
    "advantage_args": {},
}


def standard_advantages() -> dict[str, dict[str, Any]]:
    """Options of the rows that every table has, by a name that says them."""
    found = {}
    for row in _ROWS:
        said = {**row.get("advantage_args", {}), **{name: row[name] for name in row if not name.startswith("advan")}}
        found[" ".join([row["advantage"], *(f"{name}={value}" for name, value in said.items())])] = row
    return found


def name_estimators(recipe: GrpoOptions, further: Mapping[str, Mapping[str, Any]]) -> dict[str, GrpoOptions]:
    """Options of each estimator of a table, by its name.

    Args:
        recipe: of the run, whose row has its filter, scale and clip.
        further: those of the user.

    Raises:
        ValidationError: options that do not exist or do not fit.
    """
    bare = {**recipe.model_dump(), **_BARE}
    rows = {**standard_advantages(), **further}
    return {name: GrpoOptions.model_validate(bare | dict(given)) for name, given in rows.items()} | {RECIPE: recipe}


class CreditPipelineOptions(RolloutPipelineOptions):
    """Groups of the same prompts, and continuations, by which a pipeline credit_* judges estimated advantages."""

    source: SourceOptions = Field(description="Whose policy is rolled out and continues.")
    iterations: Iterations = Field(32, description="Groups of each prompt. Every turn of the first one is measured.")
    prompts: Count = Field(50, description="Training prompts, evenly spread.")
    visits: Count = Field(
        4, description="Groups that must have given a response in a state for it to be measured in all groups."
    )
    continuations: Count = Field(64, description="Continuations of a measured state.")
    estimators: dict[str, dict[str, Any]] = Field(
        default_factory=dict,
        description="Further estimators by a name of yours: options of grpo, such as "
        "`{mine: {advantage: my_advantage.py}}`. Filter, scale and clip are off where they are not given.",
    )

    @field_validator("source")
    @classmethod
    def _check_source(cls, source: SourceOptions) -> SourceOptions:
        if source.checkpoint == "tiny":
            raise ValueError("checkpoint=tiny: continuations need a stored policy, such as `start` or a folder")
        return source

    @field_validator("estimators")
    @classmethod
    def _check_estimators(cls, estimators: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
        if taken := sorted(estimators.keys() & {*standard_advantages(), RECIPE, CEILING}):
            raise ValueError(f"{taken[0]!r} is a row that every table has; give yours another name")
        name_estimators(GrpoOptions(), estimators)
        return estimators
