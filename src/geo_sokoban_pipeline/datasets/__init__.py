"""Kedro datasets of this project; each class is a thin face of a store that works without Kedro."""

from geo_sokoban_pipeline.datasets.checkpoints import CheckpointsDataset, ResumeStateDataset
from geo_sokoban_pipeline.datasets.json_files import JsonFileDataset, JsonStateDataset
from geo_sokoban_pipeline.datasets.metrics import MetricsDataset
from geo_sokoban_pipeline.datasets.partitions import IterationPartitions
from geo_sokoban_pipeline.datasets.policies import PolicyDataset, PolicyStateDataset
from geo_sokoban_pipeline.datasets.runs import RunsDataset
from geo_sokoban_pipeline.datasets.storage_errors import StorageError
from geo_sokoban_pipeline.datasets.trajectories import TrajectoriesDataset, TrajectoriesFrameDataset

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
    "StorageError",
    "TrajectoriesDataset",
    "TrajectoriesFrameDataset",
]
