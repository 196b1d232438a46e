"""The schema of stored episodes and its validator, under the name that other code imports them by."""

from geo_sokoban_pipeline.trajectories.schema import TRAJECTORY_SCHEMA, validate_trajectories

__all__ = ["TRAJECTORY_SCHEMA", "validate_trajectories"]
