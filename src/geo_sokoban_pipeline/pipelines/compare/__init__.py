"""compare: one page about several training runs."""

from geo_sokoban_pipeline.pipelines.compare.pipeline import create_pipeline

__all__ = ["create_pipeline"]
