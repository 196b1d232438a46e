"""Tables of a data id are written once: equal ones change nothing, others are refused, torn ones are made again."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from kedro.io import DatasetError

from geo_sokoban_pipeline.datasets.files import JsonFileDataset
from geo_sokoban_pipeline.datasets.tables import FrameDataset, RowStreamDataset
from geo_sokoban_pipeline.runs.row_stream import RowStream

SCHEMAS = "geo_sokoban_pipeline.envs.sokoban.data"
ROWS = [{"row_id": f"row_{k}", "reason": "torn", "raw": "#", "source": "file"} for k in range(70)]


def table(folder, kind=FrameDataset, task="sokoban"):
    data = {"sokoban": {"id": "one", "schemas": SCHEMAS}, "dots": {"id": "two", "schemas": ""}}
    return kind(path=str(folder / "<data_id>" / "rejected.parquet"), schema="REJECTED", task=task, data=data)


def made(rows, kind):
    return RowStream(lambda: iter(rows)) if kind is RowStreamDataset else pd.DataFrame(rows)


@pytest.fixture(params=[FrameDataset, RowStreamDataset])
def kind(request):
    return request.param


def test_a_task_without_schemas_pins_no_column(tmp_path):
    table(tmp_path, task="dots").save(pd.DataFrame({"a": [1, 2]}))
    assert pq.read_table(tmp_path / "two" / "rejected.parquet").to_pydict() == {"a": [1, 2]}
    with pytest.raises(DatasetError, match="lacks the columns"):
        table(tmp_path).save(pd.DataFrame({"a": [1, 2]}))


def test_equal_rows_again_change_nothing(tmp_path, kind):
    dataset, path = table(tmp_path, kind=kind), tmp_path / "one" / "rejected.parquet"
    dataset.save(made(ROWS, kind))
    # What another version of the library has written in other bytes stays too.
    for rewrite in (lambda: None, lambda: pq.write_table(pq.ParquetFile(path).read(), path, row_group_size=7)):
        rewrite()
        before = (path.stat().st_ino, path.read_bytes())
        dataset.save(made(ROWS, kind))
        assert (path.stat().st_ino, path.read_bytes()) == before
    assert os.listdir(path.parent) == [path.name]


@pytest.mark.parametrize("other", [ROWS[:-1], [*ROWS, ROWS[0]], [{**ROWS[0], "reason": "x"}, *ROWS[1:]], ROWS[::-1]])
def test_other_rows_are_refused_with_the_way_out(tmp_path, kind, other):
    dataset, path = table(tmp_path, kind=kind), tmp_path / "one" / "rejected.parquet"
    dataset.save(made(ROWS, kind))
    before = path.read_bytes()
    with pytest.raises(DatasetError) as error:
        dataset.save(made(other, kind))
    for words in (f"{path} holds other rows", "name a commit in hub.revision", f"delete {path.parent}"):
        assert words in str(error.value)
    assert path.read_bytes() == before
    assert os.listdir(path.parent) == [path.name]


@pytest.mark.parametrize(
    "spoil",
    [
        lambda path: path.write_bytes(path.read_bytes()[:-9]),
        # A page of the file: its schema still reads.
        lambda path: path.write_bytes(path.read_bytes()[:4] + bytes(56) + path.read_bytes()[60:]),
        lambda path: pq.write_table(pa.table({"a": [1]}), path),
    ],
    ids=["cut", "inside", "of somebody else"],
)
def test_a_damaged_file_is_made_again(tmp_path, kind, spoil):
    dataset, path = table(tmp_path, kind=kind), tmp_path / "one" / "rejected.parquet"
    dataset.save(made(ROWS, kind))
    before = path.read_bytes()
    spoil(path)
    dataset.save(made(ROWS, kind))
    assert path.read_bytes() == before


def test_many_at_once_leave_one_whole_file(tmp_path):
    """All make the same rows: whoever is first puts them in place, and none of the others fails."""
    with ThreadPoolExecutor(8) as pool:
        for _ in pool.map(lambda _: table(tmp_path).save(pd.DataFrame(ROWS)), range(24)):
            pass
    assert table(tmp_path).load().to_dict("records") == ROWS
    assert os.listdir(tmp_path / "one") == ["rejected.parquet"]


def test_of_two_who_make_other_rows_one_is_refused(tmp_path):
    def save(rows):
        try:
            table(tmp_path).save(pd.DataFrame(rows))
        except DatasetError:
            return False
        return True

    with ThreadPoolExecutor(2) as pool:
        assert sorted(pool.map(save, (ROWS, ROWS[::-1]))) == [False, True]


def test_a_file_system_without_links_does(tmp_path, monkeypatch):
    def refuse(*_, **__):
        raise PermissionError("no links here")

    monkeypatch.setattr(os, "link", refuse)
    table(tmp_path).save(pd.DataFrame(ROWS))
    assert table(tmp_path).load().to_dict("records") == ROWS


def test_a_json_value_is_whole_or_as_before(tmp_path):
    """The stock dataset would leave an empty file."""
    path = tmp_path / "budget.json"
    dataset = JsonFileDataset(filepath=path)
    dataset.save({"steps": 1.5})
    with pytest.raises(DatasetError):
        dataset.save({"steps": [2.5, object()]})
    assert dataset.load() == {"steps": 1.5} and os.listdir(tmp_path) == [path.name]
    path.write_text('{"steps"')
    with pytest.raises(DatasetError, match=f"{path} is not readable JSON"):
        dataset.load()
