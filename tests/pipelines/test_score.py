"""score_* on a finished run: the chosen episodes, under the chosen checkpoint, as tables that others open."""

from __future__ import annotations

import duckdb
import numpy as np
import pytest

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("stored")]


def score(project, task="sokoban", **options):
    source = {"run": f"train_{task}", "run_id": "default", "checkpoint": options.pop("checkpoint", "latest")}
    project.run(f"score_{task}", params={f"score_{task}": {"source": source, **options}})
    return project.load(f"score_{task}.token_scores@pandas")


def test_the_policy_that_played_gives_the_stored_log_probs(clone):
    """The first iteration was played by the policy after the warm start."""
    rows = score(clone, checkpoint="start", last_iteration=0, limit=None, image_reliance=False)
    stored = [row for part in clone.load("train_sokoban.trajectories").values() for row in part().to_pylist()]
    stored = [row for row in stored if row["iteration"] == 0]
    assert rows["trajectory_id"].drop_duplicates().tolist() == [row["trajectory_id"] for row in stored]
    assert len(rows) == sum(sum(row["loss_mask"]) for row in stored)
    assert np.abs(rows["log_prob"] - rows["stored_log_prob"]).max() < 1e-5
    assert set(rows["scored_by"]) == {"train_sokoban/default@start"} and set(rows["scored_version"]) == {0}
    assert rows["image_reliance"].isna().all()


def test_another_policy_scores_a_part_of_the_episodes(clone):
    rows = score(clone, checkpoint=1, limit=5, top_k=2, filter=[["n_turns", ">=", 1]], occlusion=1)
    assert rows["trajectory_id"].nunique() == 5 and set(rows["iteration"]) == {0, 1, 2}
    assert set(rows["scored_version"]) == {2} and rows["top_ids"].map(len).unique().tolist() == [2]
    assert rows["image_reliance"].abs().max() > 0
    assert np.abs(rows["ratio"] - 1).max() > 1e-3
    maps = clone.load("score_sokoban.occlusion@pandas")
    assert maps["trajectory_id"].nunique() == 1 and maps["trajectory_id"].isin(rows["trajectory_id"]).all()
    assert {"player", "box", "wall"} <= set(maps["content"])
    # Other programs join the table with the index, and the next command replaces it.
    folder = clone.folder("07_model_output", "score_sokoban")
    index = clone.folder("07_model_output") / "episodes"
    joined = duckdb.sql(
        f"SELECT count(*) FROM '{folder}/token_scores/*/*.parquet' JOIN '{index}/**/*.parquet' USING (trajectory_id)"
    )
    assert joined.fetchall() == [(len(rows),)]
    again = score(clone, ids=[rows["trajectory_id"].iloc[0]])
    assert set(again["trajectory_id"]) == {rows["trajectory_id"].iloc[0]}
    assert not clone.load("score_sokoban.occlusion")
    assert clone.load("score_sokoban.token_scores@polars").collect().height == len(again)
    assert clone.load("score_sokoban.token_scores@ibis").count().execute() == len(again)


def test_geometry(stored_run):
    project = stored_run("geo3k_multi_turn")
    rows = score(project, "geo3k_multi_turn", split="evaluation", limit=3, occlusion=1)
    assert rows["trajectory_id"].nunique() == 3 and rows["image_reliance"].notna().all()
    maps = project.load("score_geo3k_multi_turn.occlusion@pandas")
    assert len(maps) == 8 * 6 and maps["content"].isna().all()  # 128 × 96 pixels
