"""data_sokoban as Kedro runs it: from every source to prompts on disk, with quarantine and a report."""

from __future__ import annotations

from itertools import islice
from pathlib import Path

import pandas as pd
import pytest

from geo_sokoban_pipeline.envs.rows import read_rows
from geo_sokoban_pipeline.envs.sokoban import Board
from geo_sokoban_pipeline.envs.sokoban.config import SokobanDataOptions
from geo_sokoban_pipeline.envs.sokoban.data import PROMPTS
from geo_sokoban_pipeline.envs.sokoban.data_steps import describe_split, unique_ids
from geo_sokoban_pipeline.pipelines.hub_rows import SourceUnavailableError, hub_rows
from task_tables import run_data

ROOT = Path(__file__).parents[2]
PROMPT_TABLES = ("sokoban.prompts", "sokoban.validation_prompts", "sokoban.eval_prompts")
FEW = {"max_solution": 3, "counts": {"train": 12, "validation": 3, "eval": 6}}
ALL = {"train": None, "validation": None, "eval": None}


def run(folder, parameters):
    return run_data(folder, parameters, "sokoban")


def file_parameters(path, **changes):
    return {"source": "file", "file": {"path": str(path)}, "counts": ALL, **changes}


def test_generated(tmp_path):
    catalog = run(tmp_path, FEW)
    report = catalog.load("sokoban.data_report")
    assert report["overlaps"] == {"layouts": 0, "levels": 0}
    assert report["split_rule"] == "layout"
    assert report["splits"]["eval"]["by_length"] == {"1": 2, "2": 2, "3": 2}
    assert (report["rows_read"], report["rows_rejected"], report["rows_left_out"]) == (21, 0, 0)
    assert list(report["setting_yields"]) == ["1", "2", "3"]
    assert catalog.load("sokoban.rejected").empty
    frames = [catalog.load(name) for name in PROMPT_TABLES]
    assert [len(frame) for frame in frames] == [12, 3, 6]
    assert all(list(frame.columns) == PROMPTS.names for frame in frames)
    assert isinstance(frames[0]["images"][0], list)
    assert frames[0]["extra_info"][0]["env_config"]["initial_boxes"][0][0] in range(1, 5)
    raw = catalog.load("sokoban.raw_levels")
    assert set(raw["split"]) == {"train", "validation", "eval"}
    assert set(raw["level_hash"]) == {name for frame in frames for name in frame["level_hash"]}


def test_real_rows(tmp_path, shared_data):
    path = shared_data / "sokoban_raw_sample.parquet"
    catalog = run(tmp_path, file_parameters(path, collapse="rows", instruction="full"))
    report = catalog.load("sokoban.data_report")
    assert (report["rows_read"], report["rows_rejected"], report["levels"]) == (400, 0, 400)
    assert report["overlaps"] == {"layouts": 0, "levels": 0}
    rows = {row["id"]: row for name in PROMPT_TABLES for row in catalog.load(name).to_dict("records")}
    assert {Board.from_text(row["level_xsb"]).height for row in rows.values()} == {6}
    for _, raw in read_rows(str(path)):
        row = rows[raw["id"]]
        assert {name: row[name] for name in ("ability", "reward_model", "data_source")} == {
            name: raw[name] for name in ("ability", "reward_model", "data_source")
        }
        assert "<|im_start|>" not in row["prompt"]


def test_boxoban_levels_and_bad_rows(tmp_path, shared_data):
    levels = [row["xsb"] for _, row in read_rows(f"{shared_data / 'boxoban_sample.jsonl'}@[:9]")]
    bad = ["#####\n#@?.#\n#####", "#####\n#P√\n#####", "#####\n# $.#\n#####"]
    text = "\n\n".join(f"; {i}\n{level}" for i, level in enumerate([*levels, *bad]))
    (tmp_path / "levels.txt").write_text(text)
    catalog = run(tmp_path / "data", file_parameters(tmp_path / "levels.txt", solver_states=20))
    rejected = catalog.load("sokoban.rejected")
    assert rejected["row_id"].tolist() == ["9", "10", "11"]
    assert [reason.split()[0] for reason in rejected["reason"]] == ["unknown", "ragged", "level"]
    assert rejected["raw"].tolist() == bad
    report = catalog.load("sokoban.data_report")
    assert (report["levels"], report["rows_rejected"], sum(report["rejected_reasons"].values())) == (9, 3, 3)
    assert report["unsolved_within_limit"] == 9
    lengths = [length for name in PROMPT_TABLES for length in catalog.load(name)["solution_length"]]
    assert lengths == [None] * 9


