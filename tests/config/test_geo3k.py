"""Options of the geometry data: defaults, refusals, presets."""

from __future__ import annotations

import pytest

from geo_sokoban_pipeline.config.base import ParameterError, validate_parameters
from geo_sokoban_pipeline.envs.geo3k.config import Geo3kDataOptions, Geo3kMultiTurnDataOptions
from geo_sokoban_pipeline.parameters import ProjectParameters


def test_only_the_instruction_differs_between_the_tasks():
    single, multi = Geo3kDataOptions().model_dump(), Geo3kMultiTurnDataOptions().model_dump()
    assert (single.pop("instruction"), multi.pop("instruction")) == ("question", "tool_brief")
    assert single == multi


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"colour": 1}, "geo3k.colour=1: unknown name"),
        ({"sourc": "hub"}, "Did you mean geo3k.source"),
        ({"hub": {"split": "train"}}, "geo3k.hub.split"),
        ({"instruction": "brief"}, r"geo3k.instruction=.brief.*question, boxed, tool_brief, tool.*\{question\} once"),
        ({"instruction": "{question}{question}"}, "geo3k.instruction"),
        ({"source": "file"}, "source=file needs file.path"),
        ({"counts": {"eval": None}}, "counts.eval=null: how many problems to generate"),
        ({"counts": {"eval": -1}}, "geo3k.counts.eval=-1"),
        ({"shares": {"train": 0.9}}, "shares add up to 1.1"),
        ({"exclude_overlaps": "all"}, "geo3k.exclude_overlaps"),
        ({"limits": {"max_aspect": 300}}, "geo3k.limits.max_aspect=300"),
        ({"problems": {"difficulty": "hardest"}}, "geo3k.problems.difficulty"),
    ],
)
def test_refused(given, message):
    with pytest.raises(ParameterError, match=message):
        validate_parameters({"geo3k": given}, ProjectParameters)


def test_counts_may_be_open_where_rows_are_read():
    given = {"source": "hub", "counts": {"train": None, "validation": None, "eval": None}}
    assert validate_parameters({"geo3k": given}, ProjectParameters).geo3k.counts.train is None


def test_slime_exact():
    exact = Geo3kMultiTurnDataOptions.slime_exact(instruction="tool")
    assert (exact.exclude_overlaps, exact.repair_control_characters, exact.transparency) == ("none", False, "drop")
    assert exact.instruction == "tool"
