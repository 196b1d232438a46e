"""Template of the data pipelines, instantiated once per task."""

from geo_sokoban_pipeline.pipelines.data.pipeline import create_pipeline

__all__ = ["create_pipeline"]
