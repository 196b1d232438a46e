"""regrade_* on a finished run: the same options give the same file; others change rewards and advantages alone."""

from __future__ import annotations

import numpy as np
import pytest

from geo_sokoban_pipeline.grpo import group_advantages

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("stored")]

# Columns that a regraded episode may have anew.
GRADED = {"reward", "advantage", "reward_parts", "trained", "drop_reason", "turns", "metrics"}
GRADED |= {"turn_reward_avg", "turn_reward_total", "final_bonus", "distance_delta"}


def episodes(project, run):
    return [row for part in project.load(f"{run}.trajectories").values() for row in part().to_pylist()]


def regrade(project, **changes):
    project.run("regrade_sokoban", params={"train_sokoban": changes} if changes else None)
    return episodes(project, "train_sokoban"), episodes(project, "regrade_sokoban")


def test_the_same_options_give_the_same_episodes(clone):
    stored, regraded = regrade(clone)
    assert regraded == stored
    rows = clone.load("regrade_sokoban.metrics")
    assert [row["iteration"] for row in rows] == [0, 1, 2]
    assert all(row["regrade/changed_rewards"] == row["regrade/changed_signs"] == 0.0 for row in rows)
    assert all(row["regrade/old_reward"] == row["regrade/new_reward"] for row in rows)


def test_another_reward_changes_rewards_and_advantages_alone(clone, tmp_path):
    """The new reward is the number of turns, so what must come out is known."""
    own = tmp_path / "count.py"
    own.write_text("def reward(result, args):\n    return float(len(result.responses))\n", encoding="utf-8")
    stored, regraded = regrade(
        clone, reward={"function": str(own)}, grpo={"advantage": "grpo", "normalize": "none", "advantage_clip": None}
    )
    for old, new in zip(stored, regraded, strict=True):
        assert {name: old[name] for name in old if name not in GRADED} == {
            name: new[name] for name in new if name not in GRADED
        }
        assert new["reward"] == new["n_turns"]
        assert [turn["text"] for turn in new["turns"]] == [turn["text"] for turn in old["turns"]]
        assert all(turn["advantage"] is None for turn in new["turns"])
    for iteration in range(3):
        rows = [row for row in regraded if row["iteration"] == iteration]
        expected = group_advantages([row["reward"] for row in rows], [row["group_index"] for row in rows])
        assert np.allclose([row["advantage"] for row in rows], expected, atol=1e-12)
    rows = clone.load("regrade_sokoban.metrics")
    changed = [old["reward"] != new["reward"] for old, new in zip(stored, regraded, strict=True)]
    assert sum(row["regrade/changed_rewards"] for row in rows) == sum(changed) > 0
    assert np.isclose(
        np.mean([row["regrade/new_reward"] for row in rows]), np.mean([row["reward"] for row in regraded])
    )
    # The index of both has the differences, episode by episode.
    old, new = (clone.load(f"{run}_sokoban.episodes") for run in ("train", "regrade"))
    assert new["trajectory_id"].to_pylist() == [row["trajectory_id"] for row in regraded]
    assert set(new["trajectory_id"].to_pylist()) <= set(old["trajectory_id"].to_pylist())


def test_geometry(stored_run):
    project = stored_run("geo3k_multi_turn")
    project.run("regrade_geo3k_multi_turn")
    assert episodes(project, "train_geo3k_multi_turn") == episodes(project, "regrade_geo3k_multi_turn")
