"""Tables: what is loaded equals what was saved, broken files are named, and tables of a data id are written once."""

from __future__ import annotations

import json
import os
from concurrent.futures import ThreadPoolExecutor

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kedro.io import DatasetError

from geo_sokoban_pipeline.datasets.files import JsonFileDataset
from geo_sokoban_pipeline.datasets.tables import FrameDataset, RowStreamDataset, load_schema, shorten
from geo_sokoban_pipeline.runs.row_stream import RowStream

SCHEMAS = "geo_sokoban_pipeline.envs.sokoban.data"
REJECTED = f"{SCHEMAS}.REJECTED"


def frame_of(columns):
    return pd.DataFrame({name: pd.Series(values, dtype=object) for name, values in columns.items()})


def rejected(**changes):
    return frame_of({"row_id": ["a"], "reason": ["r"], "raw": ["x"], "source": ["s"], **changes})


@pytest.mark.parametrize(
    ("name", "values", "loaded"),
    [
        ("ints with a gap", [1, None, 3], None),
        ("texts with a gap", ["a", None, "ü√"], None),
        ("lists", [[1, 2], [], None], None),
        ("nested lists", [[["a"], []], [[]], [["b", "c"]]], None),
        ("structs", [{"a": [1], "b": "x"}, {"a": [], "b": None}, None], None),
        ("bytes", [b"\x00\xff", b"", None], None),
        ("nothing at all", [None, None, None], None),
        ("mixed types are JSON", [1, "a", None, {"b": 2}], ["1", '"a"', None, '{"b": 2}']),
    ],
)
def test_round_trip(tmp_path, name, values, loaded):
    dataset = FrameDataset(path=str(tmp_path / "iter=00001" / "x.parquet"))  # this folder is no column
    dataset.save(frame_of({name: values}))
    assert dataset.load().to_dict("list") == {name: loaded or values}


@given(st.lists(st.tuples(st.text(st.characters(exclude_categories=["Cs"])), st.lists(st.integers(0, 9))), max_size=5))
@settings(max_examples=25, deadline=None)
def test_any_table_survives(tmp_path_factory, rows):
    dataset = FrameDataset(path=str(tmp_path_factory.mktemp("frames") / "x.parquet"), schema=REJECTED)
    texts = [text for text, _ in rows]
    extra = [numbers for _, numbers in rows]
    dataset.save(frame_of({"row_id": texts, "reason": texts, "raw": texts, "source": texts, "numbers": extra}))
    loaded = dataset.load()
    assert loaded["raw"].tolist() == texts
    assert loaded["numbers"].tolist() == extra


@pytest.mark.parametrize("name", ["RAW_LEVELS", "PROMPTS", "REJECTED"])
def test_empty_table_keeps_its_types(tmp_path, name):
    dataset = FrameDataset(path=str(tmp_path / "x.parquet"), schema=f"{SCHEMAS}.{name}")
    schema = load_schema(f"{SCHEMAS}.{name}")
    dataset.save(pd.DataFrame(columns=schema.names))
    assert pq.read_schema(tmp_path / "x.parquet") == schema
    assert list(dataset.load().columns) == schema.names


@pytest.mark.parametrize(
    ("frame", "message"),
    [
        (rejected().drop(columns="reason"), "lacks the columns ['reason']"),
        (rejected(reason=[7]), "column reason: a value does not fit string"),
        (rejected(reason=[None]), "column reason: 1 values are missing"),
    ],
)
def test_frames_that_do_not_fit_change_nothing(tmp_path, frame, message):
    dataset = FrameDataset(path=str(tmp_path / "x.parquet"), schema=REJECTED)
    dataset.save(rejected(raw=["kept"]))
    with pytest.raises(DatasetError) as error:
        dataset.save(frame)
    assert message in str(error.value)
    assert dataset.load()["raw"].tolist() == ["kept"]
    assert [path.name for path in tmp_path.iterdir()] == ["x.parquet"]


@pytest.mark.parametrize("kind", [FrameDataset, RowStreamDataset])
def test_files_that_do_not_fit_are_named(tmp_path, kind):
    path = tmp_path / "x.parquet"
    dataset = kind(path=str(path), schema=REJECTED)
    assert not dataset.exists()
    with pytest.raises(DatasetError, match="does not exist"):
        dataset.load()
    dataset.save(rejected())
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(DatasetError, match="not a readable parquet file"):
        list(dataset.load())
    for reason, message in (
        ([1], "column reason is int64"),
        (None, "column reason is missing"),
    ):
        columns = {"row_id": ["a"], "reason": reason, "raw": ["x"], "source": ["s"]}
        pq.write_table(pa.table({name: values for name, values in columns.items() if values}), path)
        with pytest.raises(DatasetError, match=f"{message}, string expected"):
            list(dataset.load())


@pytest.mark.parametrize("name", ["nowhere.SCHEMA", f"{SCHEMAS}.NONE", "PROMPTS", f"{SCHEMAS}.pa"])
def test_unknown_schemas_are_named(name):
    with pytest.raises(DatasetError, match=name):
        load_schema(name)


def test_preview_is_short_json(tmp_path):
    dataset = FrameDataset(path=str(tmp_path / "x.parquet"))
    dataset.save(frame_of({"images": [["data:" + "x" * 900]] * 9, "n": [1] * 9, "b": [b"123"] * 9, "gap": [None] * 9}))
    shown = dataset.preview(nrows=2)
    assert (shown["columns"], len(shown["data"])) == (["images", "n", "b", "gap"], 2)
    assert len(json.dumps(shown)) < 500
    assert "(905 characters)" in shown["data"][0][0][0]
    assert shorten({"a": ("b" * 81, 1, None)}) == {"a": ["b" * 80 + "… (81 characters)", 1, None]}


# Streams


def rejected_rows(count):
    return RowStream(
        lambda: iter([{"row_id": str(i), "reason": "r", "raw": "x" * 200, "source": "s"} for i in range(count)])
    )


def test_streams_and_frames_are_one_file(tmp_path):
    frames, streams = (
        kind(path=str(tmp_path / "x.parquet"), schema=REJECTED) for kind in (FrameDataset, RowStreamDataset)
    )
    frames.save(rejected_rows(40))
    assert frames.load()["row_id"].tolist() == [str(i) for i in range(40)]
    assert list(streams.load()) == list(rejected_rows(40))
    streams.save(rejected(raw=["kept"]))
    assert [row["raw"] for row in streams.load()] == ["kept"]
    assert streams.preview(nrows=1)["data"][0][2] == "kept"
    streams.save(rejected_rows(0))
    assert streams.preview() == {"index": [], "columns": ["row_id", "reason", "raw", "source"], "data": []}
    with pytest.raises(DatasetError, match="need a schema"):
        FrameDataset(path=str(tmp_path / "x.parquet")).save(rejected_rows(1))


def test_a_stream_that_fails_changes_nothing(tmp_path):
    dataset = RowStreamDataset(path=str(tmp_path / "x.parquet"), schema=REJECTED)
    dataset.save(rejected_rows(2))

    def rows():
        yield from rejected_rows(40)
        yield {"row_id": None, "reason": "r", "raw": "x", "source": "s"}

    with pytest.raises(DatasetError, match="column row_id: 1 values are missing"):
        dataset.save(RowStream(rows))
    assert len(list(dataset.load())) == 2
    assert [path.name for path in tmp_path.iterdir()] == ["x.parquet"]


# Tables of a data id are written once: equal ones change nothing, others are refused, torn ones are made again.

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
    # Rows that another version of the library has written in other bytes stay too.
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
