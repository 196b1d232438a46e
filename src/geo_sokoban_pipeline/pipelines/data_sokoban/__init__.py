"""Pipeline data_sokoban: levels from the generator, the hub or a file become prompts with pictures."""

from geo_sokoban_pipeline.pipelines.data_sokoban.pipeline import create_pipeline

__all__ = ["create_pipeline"]
