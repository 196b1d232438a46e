"""Template of the control pipelines: more SFT instead of GRPO."""

from geo_sokoban_pipeline.pipelines.control.pipeline import create_pipeline

__all__ = ["create_pipeline"]
