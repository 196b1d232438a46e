"""Kedro datasets of this project; each class is a thin face of a store that works without Kedro."""

from geo_sokoban_pipeline.datasets.iterations import (
    CheckpointsDataset,
    IterationPartitions,
    MetricsDataset,
    TrajectoriesDataset,
    TrajectoriesFrameDataset,
)
from geo_sokoban_pipeline.datasets.json import JsonFileDataset
from geo_sokoban_pipeline.datasets.policies import PolicyDataset
from geo_sokoban_pipeline.datasets.runs import SourceDataset
from geo_sokoban_pipeline.datasets.views import ViewDataset
from geo_sokoban_pipeline.runs.storage import StorageError

__all__ = [
    "CheckpointsDataset",
    "IterationPartitions",
    "JsonFileDataset",
    "MetricsDataset",
    "PolicyDataset",
    "SourceDataset",
    "StorageError",
    "TrajectoriesDataset",
    "TrajectoriesFrameDataset",
    "ViewDataset",
]
