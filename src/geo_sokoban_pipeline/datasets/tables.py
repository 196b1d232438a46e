"""Files of a task's data: they lie in a folder that is the id of their settings, and are never changed."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping
from itertools import islice, zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import pyarrow as pa
import pyarrow.parquet as pq
from kedro.io import DatasetError
from kedro.utils import load_obj

from geo_sokoban_pipeline.datasets.iterations import IterationPartitions, PathDataset
from geo_sokoban_pipeline.formats import type_name
from geo_sokoban_pipeline.runs.folders import INTERMEDIATE, RAW
from geo_sokoban_pipeline.runs.row_stream import RowStream, stored_rows, write_rows
from geo_sokoban_pipeline.runs.storage import explain_storage_errors, file_digest, write_atomic, write_once

if TYPE_CHECKING:
    import pandas as pd
    from kedro_datasets._typing import HTMLPreview, TablePreview


TaskData = Mapping[str, Mapping[str, str]]  # `${task_data:}`: by task, `id` of its data and module of its `schemas`


def with_data_id(path: str, task: str | None, data: TaskData | None) -> str:
    """A path of the catalog with the id of a task's data for `<data_id>`."""
    return path if data is None else path.replace("<data_id>", data[str(task)]["id"])


# Tables on disk: a pandas frame or a stream of rows as one parquet file with a pinned schema, written atomically.


logger = logging.getLogger(__name__)
_SHOWN_TEXT = 80


