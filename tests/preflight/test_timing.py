"""The timed part: it takes the policy that the run will take, with its type, and leaves nothing behind."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

from geo_sokoban_pipeline.policies.policy import Policy, save_policy
from geo_sokoban_pipeline.preflight.checks import Subject
from geo_sokoban_pipeline.preflight.resources import ready_policy, time_iteration
from geo_sokoban_pipeline.runs.storage import write_folder

BRIEF = {"grpo": {"groups": 2, "group_size": 2, "filter": "none"}, "rollout": {"max_turns": 2}}


def learn(subject: Subject, policy: Policy) -> None:
    """Store a policy whose weights are all ones as the run's after the warm start."""

    def write(folder: Path) -> dict[str, Any]:
        ones = copy.deepcopy(policy)
        ones.model.load_state_dict({name: torch.ones_like(value) for name, value in ones.model.state_dict().items()})
        save_policy(ones, folder)
        return {}

    write_folder(subject.models / "policy", write)


@pytest.mark.parametrize(("fresh", "stored"), [(False, True), (True, False)])
def test_a_fresh_run_is_not_timed_with_the_old_policy(
    make_subject: Any, tiny_policy: Policy, tmp_path: Path, fresh: bool, stored: bool
) -> None:
    learn(make_subject(), tiny_policy)
    subject = make_subject(train_sokoban={"warm_start": {"steps": 0}}, fresh=fresh)
    policy, seconds = ready_policy(subject, [], None, tmp_path / "made")
    weight = next(policy.model.parameters())
    assert bool((weight == 1).all()) == stored
    assert seconds is None


@pytest.mark.parametrize(("dtype", "attention"), [("bfloat16", "eager"), ("float32", "sdpa")])
def test_the_policy_built_here_has_the_type_and_attention_of_the_options(
    make_subject: Any, tmp_path: Path, dtype: str, attention: str
) -> None:
    chosen = {"policy": {"dtype": dtype, "attention": attention}, "warm_start": {"steps": 0}}
    policy, _ = ready_policy(make_subject(train_sokoban=chosen), [], None, tmp_path / "made")
    assert policy.model.dtype == getattr(torch, dtype)
    assert policy.model.config._attn_implementation == attention


@pytest.mark.parametrize("processes", [1, 2])
def test_nothing_is_left_behind(
    make_subject: Any, sokoban_rows: Any, tiny_weights: int, tmp_path: Path, processes: int
) -> None:
    brief = {**BRIEF, "threads": 1, "processes": processes}
    subject = make_subject(train_sokoban=brief, check_sokoban={"imitation_steps": 0})
    timing = time_iteration(subject, sokoban_rows(8), None)
    assert (timing.episodes, timing.sft_step) == (4, None)
    assert timing.checkpoint_bytes > 3 * 4 * tiny_weights and timing.trajectory_bytes > 0
    assert list(tmp_path.iterdir()) == []
