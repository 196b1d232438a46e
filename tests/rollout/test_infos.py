"""Equal infos become one dict, others stay, and no value changes, so that what is stored stays the same."""

from __future__ import annotations

import copy
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from geo_sokoban_pipeline.trajectories.types import Turn, share_infos


def make_turns(*infos: dict[str, Any]) -> list[Turn]:
    return [Turn(role="assistant", text="", token_start=0, token_end=0, info=info) for info in infos]


@pytest.mark.parametrize(
    ("left", "right", "shared"),
    [
        ({"a": 1, "b": {"c": [True]}}, {"a": 1, "b": {"c": [True]}}, True),
        ({"a": 1}, {"a": 2}, False),
        ({"a": 1}, {"a": 1.0}, False),
        ({"a": 0.0}, {"a": -0.0}, False),
        ({"a": True}, {"a": 1}, False),
        ({"a": "1"}, {"a": 1}, False),
        ({"a": None}, {"a": math.nan}, False),
        ({"a": np.float32(0.1)}, {"a": np.float32(0.1)}, False),
        ({"a": object()}, {"a": object()}, False),
        ({}, {}, False),
    ],
)
def test_equal_infos_become_one(left: dict[str, Any], right: dict[str, Any], shared: bool) -> None:
    turns = make_turns(left, right)
    share_infos(turns)
    assert turns[0].info is left
    assert turns[1].info is (left if shared else right)


VALUES = st.none() | st.booleans() | st.integers(-5, 5) | st.floats() | st.sampled_from(["", "null", "1"])
INFOS = st.dictionaries(st.sampled_from("ab"), VALUES | st.lists(VALUES, max_size=2), max_size=2)


@given(st.lists(INFOS, max_size=8))
def test_nothing_changes_its_value(infos: list[dict[str, Any]]) -> None:
    turns = make_turns(*copy.deepcopy(infos))
    share_infos(turns)
    assert repr([turn.info for turn in turns]) == repr(infos)
