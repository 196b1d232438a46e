"""The pipelines by name, written out: nothing is found by looking around, nothing heavy is imported.

Every command of Kedro calls `register_pipelines`, so what it imports must be light: torch, transformers, MLflow and
their like are imported inside the functions that need them.
"""

from __future__ import annotations

from kedro.pipeline import Pipeline


def register_pipelines() -> dict[str, Pipeline]:
    """All pipelines of the project; `__default__` is the sum of them."""
    from geo_sokoban_pipeline.pipelines import data_sokoban

    named = {"data_sokoban": data_sokoban.create_pipeline()}
    return {**named, "__default__": sum(named.values(), Pipeline([]))}