class FrameDataset(PathDataset[Any, Any]):
    """One parquet file as a pandas frame.

    Args:
        path: the file; its folder is made on save.
        schema: dotted name of a `pyarrow.Schema`. Its columns must be there, in its types, on save and on load; columns
            beyond it are kept behind them with inferred types, as JSON text where a column mixes types. None: no
            column is pinned.
        task: whose table it is; `schema` then is a name in the module of its schemas, without which none is pinned.
        data: `${task_data:}`, which has that module, and the id for `<data_id>` in the path. A table of an id is
            written once: saving equal rows again does nothing, saving others is an error. A file that is torn or lacks
            pinned columns is replaced.
        metadata: ignored by Kedro, read by Kedro-Viz.
    """

    def __init__(
        self,
        *,
        path: str,
        schema: str | None = None,
        task: str | None = None,
        data: TaskData | None = None,
        metadata: dict[str, Any] | None = None,
    ) -> None:
        super().__init__(with_data_id(path, task, data), metadata)
        if data is not None:
            module = data[str(task)]["schemas"]
            schema = f"{module}.{schema}" if module and schema else None
        self._schema = schema
        self._once = data is not None

    def load(self) -> pd.DataFrame:
        """The frame.

        Raises:
            DatasetError: no file, a torn file, or one whose pinned columns are missing or of another type.
        """
        self._check_file()
        return table_to_frame(read_table(self._path, "Delete it to have it made again."))

    def save(self, data: pd.DataFrame | RowStream) -> None:
        """Write the frame, or walk through the stream and write its rows.

        Raises:
            DatasetError: a pinned column is missing, or a value does not fit its type; the message names the column.
                A stream without a pinned schema. Other rows than those that are stored, of a task.
        """
        if isinstance(data, RowStream):
            self._save_stream(data)
            return
        table = self._to_table(data)
        with explain_storage_errors(self._path, lambda: int(table.nbytes)):
            self._write(lambda temporary: pq.write_table(table, temporary, compression="zstd"))

    def preview(self, nrows: int = 5) -> TablePreview:
        """First rows for Kedro-Viz, long texts such as data URIs cut to 80 characters."""
        found = self._check_file()
        first = list(islice(stored_rows(self._path), nrows))
        names = list(first[0]) if first else found.names
        rows = [[shorten(value) for value in row.values()] for row in first]
        return {"index": list(range(len(rows))), "columns": names, "data": rows}

    def _save_stream(self, rows: RowStream) -> None:
        if self._schema is None:
            raise DatasetError(f"{self._path}: rows that are written one by one need a schema in the catalog.")
        schema = load_schema(self._schema)
        try:
            with explain_storage_errors(self._path):
                self._write(lambda temporary: write_rows(rows, schema, temporary))
        except ValueError as error:
            raise DatasetError(f"{self._path}: {error}") from error

    def _write(self, write: Callable[[Path], Any]) -> None:
        if not self._once:
            write_atomic(self._path, write)
        elif not write_once(self._path, write, self._holds):
            raise DatasetError(
                f"{self._path} holds other rows than the same settings give now. Data are written once, because runs "
                "rely on them. Either the source has changed behind its name (the main branch of a hub dataset: name a "
                "commit in hub.revision; images below image_folder), or the code that makes the rows has changed. "
                f"To make them again, delete {self._path.parent} and the folders of the same name in {RAW} and "
                f"{INTERMEDIATE}; runs that were made with the old rows can then no longer be evaluated on them."
            )

    def _holds(self, made: Path) -> bool | None:
        """Whether the stored table has the rows of a file; None: what is stored is no table of this schema."""
        try:
            self._check_file()
            if file_digest(self._path) == file_digest(made):
                return True
            # Another version of the library may write the same rows in other bytes.
            pairs = zip_longest(stored_rows(self._path), stored_rows(made), fillvalue=object())
            return all(one == other for one, other in pairs)
        except (DatasetError, ValueError, OSError, pa.ArrowException) as error:
            logger.warning("%s is replaced: %s", self._path, " ".join(str(error).split()))
            return None

    def _to_table(self, data: pd.DataFrame) -> pa.Table:
        schema = load_schema(self._schema) if self._schema else pa.schema([])
        if missing := [name for name in schema.names if name not in data.columns]:
            raise DatasetError(f"{self._path}: the frame lacks the columns {missing} of {self._schema}.")
        names = [*schema.names, *(name for name in data.columns if name not in schema.names)]
        pinned = {name: schema.field(name) for name in schema.names}
        columns = {name: _to_array(data[name], pinned.get(name) or pa.field(str(name), pa.null())) for name in names}
        fields = [pinned.get(name) or pa.field(str(name), column.type) for name, column in columns.items()]
        return pa.Table.from_arrays(list(columns.values()), schema=pa.schema(fields))

    def _check_file(self) -> pa.Schema:
        """Schema of the file, which is there and has the pinned columns."""
        if not self._path.is_file():
            raise DatasetError(f"{self._path} does not exist; run the pipeline that makes it.")
        try:
            found = pq.read_schema(self._path)
        except (pa.ArrowInvalid, OSError) as error:
            raise DatasetError(
                f"{self._path} is not a readable parquet file ({error}). Delete it to have it made again."
            ) from error
        for field in load_schema(self._schema) if self._schema else ():
            there = found.field(field.name).type if field.name in found.names else "missing"
            if there != field.type:
                raise DatasetError(
                    f"{self._path}: column {field.name} is {there}, {field.type} expected. "
                    "The file is foreign or of another version; delete it to have it made again."
                )
        return found

    def _exists(self) -> bool:
        return self._path.is_file()

    def _describe(self) -> dict[str, Any]:
        return {**super()._describe(), "schema": self._schema}


class PromptsDataset(FrameDataset):
    """The same file, whose rows have images: kedro-viz shows them.

    Args:
        previewer: dotted name of the function that makes the HTML of a preview from rows.
        options: those of `FrameDataset`.
    """

    def __init__(self, *, previewer: str, **options: Any) -> None:
        super().__init__(**options)
        self._previewer = previewer

    def preview(self, nrows: int = 5) -> HTMLPreview:
        """Gallery of the first rows for kedro-viz."""
        self._check_file()
        return cast("HTMLPreview", load_obj(self._previewer)(list(islice(stored_rows(self._path), nrows))))


class RowStreamDataset(FrameDataset):
    """The same file, loaded as a `RowStream`: for tables whose images should not all be in memory."""

    def load(self) -> RowStream:
        """The rows, read during the iteration over them.

        Raises:
            DatasetError: as for a frame; a file that is torn inside is found while walking.
        """
        self._check_file()
        return stored_rows(self._path)


