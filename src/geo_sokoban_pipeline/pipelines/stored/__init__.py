"""Templates of the pipelines that work on a run's stored data: rollout_*, update_*, evaluate_*, regrade_*,
export_*, report_*, browse_*, score_*."""

from geo_sokoban_pipeline.pipelines.stored.pipeline import (
    create_browse_pipeline,
    create_evaluate_pipeline,
    create_export_pipeline,
    create_regrade_pipeline,
    create_report_pipeline,
    create_rollout_pipeline,
    create_score_pipeline,
    create_update_pipeline,
)

__all__ = [
    "create_browse_pipeline",
    "create_evaluate_pipeline",
    "create_export_pipeline",
    "create_regrade_pipeline",
    "create_report_pipeline",
    "create_rollout_pipeline",
    "create_score_pipeline",
    "create_update_pipeline",
]
