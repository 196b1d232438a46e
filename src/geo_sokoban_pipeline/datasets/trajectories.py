"""Stored episodes in the catalog: parts of iterations as Arrow tables; `episode_views` reads all of them at once."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import pyarrow.parquet as pq
from kedro.utils import load_obj

from geo_sokoban_pipeline.datasets.iterations import IterationPartitions, read_iteration
from geo_sokoban_pipeline.datasets.tables import shorten
from geo_sokoban_pipeline.runs.storage import Rewind, Thin, explain_storage_errors
from geo_sokoban_pipeline.trajectories.index import measure_tokens, tidy_index, write_index
from geo_sokoban_pipeline.trajectories.parquet import (
    OtherVersionError,
    TornFileError,
    check_file,
    read_trajectories,
    write_trajectories,
)
from geo_sokoban_pipeline.trajectories.schema import TrajectoryContract
from geo_sokoban_pipeline.trajectories.thinning import read_thinning, thin_table

if TYPE_CHECKING:
    import pyarrow as pa
    from kedro_datasets._typing import HTMLPreview


class TrajectoriesDataset(IterationPartitions):
    """Episodes by iteration and part, `iter=00012/part-000.parquet`.

    Saves {partition: pyarrow.Table or TrajectoryBatch}; loads {partition: callable -> pyarrow.Table}, image bytes
    dictionary-encoded. `name_parts` makes such a dict from an iteration's episodes.

    Each part has rows in the run's index, written and deleted with it (`trajectories/index.py`).

    Args:
        path: folder of all partitions, in the folder of a run's outputs.
        tasks: dotted name of the function that finds a task by its name, for answers and tags in the index; None: no
            index.
        previewer: dotted name of the function that makes the HTML of a preview from a table; None: there is none.
        metadata: ignored here; read by kedro-viz.
    """

    suffix = ".parquet"
    parted = True

    def __init__(
        self,
        path: str,
        tasks: str | None = None,
        previewer: str | None = None,
        metadata: dict[str, Any] | None = None,
    ) -> None:
        super().__init__(path, metadata)
        self._tasks = tasks
        self._previewer = previewer

    def rewind(self, after: int) -> None:
        """As in the base; a run does not continue beside episodes of another schema version.

        Raises:
            OtherVersionError: the oldest partition that stays has another version.
        """
        super().rewind(after)
        if self._tasks is not None:
            tidy_index(self._path)
        for name in self.partitions()[:1]:
            try:
                check_file(self._place(name))
            except OtherVersionError:
                raise
            except TornFileError:
                pass  # reading it names the damaged file; a run that continues need not read it

    def save(self, data: dict[str, Any] | Rewind | Thin) -> None:
        """As in the base; a `Thin` thins stored partitions, each atomically."""
        if not isinstance(data, Thin):
            super().save(data)
            return
        for name in self.partitions():
            if data.first <= read_iteration(name) <= data.last:
                with explain_storage_errors(self._place(name)):
                    self._thin(self._place(name), data)

    def _thin(self, path: Path, order: Thin) -> None:
        if read_thinning(pq.read_schema(path)) is not None:
            return
        table = read_trajectories(path)
        thinned = thin_table(table, order, self._path.parent, measure_tokens(table))
        write_trajectories(path, thinned)
        if self._tasks is not None and order.episodes > 1:  # else the index is as before
            write_index(path, thinned, load_obj(self._tasks))

    def _write(self, path: Path, value: Any) -> None:
        table = TrajectoryContract.to_table(value)
        write_trajectories(path, table)
        if self._tasks is not None:
            write_index(path, table, load_obj(self._tasks))

    def _read(self, path: Path, columns: Sequence[str] | None = None) -> pa.Table:
        """A partition; with `columns` only these are read, without tokens and images where numbers suffice."""
        return read_trajectories(path, columns)

    def _bytes_needed(self, value: Any) -> int | None:
        return int(TrajectoryContract.to_table(value).nbytes)

    def preview(self, nrows: int = 5) -> HTMLPreview:
        """Gallery of the newest episodes for kedro-viz; an empty text without episodes or previewer.

        Args:
            nrows: number of episodes, the last ones of the newest partition.
        """
        names, shown = self.partitions(), ""
        if names and self._previewer is not None:
            table = read_trajectories(self._place(names[-1]))
            shown = load_obj(self._previewer)(table.slice(max(table.num_rows - nrows, 0)))
        return cast("HTMLPreview", shown)


def preview_cell(value: Any) -> Any:
    """A value as kedro-viz can show it: a number, or a short text."""
    return value if value is None or isinstance(value, bool | int | float) else shorten(str(shorten(value)))
