"""Splits: sizes near the shares, nothing assigned twice, shared keys counted."""

from __future__ import annotations

import random

import pytest

from geo_sokoban_pipeline.config.data import SplitShares
from geo_sokoban_pipeline.envs.splits import SPLITS, overlaps, share_out


@pytest.mark.parametrize(
    ("count", "shares", "sizes"),
    [
        (258, (0.67, 0.11, 0.22), (173, 28, 57)),
        (10, (0.5, 0.25, 0.25), (5, 3, 2)),
        (3, (0.9, 0.05, 0.05), (1, 1, 1)),
        (4, (0.98, 0.01, 0.01), (2, 1, 1)),
        (7, (1, 0, 0), (7, 0, 0)),
        (0, (0.5, 0.25, 0.25), (0, 0, 0)),
    ],
)
def test_share_out(count, shares, sizes):
    assigned = share_out(range(count), SplitShares(**dict(zip(SPLITS, shares, strict=True))), random.Random(1))
    assert tuple(len(assigned[split]) for split in SPLITS) == sizes
    assert sorted(item for items in assigned.values() for item in items) == list(range(count))


@pytest.mark.parametrize(
    ("keys", "count"), [({"a": ["x", "x"], "b": ["y"]}, 0), ({"a": ["x"], "b": ["x"], "c": ["x", "z"]}, 1)]
)
def test_overlaps(keys, count):
    assert overlaps(keys) == count
