"""Template of the pre-flight pipelines check_*."""

from geo_sokoban_pipeline.pipelines.check.pipeline import create_pipeline

__all__ = ["create_pipeline"]
