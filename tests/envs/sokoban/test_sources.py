"""Sources: what the generator promises, every file format, quarantine, and errors that say the way out."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from geo_sokoban_pipeline.envs.rows import SPLITS, BadRow, overlaps, read_rows, split_slice
from geo_sokoban_pipeline.envs.sokoban.board import Board
from geo_sokoban_pipeline.envs.sokoban.config import SokobanDataOptions
from geo_sokoban_pipeline.envs.sokoban.data import prompt_row, raw_level_row
from geo_sokoban_pipeline.envs.sokoban.levels import LevelsExhaustedError
from geo_sokoban_pipeline.envs.sokoban.solver import solve
from geo_sokoban_pipeline.envs.sokoban.sources import (
    known_layouts,
    read_source,
    setting_yield,
    split_yields,
    spread_draw,
)

ROOT = Path(__file__).parents[3]
ALL = {"train": None, "validation": None, "eval": None}
ONE, TWO, THREE = "#####\n#@$.#\n#####", "#####\n#.$@#\n#   #\n#####", "######\n#@ $.#\n######"


def options(**changes):
    return SokobanDataOptions.model_validate(changes)


def file_options(path, file_format="auto", **changes):
    return options(source="file", file={"path": str(path), "format": file_format}, counts=ALL, **changes)


def by_split(reading, key):
    return {split: [key(level) for level, of in reading.levels if of == split] for split in SPLITS}


def test_default_setting():
    default = SokobanDataOptions()
    reading = read_source(default)
    layouts = {split: set(names) for split, names in by_split(reading, lambda level: level.board.layout_hash).items()}
    hashes = by_split(reading, lambda level: level.board.canonical_hash)
    assert reading.split_rule == "layout"
    assert {split: len(names) for split, names in layouts.items()} == {"train": 173, "validation": 28, "eval": 57}
    for split, each in (("train", 768), ("validation", 32), ("eval", 80)):
        lengths = by_split(reading, lambda level: level.solution_length)[split]
        assert Counter(lengths) == dict.fromkeys(range(1, 9), each)
    assert overlaps(layouts) == overlaps(hashes) == 0
    assert all(len(set(names)) == len(names) for names in hashes.values())
    assert all(len(solve(level.board)) == level.solution_length for level, _ in reading.levels[::100])
    whole, parts = setting_yield(default), split_yields(default)
    assert sorted(whole) == [str(length) for length in range(1, 9)]
    assert sum(parts.values()) == sum(whole.values()) == 53_803
    assert all(parts[split] > getattr(default.counts, split) for split in parts)
    assert len(known_layouts(default)) == 258
    assert split_yields(SokobanDataOptions(height=10, width=10)) is None


def test_more_training_levels_leave_the_other_splits_as_they_are():
    few, more = (read_source(options(max_solution=3, counts={"train": n, "validation": 4, "eval": 4})) for n in (8, 30))
    held_out = [[level.board for level, split in reading.levels if split != "train"] for reading in (few, more)]
    assert held_out[0] == held_out[1]
    assert [level.board for level, of in more.levels if of == "train"][:6] == [
        level.board for level, of in few.levels if of == "train"
    ][:6]


@pytest.mark.parametrize(
    ("changes", "rule"),
    [
        ({"inner_walls": (0, 0), "max_solution": 5}, "level"),
        (
            {"height": 7, "width": 8, "boxes": 2, "inner_walls": (6, 9), "max_solution": 12},
            "layout",
        ),  # too many to list
        (
            {"height": 7, "width": 7, "boxes": 2, "inner_walls": (2, 4), "max_solution": 9, "equal_lengths": False},
            "layout",
        ),
    ],
)
def test_other_settings(changes, rule):
    reading = read_source(options(counts={"train": 16, "validation": 5, "eval": 8}, **changes))
    hashes = by_split(reading, lambda level: level.board.canonical_hash)
    assert reading.split_rule == rule
    assert {split: len(set(names)) for split, names in hashes.items()} == {"train": 16, "validation": 5, "eval": 8}
    assert overlaps(hashes) == 0
    if rule == "layout":
        assert overlaps(by_split(reading, lambda level: level.board.layout_hash)) == 0


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        (
            {"height": 5, "width": 5, "inner_walls": (0, 0), "max_solution": 6}
            | {"counts": {"train": 900, "validation": 5, "eval": 8}},
            LevelsExhaustedError,
            r"sokoban.counts.train=900: 5×5 levels .* yield \d+ distinct ones",
        ),
        (
            {"min_solution": 90, "max_solution": 91, "counts": {"train": 8, "validation": 1, "eval": 1}},
            LevelsExhaustedError,
            "sokoban.counts.train=8: .* yield 0",
        ),
        ({"counts": ALL}, ValueError, "sokoban.counts.train=null"),
        ({"shares": {"train": 1, "validation": 0, "eval": 0}}, ValueError, "sokoban.shares.validation=0"),
        ({"source": "hub"}, ValueError, "sokoban.source=hub"),  # without a loader
    ],
)
def test_settings_that_cannot_be_generated(changes, error, message):
    with pytest.raises(error, match=message):
        read_source(options(**changes))


def test_lengths_that_run_out_are_made_up_for():
    stock = {1: 2, 2: 30, 3: 30}

    def draw(count, lengths):
        rest, drawn = dict(stock), []
        for i in range(count):
            length = lengths[i % len(lengths)]
            if rest[length]:
                rest[length] -= 1
                drawn.append(type("Level", (), {"solution_length": length}))
        return drawn

    assert Counter(level.solution_length for level in spread_draw(draw, 22, [1, 2, 3])) == {1: 2, 2: 10, 3: 10}
    assert len(spread_draw(draw, 99, [1, 2, 3])) == 62


def test_the_same_in_every_process():
    script = (
        "from geo_sokoban_pipeline.envs.sokoban.sources import read_source\n"
        "from geo_sokoban_pipeline.envs.sokoban.data import raw_level_row\n"
        "from geo_sokoban_pipeline.envs.sokoban.data import prompt_row\n"
        "from geo_sokoban_pipeline.envs.sokoban.config import SokobanDataOptions\n"
        "from geo_sokoban_pipeline.seeding import content_hash\n"
        "options = SokobanDataOptions(counts={'train': 60, 'validation': 9, 'eval': 20}, seed=4)\n"
        "reading = read_source(options)\n"
        "rows = [prompt_row(raw_level_row(level, split, 'layout'), options) for level, split in reading.levels]\n"
        "print(content_hash(repr(rows)))\n"
    )
    runs = [
        subprocess.Popen(
            [sys.executable, "-c", script],
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(ROOT / "src")},
            stdout=subprocess.PIPE,
            text=True,
        )
        for seed in ("1", "2")
    ]
    first, second = (run.communicate(timeout=60)[0] for run in runs)
    assert first == second
    assert len(first.strip()) == 32


# Files


@pytest.mark.parametrize(
    ("path", "file", "window"),
    [
        ("a.parquet", "a.parquet", slice(None)),
        ("a.parquet@[2:5]", "a.parquet", slice(2, 5)),
        ("a.jsonl@[:5]", "a.jsonl", slice(None, 5)),
        ("a.jsonl@[-3:]", "a.jsonl", slice(-3, None)),
        ("a.jsonl@[:-1]", "a.jsonl", slice(None, -1)),
        ("a.jsonl@[:]", "a.jsonl", slice(None)),
        ("a.jsonl@[3]", "a.jsonl@[3]", slice(None)),
        ("a@[1:2]b.jsonl", "a@[1:2]b.jsonl", slice(None)),
        ("a.jsonl@[-:2]", "a.jsonl@[-:2]", slice(None)),
    ],
)
def test_slice_syntax(path, file, window):
    assert split_slice(path) == (Path(file), window)


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
@pytest.mark.parametrize(
    ("window", "numbers"), [("", [0, 1, 2, 3]), ("@[1:3]", [1, 2]), ("@[-2:]", [2, 3]), ("@[:-3]", [0]), ("@[9:]", [])]
)
def test_rows_of_a_slice(tmp_path, suffix, window, numbers):
    path = tmp_path / f"rows.{suffix}"
    if suffix == "parquet":
        pq.write_table(pa.table({"n": [0, 1, 2, 3]}), path)
    else:
        path.write_text('{"n": 0}\n\n{"n": 1}\n  \n{"n": 2}\n{"n": 3}')
    assert [(number, row["n"]) for number, row in read_rows(f"{path}{window}")] == [(n, n) for n in numbers]


def test_lines_that_are_no_rows_are_reported(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"n": 0}\n{"n": \n[1]\n\xff\n{"n": 1}\n')
    rows = [row for _, row in read_rows(str(path))]
    assert [isinstance(row, BadRow) for row in rows] == [False, True, True, True, False]
    assert [row.reason.split(":")[0] for row in rows[1:4]] == [
        "line is not JSON",
        "line is not a JSON object",
        "line is not JSON",
    ]


@pytest.mark.parametrize(
    ("name", "content", "error", "message"),
    [
        ("none.parquet", None, FileNotFoundError, "no file at"),
        ("none.txt", None, FileNotFoundError, "no file at"),
        ("torn.parquet", b"PAR1 torn", ValueError, "not a readable parquet file"),
        ("empty.txt", b"\n; nothing\n\n", ValueError, "holds no rows"),
        ("bad.txt", b"###\n#?#\n\n###\n#@#\n", ValueError, "none of its 2 rows is a playable level: .*unknown symbol"),
        ("bad.jsonl", b'{"xsb": "###"}\n{"xsb": 4}', ValueError, "none of its 2 rows"),
        ("rows.csv", b"a,b", ValueError, r"\.jsonl and \.parquet, not from \.csv"),
        ("prose.txt", b"There is no level\nin this # file.\n", ValueError, "prose.txt holds no rows and no levels"),
    ],
)
def test_files_that_stop_the_run(tmp_path, name, content, error, message):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(error, match=message):
        read_source(file_options(tmp_path / name, "raw_parquet" if name.endswith(".csv") else "auto"))


@pytest.mark.parametrize("name", ["levels.xsb", "levels.txt", "levels.jsonl"])
def test_levels_as_text(tmp_path, name):
    bad = "#####\n#@?.#\n#####"
    if name.endswith(".jsonl"):
        content = "\n".join(json.dumps({"xsb": text, "index": i}) for i, text in enumerate([ONE, bad, TWO, ONE, THREE]))
    else:
        content = "\n\n".join(f"; {i}\n{text}" for i, text in enumerate([ONE, bad, TWO, ONE, THREE]))
    (tmp_path / name).write_text(content)
    reading = read_source(file_options(tmp_path / name))
    assert {level.board for level, _ in reading.levels} == {Board.from_text(text) for text in (ONE, TWO, THREE)}
    assert {level.solution_length for level, _ in reading.levels} == {1, 2}
    assert (reading.rows_read, reading.rows_collapsed, reading.split_rule) == (5, 1, "layout")
    (rejected,) = reading.rejected
    assert rejected.reason.startswith("unknown symbol '?' in row 1")
    assert rejected.source == name
    assert rejected.row_id in ("1", "row_1")
    assert bad in rejected.raw.replace("\\n", "\n")


def test_boxoban_levels(shared_data):
    path = f"{shared_data / 'boxoban_sample.jsonl'}@[:12]"
    reading = read_source(file_options(path, "boxoban", solver_states=50))
    assert len(reading.levels) == 12
    assert any(level.solution_length is None for level, _ in reading.levels)
    assert {len(level.board.boxes) for level, _ in reading.levels} == {4}
    assert reading.levels[0][0].columns["difficulty"] == "unfiltered"
    assert not reading.rejected
    unsolved = read_source(file_options(shared_data / "boxoban_sample.jsonl", solver_states=0))
    assert len(unsolved.levels) == 100


@pytest.mark.parametrize("collapse", ["rows", "states", "levels"])
def test_real_rows(shared_data, collapse):
    reading = read_source(file_options(shared_data / "sokoban_raw_sample.parquet", collapse=collapse))
    assert (reading.rows_read, reading.rejected, reading.split_rule) == (400, [], "layout")
    assert sum(level.copies for level, _ in reading.levels) == 400
    expected = {"rows": 400, "states": 364, "levels": 97}[collapse]
    assert len(reading.levels) == expected == 400 - reading.rows_collapsed
    assert overlaps(by_split(reading, lambda level: level.board.layout_hash)) == 0
    assert {level.data_source for level, _ in reading.levels} == {"sokoban_6x6_1horizon"}


def test_one_bad_row_of_two(tmp_path, shared_data):
    _, good = next(read_rows(str(shared_data / "sokoban_raw_sample.parquet")))
    pd.DataFrame([good, {**good, "prompt": [{"role": "user", "content": "no grid"}], "id": "x"}]).to_parquet(
        tmp_path / "two.parquet"
    )
    reading = read_source(file_options(tmp_path / "two.parquet"))
    assert (len(reading.levels), len(reading.rejected)) == (1, 1)
    assert (reading.rejected[0].row_id, reading.rejected[0].source) == ("x", "two.parquet")
    assert json.loads(reading.rejected[0].raw)["prompt"][0]["content"] == "no grid"


def test_our_own_prompts_are_a_processed_file(tmp_path):
    made = options(counts={"train": 9, "validation": 2, "eval": 2})
    rows = [prompt_row(raw_level_row(level, split, "layout"), made) for level, split in read_source(made).levels]
    rows[3]["images"] = ["https://example.com/board.png"]
    pd.DataFrame(rows).to_parquet(tmp_path / "prompts.parquet")
    reading = read_source(file_options(tmp_path / "prompts.parquet"))
    assert {level.board.to_xsb() for level, _ in reading.levels} == {
        row["level_xsb"] for row in rows if row is not rows[3]
    }
    assert [row.row_id for row in reading.rejected] == [rows[3]["id"]]
    assert all(level.prompt == rows[0]["prompt"] for level, _ in reading.levels)
