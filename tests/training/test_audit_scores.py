"""Stored log-probs against recomputed ones: which gaps are findings, and what a finding shows."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from geo_sokoban_pipeline.config.study import AuditOptions
from geo_sokoban_pipeline.envs.sokoban.task import SOKOBAN
from geo_sokoban_pipeline.evaluation.audit import AuditCheck, AuditedEntry, RunRules
from geo_sokoban_pipeline.policies.policy import save_policy
from geo_sokoban_pipeline.runs.fingerprint import flatten
from geo_sokoban_pipeline.training.audit_scores import audit_scores
from geo_sokoban_pipeline.trajectories.types import Trajectory, trajectories_to_table
from training.setup import Setup


def audit(setup: Setup, episodes: list[Trajectory], policies: dict[int, Path], **options: Any) -> dict[str, AuditCheck]:
    """All episodes under the weights of their version."""
    given = setup.options
    settings = flatten({"policy": given.policy.model_dump(), "optimizer": given.optimizer.model_dump()})
    rules = RunRules(SOKOBAN, given.env, given.reward, given.rollout, given.grpo, {}, settings)
    middle = len(episodes) // 2
    tables = [
        trajectories_to_table(half, setup.policy.table_context) for half in (episodes[:middle], episodes[middle:])
    ]
    parts = {
        f"iter=00000/part-{number:03d}": lambda columns=None, table=table: table.select(columns or table.column_names)
        for number, table in enumerate(tables)
        if table.num_rows
    }
    entry = AuditedEntry("trajectories", parts, None, trained=True)
    chosen = AuditOptions(scored_share=1.0, **options)
    return {check.check: check for check in audit_scores([entry], policies, rules, chosen)}


@pytest.mark.parametrize("place", [0, 2, -1])
def test_the_worst_token_is_shown_between_its_neighbours(setup: Setup, place: int) -> None:
    episode, policies = setup.episodes[1], {0: setup.folder.path}
    sampled = np.flatnonzero(episode.loss_mask)
    target, ids = int(sampled[place]), episode.token_ids
    log_probs = episode.rollout_log_probs.copy()
    log_probs[target] -= 5.0
    episodes = [setup.episodes[0], replace(episode, rollout_log_probs=log_probs)]
    checks = audit(setup, episodes, policies, log_prob_tolerance=0.4 / len(sampled))
    assert checks["log-probs"].checked == checks["image effect"].checked == 2
    (finding,) = checks["log-probs"].findings
    around = (ids[max(0, target - 12) : target], ids[target : target + 1], ids[target + 1 : target + 13])
    decode = setup.policy.codec.decode
    before, token, after = (re.sub(r"(<\|image_pad\|>)+", "<image>", decode(piece)) for piece in around)
    shown = f"-5 at token {target} of {episode.trajectory_id}: {before!r}»{token}«{after!r}"
    assert shown in finding and finding.count(" at token ") == 3, "the worst ones, not all"
    assert audit(setup, episodes, policies, log_prob_tolerance=6.0)["log-probs"].findings == ()


def test_a_token_is_scored_by_the_weights_that_sampled_it_alone(setup: Setup) -> None:
    episode, policies = setup.episodes[1], {0: setup.folder.path}
    sampled = np.flatnonzero(episode.loss_mask)
    later = int(sampled[len(sampled) // 2])
    log_probs = episode.rollout_log_probs.copy()
    log_probs[later:] -= 5.0  # as other weights, which are not kept, may have sampled them
    mixed = replace(episode, rollout_log_probs=log_probs, weight_spans=[(0, 0, later), (1, later, len(log_probs))])
    log_probs_of_0 = audit(setup, [mixed], policies)["log-probs"]
    assert (log_probs_of_0.checked, log_probs_of_0.findings) == (1, ())


def test_log_probs_of_other_weights_are_found_and_the_weights_named(setup: Setup, tmp_path: Path) -> None:
    save_policy(setup.trained, tmp_path)
    policies = {0: setup.folder.path, 1: tmp_path}
    episodes = setup.episodes[:4]
    sound = audit(setup, episodes, policies)
    assert sound["log-probs"].findings == sound["image effect"].findings == ()
    tokens = sum(int(episode.loss_mask.sum()) for episode in episodes)
    assert f", {tokens} tokens" in sound["log-probs"].notes[0]
    relabelled = [replace(one, policy_version=1, weight_spans=[(1, 0, len(one.token_ids))]) for one in episodes]
    (finding,) = audit(setup, relabelled, policies)["log-probs"].findings
    assert finding.startswith("version 1: ") and "they are those of version 0" in finding
