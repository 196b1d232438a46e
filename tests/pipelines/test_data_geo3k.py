"""data_geo3k as Kedro runs it: from every source to prompts on disk, with repairs, quarantine and overlaps."""

from __future__ import annotations

import base64
import io
from pathlib import Path

import numpy as np
import pytest
import yaml
from kedro.io import DatasetError
from PIL import Image

from geo_sokoban_pipeline.config.base import validate_parameters
from geo_sokoban_pipeline.envs.geo3k.data import PROMPTS
from geo_sokoban_pipeline.envs.geo3k.figures.generation import ProblemsExhaustedError
from geo_sokoban_pipeline.envs.images import read_data_uri
from geo_sokoban_pipeline.envs.rows import read_rows
from geo_sokoban_pipeline.pipelines.hub_rows import SourceUnavailableError
from geo_sokoban_pipeline.tasks import task_of
from problem_rows import ALL, source_row, uri, write_bytes, write_uris
from task_tables import run_data

ROOT = Path(__file__).parents[2]
TABLES = ("prompts", "validation_prompts", "eval_prompts")
FEW = {"train": 20, "validation": 5, "eval": 10}


def run(folder, parameters, task="geo3k"):
    return run_data(folder, parameters, task)


def prompts(catalog, task="geo3k"):
    return {name: catalog.load(f"{task}.{name}").to_dict("records") for name in TABLES}


def from_files(path, validation=None, evaluation=None, **changes):
    files = {"path": path, "validation_path": validation, "eval_path": evaluation}
    return {
        "source": "file",
        "file": {name: file and str(file) for name, file in files.items()},
        "counts": ALL,
        **changes,
    }


@pytest.mark.parametrize("task", ["sokoban", "geo3k", "geo3k_multi_turn"])
def test_default_parameters_are_the_options_defaults(task):
    file = "sokoban" if task == "sokoban" else "geo3k"
    stored = yaml.safe_load((ROOT / "conf/base/parameters" / f"{file}.yml").read_text())[task]
    model = task_of(task).data_config
    assert validate_parameters(stored, model) == model()


# Generated problems


def test_generated(tmp_path):
    catalog = run(tmp_path, {"counts": FEW})
    tables = prompts(catalog)
    assert [len(rows) for rows in tables.values()] == list(FEW.values())
    assert list(catalog.load("geo3k.prompts").columns) == PROMPTS.names
    rows = [row for table in tables.values() for row in table]
    assert len({row["problem_hash"] for row in rows}) == len({row["image_hashes"][0] for row in rows}) == 35
    for row in rows:
        assert row["prompt"] == row["problem"] == f"<image>{row['question']}"
        assert row["family"] and row["difficulty"] == "tiny"
        assert row["answer"] in {one["label"] for one in row["candidates"]}
        assert read_data_uri(row["images"][0], max_bytes=1 << 20, max_pixels=1 << 20).mode == "RGB"
    assert catalog.load("geo3k.rejected").empty
    report = catalog.load("geo3k.data_report")
    assert report["splits"]["train"]["by_family"].keys() == {row["family"] for row in tables["prompts"]}


def test_held_out_problems_do_not_change_with_the_training_set(tmp_path):
    small, large = (prompts(run(tmp_path / str(n), {"counts": {**FEW, "train": n}})) for n in (5, 40))
    assert small["eval_prompts"] == large["eval_prompts"]
    assert small["validation_prompts"] == large["validation_prompts"]
    assert small["prompts"] == large["prompts"][:5]


def test_evaluation_alone(tmp_path):
    tables = prompts(run(tmp_path, {"counts": {"train": 0, "validation": 0, "eval": 6}}))
    assert [len(rows) for rows in tables.values()] == [0, 0, 6]


def test_too_many_problems_are_refused(tmp_path):
    with pytest.raises(ProblemsExhaustedError, match=r"geo3k\.counts=.*train=100000: .* for this split"):
        run(tmp_path, {"counts": {**FEW, "train": 100_000}, "problems": {"angle_step": 2, "lengths": [10, 10]}})
    assert not list(tmp_path.iterdir())


# Files


