"""Metrics: one JSON row per iteration, loaded as rows."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from kedro.io import DatasetError

from geo_sokoban_pipeline.datasets import MetricsDataset
from geo_sokoban_pipeline.runs.storage import Rewind


@pytest.fixture
def metrics(tmp_path: Path) -> MetricsDataset:
    return MetricsDataset(str(tmp_path / "metrics"))


def test_rows_come_in_order(metrics: MetricsDataset) -> None:
    assert metrics.load() == []
    metrics.save({"iter=00010": {"iteration": 10, "train/loss": 0.1 + 0.2}})
    metrics.save({"iter=00002": {"iteration": 2, "train/loss": None}})
    rows = [{"iteration": 2, "train/loss": None}, {"iteration": 10, "train/loss": 0.1 + 0.2}]
    assert metrics.load() == rows
    metrics.save({})
    metrics.save(Rewind(2))
    assert metrics.load() == rows[:1]


@pytest.mark.parametrize(
    ("value", "stored"),
    [
        (np.float32(0.5), 0.5),
        (np.int64(3), 3),
        (1e-300, 1e-300),
        (float("nan"), None),
        (float("inf"), None),
        (True, True),
    ],
)
def test_values_become_plain_json(value: object, stored: object, metrics: MetricsDataset, tmp_path: Path) -> None:
    metrics.save({"iter=00000": {"x": value}})
    assert metrics.load() == [{"x": stored}]
    assert json.loads((tmp_path / "metrics" / "iter=00000.json").read_text()) == {"x": stored}


@pytest.mark.parametrize("row", [{"x": "text"}, {"x": [1]}, [1], "row"])
def test_other_values_are_refused(row: object, metrics: MetricsDataset) -> None:
    with pytest.raises(DatasetError, match=r"iter=00000\.json"):
        metrics.save({"iter=00000": row})
    assert metrics.load() == []


def test_damaged_row_is_named(metrics: MetricsDataset, tmp_path: Path) -> None:
    metrics.save({"iter=00000": {"x": 1}})
    (tmp_path / "metrics" / "iter=00000.json").write_text('{"x":')
    with pytest.raises(DatasetError, match=r"iter=00000\.json is not readable JSON"):
        metrics.load()


def test_preview_shows_curves(metrics: MetricsDataset) -> None:
    assert metrics.preview() is None
    reward = "rollout/raw_reward"
    metrics.save(
        {f"iter=0000{i}": {"iteration": i, reward: i / 2, **({"eval": 1.0} if i == 1 else {})} for i in range(2)}
    )
    shown = metrics.preview()
    assert [(curve["name"], curve["x"], curve["y"], curve["visible"]) for curve in shown["data"]] == [
        (reward, [0, 1], [0.0, 0.5], True),
        ("eval", [0, 1], [None, 1.0], False),
    ]
    (menu,) = shown["layout"]["updatemenus"]
    assert [(choice["label"], choice["args"]) for choice in menu["buttons"]] == [
        (reward, [{"visible": [True, False]}]),
        ("eval", [{"visible": [False, True]}]),
    ]
    assert json.loads(json.dumps(shown)) == shown
