"""Streams of rows: the same rows each time, a few in memory, a file as a whole or not at all."""

from __future__ import annotations

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from geo_sokoban_pipeline.runs.row_stream import BATCH_ROWS, RowStream, stored_rows, write_rows

SCHEMA = pa.schema([pa.field("a", pa.int64(), nullable=False), pa.field("b", pa.list_(pa.string()))])


def stream(count):
    return RowStream(lambda: ({"a": i, "b": [str(i)], "c": "left out"} for i in range(count)))


@pytest.mark.parametrize("count", [0, 1, BATCH_ROWS, BATCH_ROWS + 1])
def test_round_trip(tmp_path, count):
    write_rows(stream(count), SCHEMA, tmp_path / "x.parquet")
    rows = stored_rows(tmp_path / "x.parquet")
    assert list(rows) == list(rows) == [{"a": i, "b": [str(i)]} for i in range(count)]
    assert pq.read_schema(tmp_path / "x.parquet") == SCHEMA


def test_rows_are_made_as_they_are_written_and_read(tmp_path):
    made = []

    def rows():
        for i in range(10 * BATCH_ROWS):
            made.append(i)
            yield {"a": i, "b": None}

    write_rows(RowStream(rows), SCHEMA, tmp_path / "x.parquet")
    assert pq.ParquetFile(tmp_path / "x.parquet").num_row_groups == 10
    assert len(made) == 10 * BATCH_ROWS
    walk = iter(RowStream(rows))
    next(walk)
    assert len(made) == 10 * BATCH_ROWS + 1


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"a": "x", "b": None}, "column a: a value does not fit int64"),
        ({"a": None, "b": None}, "column a: 1 values are missing, none may be"),
        ({"b": ["x"]}, "column a: 1 values are missing"),
        ({"a": 1, "b": [5]}, "column b: a value does not fit"),
    ],
)
def test_values_that_do_not_fit(tmp_path, row, message):
    with pytest.raises(ValueError, match=message):
        write_rows(RowStream(lambda: iter([row])), SCHEMA, tmp_path / "x.parquet")


def test_torn_files_are_named(tmp_path):
    path = tmp_path / "x.parquet"
    write_rows(stream(5), SCHEMA, path)
    path.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(ValueError, match=r"x\.parquet is not a readable parquet file"):
        list(stored_rows(path))
