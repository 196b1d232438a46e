"""Template of the study pipelines: runs with their controls, and the tables and figures of the docs."""

from geo_sokoban_pipeline.pipelines.study.pipeline import STUDIES, create_pipeline

__all__ = ["STUDIES", "create_pipeline"]
