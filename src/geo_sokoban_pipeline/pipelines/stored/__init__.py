"""Templates of the pipelines that work on a run's stored data: rollout_*, update_*, evaluate_*."""

from geo_sokoban_pipeline.pipelines.stored.pipeline import (
    create_evaluate_pipeline,
    create_rollout_pipeline,
    create_update_pipeline,
)

__all__ = ["create_evaluate_pipeline", "create_rollout_pipeline", "create_update_pipeline"]
