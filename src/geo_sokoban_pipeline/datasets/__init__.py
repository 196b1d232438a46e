"""Kedro datasets of this project; each class is a thin face of a store that works without Kedro."""

from geo_sokoban_pipeline.datasets.episode_views import EpisodesDataset, TrajectoriesFrameDataset
from geo_sokoban_pipeline.datasets.files import (
    ExportDataset,
    JsonFileDataset,
    PolicyDataset,
    ReportDataset,
    SiteDataset,
)
from geo_sokoban_pipeline.datasets.iterations import (
    CheckpointsDataset,
    IterationPartitions,
    MetricsDataset,
    TrajectoriesDataset,
)
from geo_sokoban_pipeline.datasets.tables import PromptsDataset, TablePartsDataset
from geo_sokoban_pipeline.datasets.views import SourceDataset, ViewDataset
from geo_sokoban_pipeline.runs.storage import StorageError

__all__ = [
    "CheckpointsDataset",
    "EpisodesDataset",
    "ExportDataset",
    "IterationPartitions",
    "JsonFileDataset",
    "MetricsDataset",
    "PolicyDataset",
    "PromptsDataset",
    "ReportDataset",
    "SiteDataset",
    "SourceDataset",
    "StorageError",
    "TablePartsDataset",
    "TrajectoriesDataset",
    "TrajectoriesFrameDataset",
    "ViewDataset",
]
