"""Template of the pipelines audit_*."""

from geo_sokoban_pipeline.pipelines.audit.pipeline import create_pipeline

__all__ = ["create_pipeline"]
