"""Data before a run: the source gives levels or says why not, counts are possible or not, stored prompts fit or not."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from geo_sokoban_pipeline.datasets.tables import FrameDataset
from geo_sokoban_pipeline.envs.inspection import guard
from geo_sokoban_pipeline.envs.sokoban import generate_levels
from geo_sokoban_pipeline.envs.sokoban.data_steps import make_prompts, read_levels
from geo_sokoban_pipeline.envs.sokoban.inspection import (
    check_stored_prompts,
    check_yields,
    expected_counts,
    sample_levels,
    sample_prompts,
)
from geo_sokoban_pipeline.envs.sokoban.sources import read_source

LEVEL = "#####\n#@$.#\n#####\n"


def source(make_subject: Any, **options: Any) -> list[Any]:
    return guard("data", "source", lambda: sample_levels(make_subject(sokoban=options).data, 40, None)[0])


@pytest.mark.parametrize(
    ("text", "state", "words"),
    [
        (LEVEL, "ok", "file: 1 rows looked at, 1 levels"),
        (f"{LEVEL}\n#####\n#@$ #\n#####\n", "warning", "1 of 2 entries rejected"),
        ("no level at all", "failure", "holds no rows and no levels"),
    ],
)
def test_a_file_of_levels(make_subject: Any, tmp_path: Path, text: str, state: str, words: str) -> None:
    (tmp_path / "levels.txt").write_text(text)
    check = source(make_subject, source="file", file={"path": str(tmp_path / "levels.txt")})[-1]
    assert check.state == state
    assert words in check.found


def test_a_missing_file_is_a_failure_with_its_path(make_subject: Any) -> None:
    (check,) = source(make_subject, source="file", file={"path": "/no/such.txt"})
    assert check.state == "failure"
    assert "/no/such.txt" in check.found


def test_only_the_first_rows_of_a_file_are_read(make_subject: Any, tmp_path: Path) -> None:
    levels = generate_levels(60, 0, 6, 6, 1)
    (tmp_path / "many.txt").write_text("\n\n".join(level.board.to_xsb() for level in levels))
    (check,) = source(make_subject, source="file", file={"path": str(tmp_path / "many.txt")})
    assert check.found.startswith("file: 40 rows")


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"min_solution": 60, "max_solution": 70}, "solutions of 60 to 70 moves yield 0 distinct ones"),
        ({"boxes": 14}, "yield 0 distinct ones"),
        ({"shares": {"train": 1.0, "validation": 0.0, "eval": 0.0}}, "sokoban.counts.validation="),
    ],
)
def test_settings_without_levels(make_subject: Any, options: dict[str, Any], text: str) -> None:
    (check,) = source(make_subject, **options)
    assert check.state == "failure"
    assert text in check.found


def test_a_hub_that_cannot_be_reached(make_subject: Any) -> None:
    def load(options: Any) -> Any:
        raise ConnectionError("no network; sokoban.source=generate needs no data")

    subject = make_subject(sokoban={"source": "hub"})
    (check,) = guard("data", "source", lambda: sample_levels(subject.data, 40, load)[0])
    assert check.state == "failure"
    assert "source=generate" in check.found


@pytest.mark.parametrize(
    ("options", "state", "text"),
    [
        ({}, "ok", "train of "),
        ({"counts": {"train": 99_999}}, "failure", "sokoban.counts.train=99999: its walls yield"),
        ({"counts": {"eval": 50_000}}, "failure", "sokoban.counts.eval=50000"),
        ({"min_solution": 60, "max_solution": 70}, "failure", "validation=256: its walls yield 0; sokoban.counts.eval"),
        ({"height": 10, "width": 10}, "skipped", "too many levels"),
        ({"source": "file", "file": {"path": "x"}}, "skipped", "read as a whole"),
    ],
)
def test_counts(make_subject: Any, options: dict[str, Any], state: str, text: str) -> None:
    (check,) = check_yields(make_subject(sokoban=options).data)
    assert check.state == state
    assert text in check.found


SMALL = {"counts": {"train": 24, "validation": 8, "eval": 8}, "max_solution": 4}


@pytest.fixture
def stored(make_subject: Any, tmp_path: Path) -> Path:
    """Prompts as the data pipeline stores them."""
    options = make_subject(sokoban=SMALL).data
    names = ("prompts", "validation_prompts", "eval_prompts")
    for name, frame in zip(names, make_prompts(read_levels(options)[0], options), strict=True):
        schema = "geo_sokoban_pipeline.envs.sokoban.data.PROMPTS"
        FrameDataset(path=str(tmp_path / f"{name}.parquet"), schema=schema).save(frame)
    return tmp_path


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({}, None),
        ({"cell_px": 32}, "images of another size"),
        ({"instruction": "full"}, "another instruction"),
        ({"max_solution": 2}, "solution lengths 1 to 4"),
        ({"counts": {"train": 25}}, "24 rows, 25 asked for"),
        ({"height": 7}, "sokoban_6x6_1box, sokoban_7x6_1box asked for"),
    ],
)
def test_stored_prompts(make_subject: Any, stored: Path, changes: dict[str, Any], text: str | None) -> None:
    options = make_subject(
        sokoban={**SMALL, **changes, "counts": {**SMALL["counts"], **changes.get("counts", {})}}
    ).data
    found = check_stored_prompts(options, stored)
    if text is None:
        assert [check.state for check in found] == ["ok"]
    else:
        assert found[0].state == "warning"
        assert text in found[0].found


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-50])


def without_columns(path: Path) -> None:
    pq.write_table(pq.read_table(path).drop_columns(["level_xsb", "id"]), path)


def of_somebody_else(path: Path) -> None:
    pq.write_table(pa.table({"id": [1], "prompt": [2], "images": [None], "solution_length": ["long"]}), path)


def without_a_level(path: Path) -> None:
    table = pq.read_table(path)
    place = table.column_names.index("level_xsb")
    pq.write_table(table.set_column(place, "level_xsb", pa.array([7] * len(table))), path)


@pytest.mark.parametrize(
    ("spoil", "text"),
    [
        (cut, "not readable"),
        (without_columns, "no id, level_xsb in its rows"),
        (of_somebody_else, "1 rows, 24 asked for; no images, data_source, level_xsb"),
        (without_a_level, "its first row is no level"),
    ],
)
def test_spoilt_prompts_are_named_and_not_used(make_subject: Any, stored: Path, spoil: Any, text: str) -> None:
    path = stored / "prompts.parquet"
    spoil(path)
    options = make_subject(sokoban=SMALL).data
    (check,) = check_stored_prompts(options, stored)
    assert check.state == "warning"
    assert str(path) in check.found and text in check.found
    _, reading = sample_levels(options, 16, None)
    assert len(sample_prompts(options, reading, stored)) == len(reading.levels)


def test_prompts_to_try_are_the_stored_ones_where_they_fit(make_subject: Any, stored: Path) -> None:
    subject = make_subject(sokoban=SMALL)
    _, reading = sample_levels(subject.data, 16, None)
    assert len(sample_prompts(subject.data, reading, stored)) == 24
    made = sample_prompts(subject.data, reading, stored / "nowhere")
    assert len(made) == len(reading.levels)
    assert made[0]["images"][0].startswith("data:image/png")
    assert expected_counts(subject.data, reading, 16) == SMALL["counts"]


def test_stored_prompts_of_another_source_are_not_taken_for_those_of_a_file(
    make_subject: Any, stored: Path, tmp_path: Path
) -> None:
    (tmp_path / "levels.txt").write_text(LEVEL)
    options = make_subject(sokoban={**SMALL, "source": "file", "file": {"path": str(tmp_path / "levels.txt")}}).data
    (check,) = check_stored_prompts(options, stored)
    assert (check.state, stored.name in check.found) == ("ok", True)
    _, reading = sample_levels(options, 16, None)
    (row,) = sample_prompts(options, reading, stored)
    assert row["level_xsb"] == LEVEL.rstrip("\n")


def test_counts_of_a_file_are_known_once_it_is_read_as_a_whole(make_subject: Any, tmp_path: Path) -> None:
    levels = generate_levels(60, 0, 6, 6, 1)
    (tmp_path / "many.txt").write_text("\n\n".join(level.board.to_xsb() for level in levels))
    asked = {"train": None, "validation": 3, "eval": None}
    file = {"source": "file", "file": {"path": str(tmp_path / "many.txt")}, "counts": asked}
    options = make_subject(sokoban=file).data
    part, whole = (sample_levels(options, rows, None)[1] for rows in (20, 100))
    assert expected_counts(options, part, 20) == asked
    dealt = Counter(split for _, split in read_source(options).levels)
    assert dealt["validation"] == 3
    assert expected_counts(options, whole, 100) == dealt
