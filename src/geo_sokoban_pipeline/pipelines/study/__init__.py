"""Template of the study pipelines: runs with their controls, and the tables and figures of the docs."""

from geo_sokoban_pipeline.pipelines.study.pipeline import create_pipeline

__all__ = ["create_pipeline"]
