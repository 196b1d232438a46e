"""Template of the pipelines estimate_*."""

from geo_sokoban_pipeline.pipelines.estimate.pipeline import create_pipeline

__all__ = ["create_pipeline"]
