"""The engine's equivalences: cached = uncached = alone = in any batch = a plain forward pass of the library."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch

from geo_sokoban_pipeline.config.rollout import RolloutOptions, SamplingOptions
from geo_sokoban_pipeline.policies import qwen3_vl
from geo_sokoban_pipeline.rollout.engines.transformers import TransformersEngine
from geo_sokoban_pipeline.rollout.episode import EpisodeRequest, RolloutSettings
from geo_sokoban_pipeline.rollout.rollout import rollout
from geo_sokoban_pipeline.trajectories.schema import validate_trajectories
from geo_sokoban_pipeline.trajectories.types import trajectories_to_table
from policies.library import library_log_probs
from task_options import EnvOptions, RewardOptions

# float32 sums in another order; measured differences are below 1e-5.
TOLERANCE = 1e-4
SAMPLED = SamplingOptions()
KINDS = {
    "sampled": SAMPLED,
    "cool": SamplingOptions(temperature=0.6),
    "cut": SamplingOptions(top_p=0.8, top_k=30),
    "greedy": SamplingOptions(greedy=True),
}


@pytest.fixture(scope="session")
def tasks(sokoban_rows):
    """Twelve episodes: four levels, three samples each."""
    rows = [row for row in sokoban_rows(8) if row["split"] == "train"]
    return [EpisodeRequest(f"g{g}/s{s}", rows[g], g, s, 100 * g + s) for g in range(4) for s in range(3)]


def play(policy, tasks, sampling=SAMPLED, turns=5, **engine):
    args = {"max_actions_per_turn": 1, "cell_px": 16, "observation_style": "brief"}
    limits = RolloutOptions(max_turns=turns, max_tokens_per_turn=9)
    chosen = RolloutSettings(EnvOptions(args=args), RewardOptions(), limits, sampling, 0, "sokoban")
    return rollout(TransformersEngine(policy, **engine), policy, tasks, chosen)


def assert_equal_episodes(left, right):
    for ours, theirs in zip(left, right, strict=True):
        assert ours.token_ids.tolist() == theirs.token_ids.tolist(), ours.trajectory_id
        assert ours.status == theirs.status
        np.testing.assert_allclose(ours.rollout_log_probs, theirs.rollout_log_probs, atol=TOLERANCE)


@pytest.fixture(scope="session")
def reference(talker, tasks):
    return {name: play(talker, tasks, sampling) for name, sampling in KINDS.items()}


@pytest.mark.parametrize("kind", KINDS)
def test_log_probs_equal_a_plain_forward_pass(talker, reference, kind):
    sampling = KINDS[kind]
    for episode in reference[kind]:
        expected = library_log_probs(talker, episode, 1.0 if sampling.greedy else sampling.temperature)
        np.testing.assert_allclose(episode.rollout_log_probs, expected, atol=TOLERANCE)


def test_the_episodes_compared_are_ragged_and_keep_the_contract(reference, talker):
    """Without this the equivalences below would prove little."""
    episodes = reference["sampled"]
    responses = {turn.token_end - turn.token_start for e in episodes for turn in e.turns if turn.role == "assistant"}
    assert len(responses) > 5
    assert len({len(episode.turns) for episode in episodes}) > 2
    assert {episode.finish_reason for episode in episodes} == {"stop", "length"}
    banned = set(talker.banned_ids.tolist())
    for played in reference.values():
        assert not any(banned & set(e.token_ids[e.loss_mask == 1].tolist()) for e in played)
        validate_trajectories(trajectories_to_table(played, talker.table_context))


@pytest.mark.parametrize("kind", ["sampled", "greedy"])
@pytest.mark.parametrize(
    "engine",
    [
        {"reuse_cache": False},
        {"draft_share": 0.51, "max_conversations": 4},
        {"max_conversations": 5},
        {"max_conversations": 1},
        {"prefill_tokens": 1, "max_conversations": 7, "reuse_cache": False},
    ],
    ids=str,
)
def test_the_same_episodes_under_any_setting(talker, tasks, reference, kind, engine):
    """Tokens are equal exactly: rounding could only matter for a draw within 1e-6 of a border, or a near tie."""
    assert_equal_episodes(play(talker, tasks, KINDS[kind], **engine), reference[kind])


@pytest.mark.parametrize("room", [0, 3, 20, 25])
def test_an_episode_ends_where_the_context_is_full(talker, tasks, room):
    """With no token of room there is an empty response, and the episode is a valid row."""
    policy = copy.deepcopy(talker)
    prompt = play(talker, tasks[:1], turns=1)[0].prompt_length
    policy.model.config.text_config.max_position_embeddings = prompt + room
    episodes = play(policy, tasks)
    assert all(e.loss_mask[prompt + room :].sum() == 0 for e in episodes)
    cut = [e for e in episodes if e.status == "truncated"]
    assert cut and {e.finish_reason for e in cut} == {"length"}
    responses = [turn for e in cut for turn in e.turns if turn.role == "assistant"]
    assert any(turn.token_start == turn.token_end for turn in responses)
    validate_trajectories(trajectories_to_table(episodes, policy.table_context))


def test_runs_repeat_bit_for_bit(talker, tasks, reference):
    for again, first in zip(play(talker, tasks), reference["sampled"], strict=True):
        assert again.token_ids.tobytes() == first.token_ids.tobytes()
        assert again.rollout_log_probs.tobytes() == first.rollout_log_probs.tobytes()


def test_no_plan_of_attention_is_made_for_each_length(talker, tasks, monkeypatch):
    """cuDNN's attention is off while the engine computes, and on again for training."""
    seen, attend = [], qwen3_vl.attend

    def note(*states):
        seen.append(torch.backends.cuda.cudnn_sdp_enabled())
        return attend(*states)

    monkeypatch.setattr(qwen3_vl, "attend", note)
    play(talker, tasks[:1], turns=1)
    assert set(seen) == {False}
    assert torch.backends.cuda.cudnn_sdp_enabled()
