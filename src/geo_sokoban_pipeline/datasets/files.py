"""Files and folders in the catalog that appear whole or not at all: JSON values, pages, policies, exported tables,
sites."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

from kedro.io import DatasetError
from kedro.utils import load_obj
from kedro_datasets.json import JSONDataset

from geo_sokoban_pipeline.datasets.iterations import PathDataset
from geo_sokoban_pipeline.datasets.tables import TaskData, read_table, with_data_id
from geo_sokoban_pipeline.formats import type_name
from geo_sokoban_pipeline.runs.policy_folder import FolderWriter, PolicyFolder, open_policy, write_policy
from geo_sokoban_pipeline.runs.provenance import suggest_command
from geo_sokoban_pipeline.runs.storage import (
    MANIFEST,
    explain_storage_errors,
    find_json,
    read_json,
    read_manifest,
    write_atomic,
    write_folder,
    write_json,
)

if TYPE_CHECKING:
    import pyarrow as pa
    from kedro_datasets._typing import HTMLPreview

logger = logging.getLogger(__name__)


class JsonFileDataset(JSONDataset):
    """`json.JSONDataset` whose file appears whole or not at all.

    Commands side by side make and read the same data, and a killed one continues from its budget: the stock dataset
    empties the file before it writes.

    Args:
        filepath: the file, with `<data_id>` for the id of a task's data.
        task: whose data that are.
        data: `${task_data:}`.
        metadata: ignored here; read by kedro-viz.
    """

    def __init__(
        self,
        *,
        filepath: str,
        task: str | None = None,
        data: TaskData | None = None,
        metadata: dict[str, Any] | None = None,
    ) -> None:
        super().__init__(filepath=with_data_id(filepath, task, data), metadata=metadata)

    def load(self) -> Any:
        """The stored value.

        Raises:
            DatasetError: caused by a `CorruptFolderError`: the file is no JSON; the message names it.
        """
        return read_json(Path(self._filepath))

    def save(self, data: Any) -> None:
        """Store a value.

        Raises:
            DatasetError: caused by the system's refusal; the message names the file.
        """
        path = Path(self._filepath)
        with explain_storage_errors(path):
            write_json(path, data)


class ReportDataset(PathDataset[str, str]):
    """The HTML page of a run.

    Args:
        path: the file.
        summary: JSON file of the run's evaluation.
        previewer: dotted name of the function that makes the HTML of a preview from this summary.
        metadata: ignored here; read by kedro-viz.
    """

    def __init__(self, path: str, summary: str, previewer: str, metadata: dict[str, Any] | None = None) -> None:
        super().__init__(path, metadata)
        self._summary, self._previewer = Path(summary), previewer

    def load(self) -> str:
        """The page."""
        return self._path.read_text(encoding="utf-8")

    def save(self, data: str) -> None:
        """Store a page in place of the one before, atomically.

        Raises:
            DatasetError: caused by the system's refusal; the message names the file.
        """
        with explain_storage_errors(self._path, lambda: len(data.encode())):
            write_atomic(self._path, lambda temporary: temporary.write_text(data, encoding="utf-8"))

    def preview(self) -> HTMLPreview:
        """The result of the run for kedro-viz, which cannot show a whole page; an empty text without an evaluation."""
        summary = find_json(self._summary)
        shown = "" if summary is None or not self._exists() else load_obj(self._previewer)(summary)
        return cast("HTMLPreview", shown)

    def _exists(self) -> bool:
        return self._path.is_file()


class PolicyDataset(PathDataset[PolicyFolder | FolderWriter, PolicyFolder]):
    """One policy: a Hugging Face folder, opened only if every file is as written.

    Args:
        path: the folder.
        metadata: ignored here; read by kedro-viz.
    """

    def save(self, data: PolicyFolder | FolderWriter) -> None:
        """Store a policy in place of the one before, atomically.

        Args:
            data: a sealed folder (linked or copied; nothing happens if it lies here already) or a callable
                `writer(folder) -> manifest entries`.

        Raises:
            DatasetError: neither of the two; or caused by a `StorageError` or a `CorruptFolderError`.
        """
        if not isinstance(data, PolicyFolder) and not callable(data):
            raise DatasetError(f"{self._path}: a policy is a PolicyFolder or a writer, not {type_name(data)}")
        with explain_storage_errors(self._path, lambda: _bytes_needed(data)):
            write_policy(self._path, data)

    def load(self) -> PolicyFolder:
        """The policy, its files verified.

        Raises:
            DatasetError: no policy here, or a damaged one; the message names the file.
        """
        return open_policy(self._path)

    def _exists(self) -> bool:
        return (self._path / MANIFEST).is_file()


def _bytes_needed(data: PolicyFolder | FolderWriter) -> int | None:
    return sum(file["bytes"] for file in data.manifest["files"].values()) if isinstance(data, PolicyFolder) else None


Filler = Callable[[Path], dict[str, Any]]
Content = TypeVar("Content")


class _FilledFolderDataset(PathDataset[Filler, Content]):
    """A folder that a function fills; it appears whole, in place of the one before.

    Args:
        path: the folder.
        metadata: ignored here; read by kedro-viz.
    """

    def save(self, data: Filler) -> None:
        """Store a folder in place of the one before, atomically.

        Args:
            data: fills the folder it is given and returns the manifest's own entries.
        """
        with explain_storage_errors(self._path):
            write_folder(self._path, data)

    def _exists(self) -> bool:
        return (self._path / MANIFEST).is_file()

    def _made_by(self) -> str:
        """The command that fills the folder, which lies in that of its run."""
        return suggest_command(self._path.parent.parent.name, self._path.parent.name)


class ExportDataset(_FilledFolderDataset[dict[str, Callable[[], Any]]]):
    """One folder of exported parquet tables with a card, which other programs open."""

    def load(self) -> dict[str, Callable[[], pa.Table]]:
        """By name of the table, a function that reads it.

        Raises:
            DatasetError: nothing is stored here; or caused by a `CorruptFolderError` that names the damaged file.
        """
        if read_manifest(self._path) is None:
            raise DatasetError(f"{self._path} holds no export; {self._made_by()} makes one.")
        files = sorted(self._path.glob("*/train-*.parquet"))
        return {path.parent.name: partial(read_table, path, f"Delete {self._path}.") for path in files}


class SiteDataset(_FilledFolderDataset[Path]):
    """The static site of a run's episodes, a folder."""

    def save(self, data: Filler) -> None:
        """Store a site in place of the one before, and say where it opens."""
        super().save(data)
        logger.info("open %s in a browser", self.load().absolute().as_uri())

    def load(self) -> Path:
        """The page that opens the site.

        Raises:
            DatasetError: nothing is stored here.
        """
        if not self._exists():
            raise DatasetError(f"{self._path} holds no site; {self._made_by()} makes one.")
        return self._path / "index.html"