class TablePartsDataset(IterationPartitions):
    """Arrow tables by iteration and part with a pinned schema, `iter=00012/part-000.parquet`: side tables of episodes.

    Saves {partition: pyarrow.Table}; loads {partition: callable -> pyarrow.Table}.

    Args:
        path: folder of all partitions.
        schema: dotted name of a `pyarrow.Schema`.
        metadata: ignored here; read by kedro-viz.
    """

    suffix = ".parquet"
    parted = True

    def __init__(self, path: str, schema: str, metadata: dict[str, Any] | None = None) -> None:
        super().__init__(path, metadata)
        self._schema = schema

    def _write(self, path: Path, value: Any) -> None:
        self._check(path, value.schema)
        write_atomic(path, lambda temporary: pq.write_table(value, temporary, compression="zstd"))

    def _read(self, path: Path) -> pa.Table:
        table = read_table(path, "Delete its folder.")
        self._check(path, table.schema)
        return table

    def _bytes_needed(self, value: Any) -> int | None:
        return int(value.nbytes)

    def _check(self, path: Path, found: pa.Schema) -> None:
        wanted = load_schema(self._schema)
        if not found.equals(wanted):
            missing = [name for name in wanted.names if name not in found.names]
            raise DatasetError(f"{path}: the table is no {self._schema}; it lacks {missing}, or has other types.")


def read_table(path: Path, way_out: str) -> pa.Table:
    """All of a parquet file.

    Raises:
        DatasetError: it is torn; the message ends with the way out.
    """
    try:
        # Not pq.read_table: it would take folders such as `iter=00001` in the path for columns.
        with pq.ParquetFile(path) as file:
            return file.read()
    except (pa.ArrowException, OSError) as error:
        raise DatasetError(f"{path} is not a readable parquet file ({error}). {way_out}") from error


def load_schema(name: str) -> pa.Schema:
    """Schema of a dotted name, such as `package.module.PROMPTS`.

    Raises:
        DatasetError: no such module or name, or no schema under it.
    """
    try:
        schema = load_obj(name)
    except (ImportError, AttributeError, ValueError) as error:
        raise DatasetError(
            f"schema={name!r}: no such schema ({error}); give the dotted name of a pyarrow.Schema."
        ) from error
    if not isinstance(schema, pa.Schema):
        raise DatasetError(f"schema={name!r} is {type_name(schema)}; give the dotted name of a pyarrow.Schema.")
    return schema


def table_to_frame(table: pa.Table) -> pd.DataFrame:
    """Frame of a table: flat columns without nulls in pandas' own types, all others as Python objects with None."""
    import pandas as pd

    columns = {
        name: column.to_pandas()
        if pa.types.is_primitive(column.type) and column.null_count == 0
        else pd.Series(column.to_pylist(), dtype=object)
        for name, column in zip(table.column_names, table.columns, strict=True)
    }
    return pd.DataFrame(columns, columns=table.column_names)


def shorten(value: Any) -> Any:
    """JSON value to look at: texts beyond 80 characters are cut, bytes are counted, lists and dicts walked through."""
    if isinstance(value, str):
        return value if len(value) <= _SHOWN_TEXT else f"{value[:_SHOWN_TEXT]}… ({len(value)} characters)"
    if isinstance(value, bytes):
        return f"<{len(value)} bytes>"
    if isinstance(value, dict):
        return {key: shorten(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [shorten(item) for item in value]
    # numpy scalars are no JSON values.
    return value.item() if hasattr(value, "item") else value


def preview_cell(value: Any) -> Any:
    """A value as kedro-viz can show it: a number, or a short text."""
    return value if value is None or isinstance(value, bool | int | float) else shorten(str(shorten(value)))


def _to_array(values: pd.Series, field: pa.Field) -> pa.Array:
    inferred = pa.types.is_null(field.type)
    try:
        array = pa.Array.from_pandas(values, type=None if inferred else field.type)
    except (pa.ArrowInvalid, pa.ArrowTypeError, pa.ArrowNotImplementedError) as error:
        if not inferred:
            raise DatasetError(f"column {field.name}: a value does not fit {field.type} ({error}).") from error
        # Columns of foreign rows may mix types, which Arrow cannot hold; as JSON text nothing is lost.
        array = pa.array([None if value is None else json.dumps(value, default=str) for value in values], pa.string())
    if not field.nullable and array.null_count:
        raise DatasetError(f"column {field.name}: {array.null_count} values are missing, none may be.")
    return array.combine_chunks() if isinstance(array, pa.ChunkedArray) else array
