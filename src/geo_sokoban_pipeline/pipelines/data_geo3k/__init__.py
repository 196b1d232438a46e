"""Pipeline data_geo3k: problems from the generator, the hub or files become prompts, for either geometry task."""

from geo_sokoban_pipeline.pipelines.data_geo3k.pipeline import create_pipeline

__all__ = ["create_pipeline"]
