"""No value passes the options and fails or misleads later: every number is bounded, relations are checked."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
from pydantic import BaseModel

from geo_sokoban_pipeline.config import ParameterError, validate_parameters
from geo_sokoban_pipeline.envs.geo3k.env import Geo3kEnvOptions
from geo_sokoban_pipeline.envs.sokoban.env import SokobanEnvOptions
from geo_sokoban_pipeline.parameters import ProjectParameters
from geo_sokoban_pipeline.preflight.first_checks import check_plugins
from geo_sokoban_pipeline.rewards.geo3k import AnswerRewardOptions, FormatRewardOptions, ToleranceRewardOptions
from geo_sokoban_pipeline.rewards.sokoban import SokobanRewardOptions

MODELS = (
    *(ProjectParameters, SokobanEnvOptions, SokobanRewardOptions),
    *(Geo3kEnvOptions, AnswerRewardOptions, ToleranceRewardOptions, FormatRewardOptions),
)
# What stands above a number whose section needs it, so that only the number itself is judged.
NEEDED = {"bars": {"player": "final", "at_least": 0.0}, "evaluations": {"name": "a", "title": "A"}}


def numbers(schema: Mapping[str, Any], definitions: Mapping[str, Any], path: tuple = ()) -> Iterator[tuple]:
    """All numbers of a JSON schema, with their paths: keys, and 0 for an item of a list."""
    if "$ref" in schema:
        schema = definitions[schema["$ref"].rpartition("/")[2]]
    for choice in [*schema.get("anyOf", ()), *schema.get("allOf", ())]:
        yield from numbers(choice, definitions, path)
    if schema.get("type") in ("integer", "number"):
        yield path, schema
    for name, part in schema.get("properties", {}).items():
        yield from numbers(part, definitions, (*path, name))
    for part in [*schema.get("prefixItems", ())[:1], schema.get("items"), schema.get("additionalProperties")]:
        if isinstance(part, Mapping):
            step = "eval" if "additionalProperties" in schema else 0
            yield from numbers(part, definitions, (*path, step))


def all_numbers() -> list[tuple[type[BaseModel], tuple, Mapping[str, Any]]]:
    found = []
    for model in MODELS:
        schema = model.model_json_schema()
        found += [(model, path, part) for path, part in numbers(schema, schema.get("$defs", {}))]
    # `run_id` and `checkpoint` are names that may look like numbers.
    return [one for one in found if one[1][-1] not in ("run_id", "checkpoint")]


NUMBERS = all_numbers()


def nested(path: tuple, value: Any) -> Any:
    """Parameters with one value at a path, and what its sections need."""
    for step, above in reversed(list(zip(path, [None, *path[:-1]], strict=True))):
        value = [value] if step == 0 else {**NEEDED.get(str(above), {}), step: value}
        if isinstance(value, dict) and step in NEEDED:
            value[step] = [{**NEEDED[step], **value[step][0]}]
    return value


def complaint(model: type[BaseModel], path: tuple, value: Any) -> str:
    """The line about a value; empty where nothing is wrong with it."""
    try:
        validate_parameters(nested(path, value), model)
    except ParameterError as error:
        name = ".".join(map(str, path))
        return next((line for line in str(error).splitlines() if line.strip().startswith(f"{name}=")), "")
    return ""


def test_the_walk_finds_numbers_everywhere() -> None:
    names = {".".join(map(str, path)) for _, path, _ in NUMBERS}
    assert len(names) > 300
    assert {
        "seed",
        "train_sokoban.optimizer.betas.0",
        "train_geo3k.rollout.server.ports.0",
        "geo3k.problems.held_out_angles.eval",
        "study_long.bars.0.at_least",
        "max_turns",
    } <= names


def test_every_number_has_a_lower_and_an_upper_bound() -> None:
    low, high = {"minimum", "exclusiveMinimum"}, {"maximum", "exclusiveMaximum"}
    unbounded = [
        ".".join(map(str, path)) for _, path, part in NUMBERS if not (low & part.keys() and high & part.keys())
    ]
    assert unbounded == []


def test_every_number_refuses_what_lies_outside_its_bounds_and_what_is_no_number() -> None:
    let_through = []
    for model, path, part in NUMBERS:
        above = part["maximum"] * 2 + 1 if "maximum" in part else part["exclusiveMaximum"]
        below = part["minimum"] - abs(part["minimum"]) - 1 if "minimum" in part else part["exclusiveMinimum"]
        for value in (math.nan, math.inf, -math.inf, above, below):
            if not complaint(model, path, value):
                let_through.append((".".join(map(str, path)), value))
    assert let_through == []


def sokoban_complaint(path: str, value: Any, command: str = "train_sokoban") -> str:
    """What a command says about a value before any work; empty where nothing is wrong with it."""
    section = nested(tuple(path.split(".")), value)
    try:
        check_plugins(command, ProjectParameters.model_validate({"train_sokoban": section}))
    except ParameterError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("command", ["train", "rollout", "update", "evaluate", "control"])
def test_every_command_refuses_a_weight_that_is_no_number(command: str) -> None:
    """An update too: credit per turn takes the reward's arguments."""
    text = sokoban_complaint("reward.args.distance_weight", math.nan, f"{command}_sokoban")
    assert text == "train_sokoban.reward.args.distance_weight=NaN: input should be a finite number."


def test_rewards_of_moves_are_a_mapping() -> None:
    assert sokoban_complaint("env.args.rewards", 5).startswith("train_sokoban.env.args.rewards=5: ")