def test_real_rows(tmp_path, shared_data):
    path = shared_data / "geometry3k_small.parquet"
    source = {row["problem"] + row["answer"]: row for _, row in read_rows(str(path))}
    single = prompts(run(tmp_path / "single", from_files(path)))
    multi = prompts(
        run(tmp_path / "multi", from_files(path, instruction="tool"), "geo3k_multi_turn"), "geo3k_multi_turn"
    )
    for name in TABLES:
        for plain, told in zip(single[name], multi[name], strict=True):
            row = source.pop(plain["problem"] + plain["answer"])
            assert told["problem"].endswith("\n\n" + row["problem"])
            assert told["images"] == plain["images"]
            with Image.open(io.BytesIO(row["images"][0]["bytes"])) as image:
                found = read_data_uri(plain["images"][0], max_bytes=1 << 22, max_pixels=1 << 22)
                assert np.array_equal(np.asarray(found), np.asarray(image.convert("RGB")))
    assert source == {}


@pytest.mark.parametrize(
    ("task", "instruction"), [("geo3k", "boxed"), ("geo3k_multi_turn", "tool"), ("geo3k_multi_turn", "tool_brief")]
)
def test_our_own_tables_are_a_source(tmp_path, task, instruction):
    first = prompts(run(tmp_path / "first", {"counts": FEW, "instruction": instruction}, task), task)
    (folder,) = (tmp_path / "first" / "05_model_input" / task).iterdir()
    paths = [folder / f"{name}.parquet" for name in TABLES]
    second = run(tmp_path / "second", from_files(*paths, instruction=instruction), task)
    assert prompts(second, task) == first


def test_bad_rows_are_quarantined(tmp_path, caplog):
    bad = [
        source_row(images=["https://example.com/a.png"]),
        source_row(images=[uri(b"\x89PNG broken")]),
        source_row(problem="<image>two placeholders<image>"),
        source_row(answer=" "),
    ]
    path = write_uris(tmp_path / "rows.parquet", [*[source_row(i) for i in range(20)], *bad])
    catalog = run(tmp_path / "data", from_files(path))
    rejected = catalog.load("geo3k.rejected")
    assert rejected["row_id"].tolist() == [f"train_{i:05d}" for i in range(20, 24)]
    assert ["remote" in rejected["reason"][0], "decoded" in rejected["reason"][1]] == [True, True]
    assert "example.com" in rejected["raw"][0]
    report = catalog.load("geo3k.data_report")
    assert (report["rows_read"], report["rows_rejected"], report["problems"]) == (24, 4, 20)
    assert sum(report["rejected_reasons"].values()) == 4
    assert "4 of 24 rows rejected (see geo3k.rejected)" in caplog.text
    assert len(list(catalog.load("geo3k.raw_problems"))) == 24  # whole, also the rejected ones


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([{"question": "q", "picture": "p"}], "none of 1 rows is a problem: 1 × problem is missing"),
        (
            [source_row(images=["http://x/y.png"])] * 3,
            "none of 3 rows is a problem: 3 × image 'http://x/y.png' is remote",
        ),
        (
            [{"problem": "Find x.", "answer": "1", "picture": uri(b"x")}] * 2,
            "2 × images and image are missing; the column picture looks like an image: rename it to image",
        ),
    ],
)
def test_files_without_one_problem(tmp_path, rows, message):
    path = write_uris(tmp_path / "rows.parquet", rows)
    with pytest.raises(ValueError, match=message):
        run(tmp_path / "data", from_files(path))


@pytest.mark.parametrize(("last", "copies", "level"), [(100, 1, "WARNING"), (101, 0, "INFO")])
def test_copies_are_counted_in_the_log_and_held_out_ones_are_a_warning(tmp_path, caplog, last, copies, level):
    caplog.set_level("INFO")
    train = write_uris(tmp_path / "train.parquet", [source_row(0), source_row(0), source_row(1)])
    validation = write_uris(tmp_path / "validation.parquet", [source_row(50)])
    evaluation = write_uris(tmp_path / "eval.parquet", [source_row(100), source_row(last)])
    run(tmp_path / "data", from_files(train, validation, evaluation))
    (said,) = [record for record in caplog.records if "copies among them" in record.getMessage()]
    counted = f"train 3 (1 copies), validation 1 (0 copies), eval 2 ({copies} copies)"
    assert said.getMessage().endswith(counted) and said.levelname == level


