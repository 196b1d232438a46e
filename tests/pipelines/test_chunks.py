"""Nodes that yield: a long run holds the data of one chunk, as a short one does."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

from kedro.io import AbstractDataset, DataCatalog
from kedro.pipeline import node, pipeline
from kedro.runner import SequentialRunner

from geo_sokoban_pipeline.pipelines.train.nodes import release

CHUNKS = 60  # Kedro's streams free their items in blocks of 57


class Payload:
    """What a partition holds; unlike a dict it can be watched without being kept."""


class Recorder(AbstractDataset[dict[str, Any], None]):
    """Keeps nothing of what is saved but the names, and whether it is alive."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.alive: list[int] = []
        self._watched: weakref.WeakSet[Payload] = weakref.WeakSet()

    def save(self, data: dict[str, Any]) -> None:
        self.names.extend(data)
        self._watched.update(data.values())
        self.alive.append(len(self._watched))

    def load(self) -> None: ...

    def _describe(self) -> dict[str, Any]:
        return {}


def make_chunks() -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    for number in range(CHUNKS):
        chunk = {f"left {number}": Payload()}, {f"right {number}": Payload()}
        yield chunk
        release(chunk)


def test_what_is_saved_is_freed() -> None:
    recorders = {"left": Recorder(), "right": Recorder()}
    catalog = DataCatalog(dict(recorders))
    SequentialRunner().run(pipeline([node(make_chunks, None, list(recorders), name="chunks")]), catalog)
    for side, recorder in recorders.items():
        assert recorder.names == [f"{side} {number}" for number in range(CHUNKS)]
        assert max(recorder.alive) == 1
