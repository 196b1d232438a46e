"""Kedro datasets of this project; each class is a thin face of a store that works without Kedro."""

from geo_sokoban_pipeline.datasets.iterations import (
    CheckpointsDataset,
    IterationPartitions,
    MetricsDataset,
    ResumeStateDataset,
    TrajectoriesDataset,
    TrajectoriesFrameDataset,
)
from geo_sokoban_pipeline.datasets.json import JsonFileDataset, JsonStateDataset
from geo_sokoban_pipeline.datasets.policies import PolicyDataset, PolicyStateDataset
from geo_sokoban_pipeline.datasets.runs import RunsDataset, SourceDataset
from geo_sokoban_pipeline.runs.storage import StorageError

__all__ = [
    "CheckpointsDataset",
    "IterationPartitions",
    "JsonFileDataset",
    "JsonStateDataset",
    "MetricsDataset",
    "PolicyDataset",
    "PolicyStateDataset",
    "ResumeStateDataset",
    "RunsDataset",
    "SourceDataset",
    "StorageError",
    "TrajectoriesDataset",
    "TrajectoriesFrameDataset",
]