def test_empty_and_torn_files_are_named(tmp_path):
    path = write_uris(tmp_path / "rows.parquet", [source_row(i) for i in range(40)])
    with pytest.raises(ValueError, match="there are no rows"):
        run(tmp_path / "empty", from_files(f"{path}@[40:]"))
    raw = bytearray(path.read_bytes())
    path.write_bytes(raw[:200])
    with pytest.raises(ValueError, match=r"rows\.parquet is not a readable parquet file"):
        run(tmp_path / "data", from_files(path))
    raw[4:60] = b"\0" * 56  # the header of the first page
    path.write_bytes(raw)
    with pytest.raises((ValueError, DatasetError), match="is torn"):
        run(tmp_path / "data", from_files(path))
    assert not list((tmp_path / "data").rglob("*.parquet"))


def published(folder, kind):
    """A published data set in miniature: train and eval share images, one pair entirely."""
    folder.mkdir()
    evaluation = [source_row(100), source_row(0, problem="<image>Something else"), source_row(1)]
    splits = {"train": [source_row(i) for i in range(30)], "test": evaluation}
    if kind == "geometry3k":
        splits["validation"] = [source_row(200), source_row(2, problem="<image>Q")]
    for name, rows in splits.items():
        if kind == "imgurl":
            write_uris(folder / f"{name}.parquet", rows)
        else:
            images = [base64.b64decode(row["images"][0].partition(",")[2]) for row in rows]
            stored = [{**row, "images": [{"bytes": raw, "path": None}]} for row, raw in zip(rows, images, strict=True)]
            write_bytes(folder / f"{name}.parquet", stored)
    return folder


@pytest.mark.parametrize(
    ("rule", "excluded"), [("none", []), ("pairs", ["train_00001"]), ("images", ["train_00000", "train_00001"])]
)
def test_published_splits_that_overlap(tmp_path, rule, excluded, caplog):
    folder = published(tmp_path / "set", "imgurl")
    files = (folder / "train.parquet", None, folder / "test.parquet")
    catalog = run(tmp_path / "data", from_files(*files, exclude_overlaps=rule))
    report = catalog.load("geo3k.data_report")
    found = report["published_overlaps"]
    assert (found["images"]["train+eval"]["shared"], found["problems"]["train+eval"]["shared"]) == (2, 1)
    assert found["problems"]["train+eval"]["examples"] == [{"train": ["train_00001"], "eval": ["eval_00002"]}]
    index = catalog.load("geo3k.problem_index")
    assert index[index["status"] == "excluded"]["row_id"].tolist() == excluded
    assert report["overlaps"]["problems"] == int(rule == "none")
    assert report["overlaps"]["images"] == (0 if rule == "images" else 2 - len(excluded))
    assert report["rows_excluded"] == len(excluded)
    assert "images in both train and eval as published: 2" in caplog.text


# The hub, played by local folders of the same layout


def from_hub(folder, **changes):
    return {"source": "hub", "hub": {"dataset": str(folder), **changes}, "counts": ALL}


@pytest.mark.parametrize("streaming", [False, True])
def test_hub_with_and_without_a_validation_split(tmp_path, offline_hub, streaming):
    full = published(tmp_path / "geometry3k", "geometry3k")
    tables = prompts(run(tmp_path / "full", from_hub(full, streaming=streaming)))
    assert [len(rows) for rows in tables.values()] == [29, 2, 3]
    assert {row["data_source"] for row in tables["prompts"]} == {str(full)}
    dealt = run(tmp_path / "dealt", from_hub(published(tmp_path / "imgurl", "imgurl"), streaming=streaming))
    tables = prompts(dealt)
    assert [len(rows) for rows in tables.values()] == [27, 2, 3]
    assert "validation" in dealt.load("geo3k.data_report")["split_note"]


def test_the_hub_says_what_is_missing(tmp_path, offline_hub):
    folder = published(tmp_path / "set", "imgurl")
    with pytest.raises(SourceUnavailableError, match=r"geo3k\.hub\.dataset=.*split='testing'"):
        run(tmp_path / "data", from_hub(folder, eval="testing"))
    with pytest.raises(SourceUnavailableError) as error:
        run(tmp_path / "data", {"source": "hub"}, "geo3k_multi_turn")
    for part in (
        "geo3k_multi_turn.hub.dataset='hiyouga/geometry3k'",
        "geo3k_multi_turn.source=generate",
        "local folder",
    ):
        assert part in str(error.value)
    assert not (tmp_path / "data").exists()
