"""Geometry's data before a run: the source gives problems or says why not, counts are possible, stored prompts fit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from geo_sokoban_pipeline.envs.geo3k.config import DATA_OPTIONS, Geo3kDataOptions
from geo_sokoban_pipeline.envs.geo3k.data import PROMPTS
from geo_sokoban_pipeline.envs.geo3k.data_steps import check_problems, make_prompts, read_problems
from geo_sokoban_pipeline.envs.geo3k.inspection import (
    check_counts_drawn,
    check_stored_prompts,
    inspect_problems,
    sample_problems,
)
from geo_sokoban_pipeline.envs.inspection import DataSample, guard
from geo_sokoban_pipeline.runs.row_stream import write_rows
from preflight.conftest import says
from problem_rows import source_row, write_uris

COUNTS = {"train": 24, "validation": 6, "eval": 8}


def data(**changes: Any) -> Geo3kDataOptions:
    return Geo3kDataOptions.model_validate({"counts": COUNTS} | changes)


def inspect(folder: Path, task: str = "geo3k", rows: int = 10, **changes: Any) -> DataSample:
    """Findings about the data with these changes, where nothing is stored."""
    return inspect_problems(DATA_OPTIONS[task].model_validate({"counts": COUNTS} | changes), task, rows, None, folder)


def write_prompts(folder: Path, options: Geo3kDataOptions) -> None:
    raw = read_problems(options, "geo3k")
    index, _ = check_problems(raw, options, "geo3k")
    folder.mkdir()
    names = ("prompts", "validation_prompts", "eval_prompts")
    for name, rows in zip(names, make_prompts(raw, index, options, "geo3k"), strict=True):
        write_rows(rows, PROMPTS, folder / f"{name}.parquet")


@pytest.mark.parametrize("task", ["geo3k", "geo3k_multi_turn"])
def test_generated_problems(tmp_path, task):
    sample = inspect(tmp_path, task)
    assert [(check.name, check.state) for check in sample.checks] == [
        ("source", "ok"),
        ("counts", "ok"),
        ("stored prompts", "skipped"),
    ]
    assert sample.counts == COUNTS and sample.longest is None
    assert len(sample.rows) == 10 and {row["split"] for row in sample.rows} == {"train"}
    assert all(row["candidates"] and row["images"][0].startswith("data:image/png") for row in sample.rows)


def test_too_many_problems_are_one_failure(tmp_path):
    problems = {"families": {"linear_pair": 1.0}, "lengths": [10, 19]}
    sample = inspect(tmp_path, counts={**COUNTS, "train": 90_000}, problems=problems)
    (failure,) = [check for check in sample.checks if check.state == "failure"]
    assert failure.name == "counts" and "the families hold only about" in failure.found


def test_problems_that_take_long_to_draw_are_not_all_drawn():
    given = data(problems={"difficulty": "mixed"}, counts={**COUNTS, "train": 10**6})
    says(check_counts_drawn(given, "geo3k"), "skipped")


@pytest.mark.parametrize(
    ("rows", "state", "words"),
    [
        ([source_row(0), source_row(1)], "ok", "file: 2 rows looked at, 2 problems"),
        (
            [source_row(0), source_row(1, images=["data:image/png;base64,AAAA"])],
            "warning",
            "1 of 2 rows rejected",
        ),
        ([source_row(0, problem="<image> beside <image>")], "failure", "none of 1 rows is a problem: 1 × "),
    ],
)
def test_a_file_of_problems(tmp_path, rows, state, words):
    options = data(source="file", file={"path": str(write_uris(tmp_path / "rows.parquet", rows))})
    says(guard("data", "source", lambda: sample_problems(options, "geo3k", 10, None)[0])[-1:], state, words)


@pytest.mark.parametrize(("rows", "known"), [(12, True), (3, False)])
def test_a_file_that_is_not_read_whole_has_unknown_counts(tmp_path, rows, known):
    path = write_uris(tmp_path / "rows.parquet", [source_row(number) for number in range(10)])
    counts = inspect(tmp_path, rows=rows, source="file", file={"path": str(path)}, counts=dict.fromkeys(COUNTS)).counts
    assert sum(counts.values()) == 10 if known else set(counts.values()) == {None}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, None),
        ({"counts": {**COUNTS, "train": 25}}, "24 rows, 25 asked for"),
        ({"instruction": "boxed"}, "another instruction"),
        ({"seed": 5}, "other images"),
        ({"problems": {"picture_scale": 2.0}}, "other images"),
    ],
)
def test_stored_prompts(tmp_path, changes, words):
    write_prompts(tmp_path / "stored", data())
    found = check_stored_prompts(data(**changes), "geo3k", tmp_path / "stored")[:1]
    says(found, "warning" if words else "ok", words or "")
