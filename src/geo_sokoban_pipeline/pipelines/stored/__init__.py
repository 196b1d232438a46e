"""Templates of the pipelines that work on a run's stored data: rollout_*, update_*, evaluate_*, regrade_*,
export_*, report_*, browse_*, score_*, fork_*, credit_*."""

from geo_sokoban_pipeline.pipelines.stored.pipeline import create_pipelines

__all__ = ["create_pipelines"]
