"""Kedro datasets of this project; each class is a thin face of a store that works without Kedro."""

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
from geo_sokoban_pipeline.datasets.views import (
    EpisodesDataset,
    FolderDataset,
    ResumableDataset,
    RunsDataset,
    SourceDataset,
    TrajectoriesFrameDataset,
)
from geo_sokoban_pipeline.runs.storage import StorageError

__all__ = [
    "CheckpointsDataset",
    "EpisodesDataset",
    "ExportDataset",
    "FolderDataset",
    "IterationPartitions",
    "JsonFileDataset",
    "MetricsDataset",
    "PolicyDataset",
    "PromptsDataset",
    "ReportDataset",
    "ResumableDataset",
    "RunsDataset",
    "SiteDataset",
    "SourceDataset",
    "StorageError",
    "TablePartsDataset",
    "TrajectoriesDataset",
    "TrajectoriesFrameDataset",
]
