"""Checks of an audit on episodes and prompts that are made for them."""

from __future__ import annotations

import pytest

from builders import make_trajectories
from geo_sokoban_pipeline.config.grpo import GrpoOptions
from geo_sokoban_pipeline.evaluation.audit_checks import check_advantages, check_splits
from geo_sokoban_pipeline.grpo.scoring import apply_scores, score_groups
from geo_sokoban_pipeline.tasks import task_of


@pytest.mark.parametrize("over_sampled", [True, False])
def test_surplus_groups_are_right_where_more_were_started(over_sampled):
    options, task = (
        GrpoOptions(groups=2, group_size=4, filter="none", normalize="none", advantage="grpo"),
        task_of("sokoban"),
    )
    episodes = make_trajectories(12)
    most = options.groups if over_sampled else None
    apply_scores(episodes, score_groups(episodes, options, task, {}, max_trained_groups=most))
    assert [episode.drop_reason for episode in episodes[::4]] == [None, None, "surplus" if over_sampled else None]
    assert check_advantages(episodes, options, task, {}, over_sampled=over_sampled) == []
    assert len(check_advantages(episodes, options, task, {}, over_sampled=not over_sampled)) == 4


@pytest.mark.parametrize(
    ("images", "findings"),
    [([b"1"], ["train and eval share 1 rows with the same text and images"]), ([b"2"], []), ([], []), (None, [])],
)
def test_a_text_is_shared_with_its_images(images, findings):
    """A question without an image says nothing alone; one of another image is another one."""
    rows = {
        "train": [{"key": "a", "prompt": "Find x.", "images": [b"1"]}],
        "eval": [{"key": "b", "prompt": "Find x.", "images": images}],
    }
    found, _ = check_splits(rows, "key", ("key", "rows"))
    assert [text.partition(";")[0] for _, text in found] == findings