def test_a_published_collection_and_its_move_limit(tmp_path, caplog):
    """Titles become ids; what the text says of a level passes through; one faulty level is left out, and said."""
    own = (ROOT / "tests" / "envs" / "sokoban" / "collections" / "own.txt").read_text()
    (tmp_path / "own.txt").write_text(f"{own}\n; 11\n\n#####\n#@?.#\n#####\n")
    catalog = run(tmp_path / "data", file_parameters(tmp_path / "own.txt", max_steps=14))
    assert "1 of 11 entries rejected (see sokoban.rejected)" in caplog.text
    rows = {row["id"]: row for name in PROMPT_TABLES for row in catalog.load(name).to_dict("records")}
    assert set(rows) == {"1", "Corner shop", *map(str, range(3, 11))}
    assert (rows["Corner shop"]["title"], rows["Corner shop"]["author"]) == ("Corner shop", "A. Tester")
    report = catalog.load("sokoban.data_report")
    assert (report["levels"], report["rows_rejected"], report["longest_solution"]) == (10, 1, 20)
    assert report["move_limit_note"].startswith("sokoban.max_steps=14: 2 of 10 levels need more moves, the longest 20")
    assert report["move_limit_note"] in caplog.text
    again = run(tmp_path / "again", file_parameters(tmp_path / "own.txt", max_steps=20))
    assert again.load("sokoban.data_report")["move_limit_note"] is None


def test_one_layout_is_reported(tmp_path, caplog):
    catalog = run(tmp_path, {**FEW, "inner_walls": [0, 0]})
    report = catalog.load("sokoban.data_report")
    assert report["split_rule"] == "level"
    assert "no level" in report["split_note"]
    assert (report["overlaps"]["layouts"], report["overlaps"]["levels"]) == (1, 0)
    assert set(catalog.load("sokoban.prompts")["split_rule"]) == {"level"}
    assert "splits share layouts" in caplog.text


def test_levels_that_repeat_one_are_counted():
    rows = [("a", "walls", 3), ("a", "walls", 3), ("b", "walls", 4), ("c", "others", None)]
    found = describe_split(pd.DataFrame(rows, columns=["level_hash", "layout_hash", "solution_length"]))
    assert (found["levels"], found["distinct_levels"], found["repeated"], found["layouts"]) == (4, 3, 1, 2)
    assert found["by_length"] == {"3": 2, "4": 1, "unknown": 1}


# The hub, played by a local folder of the same layout


def hub_parameters(folder, **changes):
    return {"source": "hub", "hub": {"dataset": str(folder), **changes}, "counts": ALL}


def test_hub_layout(tmp_path, shared_data, offline_hub):
    raw, processed = tmp_path / "raw", tmp_path / "processed"
    raw.mkdir()
    processed.mkdir()
    (raw / "train.parquet").write_bytes((shared_data / "sokoban_raw_sample.parquet").read_bytes())
    first = run(tmp_path / "first", hub_parameters(raw))
    assert first.load("sokoban.data_report")["rows_read"] == 400
    hub = SokobanDataOptions.model_validate(hub_parameters(raw)).hub
    streamed = islice(hub_rows(hub, hub.split, section="sokoban", streaming=True), 5)
    assert list(streamed) == list(islice(hub_rows(hub, hub.split, section="sokoban"), 5))
    frame = first.load("sokoban.prompts")[["id", "prompt", "images", "extra_info", "ability", "data_source"]]
    frame.to_parquet(processed / "train.parquet")
    second = run(tmp_path / "second", hub_parameters(processed, processed=True))
    assert second.load("sokoban.data_report")["rows_rejected"] == 0
    boards = {text for name in PROMPT_TABLES for text in second.load(name)["level_xsb"]}
    assert boards == set(first.load("sokoban.prompts")["level_xsb"])
    with pytest.raises(SourceUnavailableError, match="split='test'"):
        hub_rows(hub, "test", section="sokoban")


def test_offline(tmp_path, offline_hub):
    with pytest.raises(SourceUnavailableError) as error:
        run(tmp_path / "data", {"source": "hub"})
    for part in (
        "sokoban.hub.dataset='Xiaofeng77/sokoban'",
        "sokoban.source=generate",
        "local folder",
        "sokoban.file.path",
    ):
        assert part in str(error.value)
    assert not (tmp_path / "data").exists()


def test_unique_ids():
    assert unique_ids(["a", "b", "a", "a_2", "a"]) == ["a", "b", "a_3", "a_2", "a_4"]
