"""Template of the training pipelines, instantiated once per task."""

from geo_sokoban_pipeline.pipelines.train.pipeline import create_pipeline

__all__ = ["create_pipeline"]
