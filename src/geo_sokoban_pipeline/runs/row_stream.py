"""Tables that need not fit into memory: rows are made one by one, at each iteration over them.

A `RowStream` is a value, not an iterator: iterating twice gives the same rows twice. So a node may return one and a
dataset may write it with only a few rows in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.parquet as pq

Row = dict[str, Any]
# Rows that are handled together: with images of a hundred kilobytes, a few megabytes.
BATCH_ROWS = 32


@dataclass(frozen=True)
class RowStream:
    """Rows on demand.

    Attributes:
        start: gives a new iterator over all rows.
    """

    start: Callable[[], Iterator[Row]]

    def __iter__(self) -> Iterator[Row]:
        return self.start()


def write_rows(rows: RowStream, schema: pa.Schema, path: Path) -> None:
    """Write rows as a parquet file, one row group for each batch.

    Args:
        rows: their values must fit the schema; other names are left out.

    Raises:
        ValueError: a value does not fit its column, or is missing where none may be; the message names the column.
    """
    import pyarrow.parquet as pq

    with pq.ParquetWriter(path, schema, compression="zstd") as writer:
        walk = iter(rows)
        while batch := list(islice(walk, BATCH_ROWS)):
            writer.write_table(_to_table(batch, schema))


def stored_rows(path: Path) -> RowStream:
    """Rows of a parquet file, read as they are walked through.

    Raises:
        ValueError: while walking: the file is torn.
    """

    def read() -> Iterator[Row]:
        import pyarrow as pa

        try:
            with open_parquet(path) as file:
                for batch in file.iter_batches(batch_size=BATCH_ROWS):
                    yield from batch.to_pylist()
        except pa.ArrowException as error:
            raise ValueError(
                f"{path} is not a readable parquet file ({error}). Delete it to have it made again."
            ) from error

    return RowStream(read)


def open_parquet(path: Path) -> pq.ParquetFile:
    """A parquet file of which pages are read as they are needed; by default all of it would be fetched ahead.

    Raises:
        pyarrow.ArrowInvalid, OSError: no such file, or torn.
    """
    import pyarrow.parquet as pq

    return pq.ParquetFile(path, buffer_size=1 << 20, pre_buffer=False)


def _to_table(rows: list[Row], schema: pa.Schema) -> pa.Table:
    import pyarrow as pa

    columns = []
    for field in schema:
        try:
            column = pa.array([row.get(field.name) for row in rows], field.type)
        except (pa.ArrowInvalid, pa.ArrowTypeError) as error:
            raise ValueError(f"column {field.name}: a value does not fit {field.type} ({error}).") from error
        if not field.nullable and column.null_count:
            raise ValueError(f"column {field.name}: {column.null_count} values are missing, none may be.")
        columns.append(column)
    return pa.Table.from_arrays(columns, schema=schema)
