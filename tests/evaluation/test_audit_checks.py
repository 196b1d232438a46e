"""Checks of an audit on episodes and prompts that are made for them."""

from __future__ import annotations

import pytest

from builders import make_trajectories
from geo_sokoban_pipeline.config.grpo import GrpoOptions
from geo_sokoban_pipeline.evaluation.audit import RunRules, audit_splits
from geo_sokoban_pipeline.evaluation.audit_checks import check_advantages, check_splits
from geo_sokoban_pipeline.grpo.scoring import apply_scores, score_groups
from geo_sokoban_pipeline.runs.fingerprint import flatten, hash_rows
from geo_sokoban_pipeline.tasks import task_of
from task_options import RewardOptions, TrainOptions


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


def test_an_audit_has_the_options_of_the_run_and_finds_other_prompts(train_options: TrainOptions) -> None:
    options = train_options.model_copy(update={"reward": RewardOptions(args={"own": 2})})
    names = ("env", "reward", "rollout", "grpo")
    splits = {
        name: [{"level_hash": f"{name}{number}", "layout_hash": f"{name}{number}"} for number in range(count)]
        for name, count in (("prompts", 4), ("eval_prompts", 2))
    }
    dumped = {name: getattr(options, name).model_dump() for name in names}
    fingerprint = {**flatten({"task": "sokoban", **dumped}), "input.prompts": hash_rows(splits["prompts"])}
    rules = RunRules.of({"fingerprint": fingerprint, "layout": {}})
    assert {name: getattr(rules, name).model_dump() for name in names} == dumped
    (check,) = audit_splits({**splits, "validation_prompts": None}, rules, shared=False)
    assert (check.checked, check.findings) == (6, ())
    (check,) = audit_splits({"prompts": splits["prompts"][1:]}, rules, shared=False)
    assert (check.checked, check.findings) == (3, ("prompts: other rows than the run was trained on",))


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
