"""The main job on levels that this project did not make: Boxoban's ten by ten with four boxes, beside small boards."""

from __future__ import annotations

import numpy as np
import pytest

from geo_sokoban_pipeline.envs.rows import read_rows
from geo_sokoban_pipeline.envs.sokoban import Board, generate_levels
from geo_sokoban_pipeline.evaluation.audit import audit_files

pytestmark = pytest.mark.slow

SPLITS = ("prompts", "validation_prompts", "eval_prompts")
SHORT = {
    "warm_start": {"steps": 2},
    "rollout": {"max_turns": 3},
    "grpo": {"groups": 4, "group_size": 2},
    "loop": {"iterations": 2, "eval_prompts": 4},
    "evaluation": {"prompts": 8},
}


def test_boxoban_beside_small_boards(project, shared_data, tmp_path):
    boxoban = [row["xsb"] for _, row in read_rows(f"{shared_data / 'boxoban_sample.jsonl'}@[:30]")]
    small = [level.board.to_xsb() for level in generate_levels(20, 1, 5, 7, 1, 1, 6)]
    path = tmp_path / "000.txt"
    path.write_text("\n\n".join(f"; {number}\n{text}" for number, text in enumerate([*boxoban, *small])))
    # Nothing is searched here: the levels stay, their lengths are unknown, as of those that no search can finish.
    levels = {"source": "file", "file": {"path": str(path)}, "counts": dict.fromkeys(("train", "validation", "eval"))}
    options = {"sokoban": {**levels, "solver_states": 0}}
    project.run(params={**options, "train_sokoban": SHORT})
    assert len(project.load("train_sokoban.metrics")) == 2
    assert (project.folder("08_reporting") / "report.html").stat().st_size > 10_000
    assert audit_files(project.root) == []
    report = project.load("sokoban.data_report", options)
    assert (report["rows_rejected"], report["unsolved_within_limit"]) == (0, report["levels"])
    tables = [project.load(f"sokoban.{name}", options) for name in SPLITS]
    boards = [Board.from_text(text) for table in tables for text in table["level_xsb"]]
    assert {(board.height, board.width, len(board.boxes)) for board in boards} == {(10, 10, 4), (5, 7, 1)}
    assert tables[-1]["solution_length"].isna().all()
    # Boards of two sizes are two grids, played and trained in the same batches.
    frame = project.load("train_sokoban.trajectories@pandas")
    assert len({tuple(grid) for grids in frame["image_grid_thw"] for grid in grids}) == 2
    assert np.isfinite(frame["reward"]).all()
    rows = {(row["policy"], row["mode"]): row for row in project.load("train_sokoban.eval_summary")["rows"]}
    assert rows["final", "sampled"]["episodes"] == 8
    assert all(row["steps_over_optimal"] is None and row["by_length"] == [] for row in rows.values())
