"""Data before a run: the source gives levels or says why not, counts are possible or not, stored prompts fit or not."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from geo_sokoban_pipeline.datasets.tables import FrameDataset
from geo_sokoban_pipeline.envs.inspection import guard
from geo_sokoban_pipeline.envs.rows import HubReader
from geo_sokoban_pipeline.envs.sokoban import generate_levels
from geo_sokoban_pipeline.envs.sokoban.data_steps import make_prompts, read_levels
from geo_sokoban_pipeline.envs.sokoban.inspection import (
    check_stored_prompts,
    check_yields,
    expected_counts,
    inspect_levels,
    sample_levels,
    sample_prompts,
)
from geo_sokoban_pipeline.envs.sokoban.sources import read_source
from preflight.conftest import says

LEVEL = "#####\n#@$.#\n#####\n"


def no_network(*_: Any) -> Any:
    raise ConnectionError("no network; sokoban.source=generate needs no data")


def of_file(name: str) -> dict[str, Any]:
    return {"source": "file", "file": {"path": name}}


@pytest.mark.parametrize(
    ("options", "state", "words"),
    [
        (of_file("one.txt"), "ok", "file: 1 rows looked at, 1 levels"),
        (of_file("two.txt"), "warning", "1 of 2 rows rejected"),
        (of_file("many.txt"), "ok", "file: 40 rows"),  # only the first ones are read
        (of_file("prose.txt"), "failure", "holds no rows and no levels"),
        (of_file("no/such.txt"), "failure", "no/such.txt"),
        ({"source": "hub"}, "failure", "source=generate"),
        (
            {"height": 5, "width": 5, "min_solution": 60, "max_solution": 70},
            "failure",
            "solutions of 60 to 70 moves yield 0 distinct ones",
        ),
        ({"boxes": 14}, "failure", "yield 0 distinct ones"),
        ({"shares": {"train": 1.0, "validation": 0.0, "eval": 0.0}}, "failure", "sokoban.counts.validation="),
    ],
)
def test_sources(
    make_subject: Any, tmp_path: Path, monkeypatch: Any, options: dict[str, Any], state: str, words: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("one.txt").write_text(LEVEL)
    Path("two.txt").write_text(f"{LEVEL}\n#####\n#@$ #\n#####\n")
    Path("many.txt").write_text("\n\n".join(level.board.to_xsb() for level in generate_levels(60, 0, 6, 6, 1)))
    Path("prose.txt").write_text("no level at all")
    subject = make_subject(sokoban=options)
    says(
        guard("data", "source", lambda: sample_levels(subject.data, 40, HubReader(no_network, no_network))[0])[-1:],
        state,
        words,
    )


@pytest.mark.parametrize(
    ("options", "state", "text"),
    [
        ({}, "ok", "train of "),
        ({"counts": {"train": 99_999}}, "failure", "sokoban.counts.train=99999: its walls yield"),
        ({"counts": {"eval": 50_000}}, "failure", "sokoban.counts.eval=50000"),
        (
            {"height": 5, "width": 5, "min_solution": 60, "max_solution": 70},
            "failure",
            "validation=256: its walls yield 0; sokoban.counts.eval",
        ),
        ({"height": 10, "width": 10}, "skipped", "too many levels"),
    ],
)
def test_counts(make_subject: Any, options: dict[str, Any], state: str, text: str) -> None:
    says(check_yields(make_subject(sokoban=options).data), state, text)


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
    says(found if text is None else found[:1], "warning" if text else "ok", text or "")
    # Those that fit are tried.
    fresh = make_subject(sokoban=SMALL).data
    reading = sample_levels(fresh, 16, None)[1]
    assert expected_counts(fresh, reading, 16) == SMALL["counts"]
    assert len(sample_prompts(fresh, reading, stored)) == 24
    made = sample_prompts(fresh, reading, stored / "nowhere")
    assert len(made) == len(reading.levels) and made[0]["images"][0].startswith("data:image/png")


def changed(change: Callable[[pa.Table], pa.Table]) -> Callable[[Path], None]:
    return lambda path: pq.write_table(change(pq.read_table(path)), path)


@pytest.mark.parametrize(
    ("spoil", "text"),
    [
        (lambda path: path.write_bytes(path.read_bytes()[:-50]), "not readable"),
        (changed(lambda table: table.drop_columns(["level_xsb", "id"])), "no id, level_xsb in its rows"),
        (
            changed(lambda _: pa.table({"id": [1], "prompt": [2], "images": [None], "solution_length": ["long"]})),
            "1 rows, 24 asked for; no images, data_source, level_xsb",
        ),
        (
            changed(lambda table: table.drop_columns(["level_xsb"]).append_column("level_xsb", pa.array([7] * 24))),
            "its first row is no level",
        ),
    ],
)
def test_spoilt_prompts_are_named_and_not_used(make_subject: Any, stored: Path, spoil: Any, text: str) -> None:
    path = stored / "prompts.parquet"
    spoil(path)
    options = make_subject(sokoban=SMALL).data
    says(check_stored_prompts(options, stored), "warning", str(path), text)
    _, reading = sample_levels(options, 16, None)
    assert len(sample_prompts(options, reading, stored)) == len(reading.levels)


def test_stored_prompts_of_another_source_are_not_taken_for_those_of_a_file(
    make_subject: Any, stored: Path, tmp_path: Path
) -> None:
    (tmp_path / "levels.txt").write_text(LEVEL)
    options = make_subject(sokoban={**SMALL, "source": "file", "file": {"path": str(tmp_path / "levels.txt")}}).data
    says(check_stored_prompts(options, stored), "ok", stored.name)
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
    found = inspect_levels(options, 20, None, tmp_path / "none").checks
    says([check for check in found if check.name == "counts"], "skipped", "read as a whole")
