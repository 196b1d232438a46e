"""Read-only views of stored files: what the own run or another one has stored, or what hooks have written.

In Kedro's graph no node may read an entry that it writes. A view is another entry on the same path, so that a node
finds out whether its work is done, and the loop after which iteration it continues.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from kedro.io import AbstractDataset, DatasetError
from kedro.utils import load_obj

from geo_sokoban_pipeline.config.grpo import SourceOptions
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


class ViewDataset(AbstractDataset[None, Any]):
    """The result of a function that reads a path, at the moment when it is loaded.

    Args:
        path: file or folder; it need not be there.
        read: dotted name of a function of the path, also called where nothing is stored yet; it needs no Kedro.
        metadata: ignored here; read by kedro-viz.
    """

    def __init__(self, path: str, read: str, metadata: dict[str, Any] | None = None) -> None:
        self._path = Path(path)
        self._read = read
        self.metadata = metadata

    def load(self) -> Any:
        """The stored state now.

        Raises:
            DatasetError: caused by a `CorruptFolderError` that names the damaged file.
        """
        return load_obj(self._read)(self._path)

    def save(self, data: None) -> None:
        """Refused: this is a view."""
        raise DatasetError(f"{self._path} is saved by another entry or by a hook; this one only reads")

    def _exists(self) -> bool:
        return True

    def _describe(self) -> dict[str, Any]:
        return {"path": self._path.as_posix(), "read": self._read}


class SourceDataset(AbstractDataset[None, Callable[[], Any]]):
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
        self._path = Path(path)
        self._part = part
        self._source = SourceOptions.model_validate(sources.get(run, {}))
        self.metadata = metadata

    def load(self) -> Callable[[], Any]:
        """A function that finds the part; it raises a `SourceError` where nothing of that name is stored."""
        return partial(_PARTS[self._part], RunStore(self._path), self._source)

    def save(self, data: None) -> None:
        """Refused: runs are written by their own pipelines."""
        raise DatasetError(f"{self._path}: {self._source.run} is written by its own pipeline; this entry only reads")

    def _exists(self) -> bool:
        return self._path.is_dir()

    def _describe(self) -> dict[str, Any]:
        return {"path": self._path.as_posix(), "part": self._part, "source": self._source.model_dump()}
