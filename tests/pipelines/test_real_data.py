"""The main job on levels that this project did not make: the hub's raw rows, and Boxoban's ten by ten with four
boxes.
"""

from __future__ import annotations

import numpy as np
import pytest

from geo_sokoban_pipeline.envs.rows import read_rows
from geo_sokoban_pipeline.envs.sokoban import Board, generate_levels
from geo_sokoban_pipeline.evaluation.audit import audit_files

pytestmark = pytest.mark.slow

ALL = {"train": None, "validation": None, "eval": None}
SPLITS = ("prompts", "validation_prompts", "eval_prompts")
SHORT = {
    "warm_start": {"steps": 2},
    "rollout": {"max_turns": 3},
    "grpo": {"groups": 4, "group_size": 2},
    "loop": {"iterations": 2, "eval_prompts": 4},
    "evaluation": {"prompts": 8},
}


def run_from(project, path, **sokoban):
    options = {"source": "file", "file": {"path": str(path)}, "counts": ALL, **sokoban}
    project.run(params={"sokoban": options, "train_sokoban": SHORT})
    assert len(project.load("train_sokoban.metrics")) == 2
    assert (project.folder("08_reporting") / "report.html").stat().st_size > 10_000
    assert audit_files(project.root) == []
    return options, project.load("sokoban.data_report", {"sokoban": options})


def stored_boards(project, options):
    """Boards of the data that the options name."""
    tables = [project.load(f"sokoban.{name}", {"sokoban": options}) for name in SPLITS]
    return [Board.from_text(text) for table in tables for text in table["level_xsb"]]


def test_raw_rows_of_the_hub(project, shared_data):
    options, report = run_from(project, shared_data / "sokoban_raw_sample.parquet", collapse="rows")
    assert (report["rows_read"], report["rows_rejected"], report["levels"]) == (400, 0, 400)
    assert report["overlaps"] == {"layouts": 0, "levels": 0}
    assert {(board.height, board.width) for board in stored_boards(project, options)} == {(6, 6)}
    assert set(project.load("train_sokoban.trajectories@pandas")["status"]) <= {"completed", "truncated"}


def test_boxoban_beside_small_boards(project, shared_data, tmp_path):
    boxoban = [row["xsb"] for _, row in read_rows(str(shared_data / "boxoban_sample.jsonl"))]
    small = [level.board.to_xsb() for level in generate_levels(40, 1, 5, 7, 1, 1, 6)]
    path = tmp_path / "000.txt"
    path.write_text("\n\n".join(f"; {number}\n{text}" for number, text in enumerate([*boxoban, *small])))
    # Nothing is searched here: the levels stay, their lengths are unknown, as of those that no search can finish.
    options, report = run_from(project, path, solver_states=0)
    assert (report["rows_rejected"], report["unsolved_within_limit"]) == (0, report["levels"])
    sizes = {(board.height, board.width, len(board.boxes)) for board in stored_boards(project, options)}
    assert sizes == {(10, 10, 4), (5, 7, 1)}
    assert project.load("sokoban.eval_prompts", {"sokoban": options})["solution_length"].isna().all()
    # Boards of two sizes are two grids, played and trained in the same batches.
    frame = project.load("train_sokoban.trajectories@pandas")
    assert len({tuple(grid) for grids in frame["image_grid_thw"] for grid in grids}) == 2
    assert np.isfinite(frame["reward"]).all()
    rows = {(row["policy"], row["mode"]): row for row in project.load("train_sokoban.eval_summary")["rows"]}
    assert rows["final", "sampled"]["episodes"] == 8
    assert all(row["steps_over_optimal"] is None and row["by_length"] == [] for row in rows.values())
