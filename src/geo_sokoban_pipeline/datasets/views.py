"""Read-only entries: the own output of a node, parts of another run, files of hooks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from kedro.io import AbstractDataset, DatasetError

from geo_sokoban_pipeline.config.grpo import SourceOptions
from geo_sokoban_pipeline.datasets.base import ReadOnlyDataset
from geo_sokoban_pipeline.datasets.iterations import CheckpointsDataset
from geo_sokoban_pipeline.runs.folders import RunStore

_PARTS: Mapping[str, Callable[[RunStore, SourceOptions], Any]] = {
    "policy": RunStore.policy,
    "start": lambda store, source: store.policy(source.model_copy(update={"checkpoint": "start"})),
    "before": RunStore.policy_before,
    "prompts": RunStore.trained_on,
    "trajectories": RunStore.trajectory_files,
    "episodes": RunStore.all_trajectory_files,
    "outputs": RunStore.outputs,
    "root": lambda store, source: store.outputs(source).parents[2],
    "progress": RunStore.progress,
}


class RunsDataset(ReadOnlyDataset[RunStore]):
    """All stored runs below a data root."""

    def load(self) -> RunStore:
        """The store of these runs."""
        return RunStore(self._path)


class FolderDataset(ReadOnlyDataset[Path]):
    """A folder by its place, for tools that take one."""

    def load(self) -> Path:
        """The folder; it need not be there."""
        return self._path


class ResumableDataset(ReadOnlyDataset[Any]):
    """The present content of another entry, with which a node continues from its own output.

    In Kedro's graph no node may read an entry that it writes. So `policy` has a second entry `policy_state` with the
    same dataset; the node reads the second, returns at once where its work is done, and writes the first.

    Args:
        dataset: configuration of the other entry.
        metadata: ignored here; read by kedro-viz.
    """

    def __init__(self, dataset: dict[str, Any], metadata: dict[str, Any] | None = None) -> None:
        self._dataset = AbstractDataset.from_config("stored", dataset)
        self.metadata = metadata

    def load(self) -> Any:
        """The stored value, None without one; of checkpoints the newest, see `read_resume_state`.

        Raises:
            DatasetError: caused by a `CorruptFolderError` that names the damaged file.
        """
        if isinstance(self._dataset, CheckpointsDataset):
            return self._dataset.resume_state()
        return self._dataset.load() if self._dataset.exists() else None

    def _describe(self) -> dict[str, Any]:
        return {"dataset": self._dataset._describe()}


class SourceDataset(ReadOnlyDataset[Callable[[], Any]]):
    """A part of the stored run that a pipeline's `source` names, found and verified when the node calls for it.

    Args:
        path: data root.
        part: `policy`; `start`, the policy that GRPO started from; `before`, the policy before the iteration that the
            source names; `prompts`, the hash of those it was trained on; `trajectories`, number and files of the named
            iteration; `episodes`, the files of all iterations; `outputs`, the folder of all episodes; `root`, the
            data root of a run that has some; `progress`, rows of metrics and whether it is complete.
        run: the pipeline, such as `evaluate_sokoban`.
        sources: `${sources:}`, the source of every pipeline.
        metadata: ignored here; read by kedro-viz.
    """

    def __init__(
        self, path: str, part: str, run: str, sources: Mapping[str, Any], metadata: dict[str, Any] | None = None
    ) -> None:
        if part not in _PARTS:
            raise DatasetError(f"part={part}: must be one of {', '.join(_PARTS)}")
        super().__init__(path, metadata)
        self._part = part
        self._source = SourceOptions.model_validate(sources.get(run, {}))

    def load(self) -> Callable[[], Any]:
        """A function that finds the part; it raises a `SourceError` where nothing of that name is stored."""
        return partial(_PARTS[self._part], RunStore(self._path), self._source)

    def _describe(self) -> dict[str, Any]:
        return {**super()._describe(), "part": self._part, "source": self._source.model_dump()}
