"""A folder laid out as Qwen3-VL is published: its tokenizer, template and processor with thin random weights."""

from __future__ import annotations

import numpy as np
import pytest
from PIL import Image

from geo_sokoban_pipeline.config.rollout import RolloutOptions, SamplingOptions
from geo_sokoban_pipeline.policies.patches import load_image_processor
from geo_sokoban_pipeline.policies.policy import load_policy
from geo_sokoban_pipeline.rollout.engines.transformers import TransformersEngine
from geo_sokoban_pipeline.rollout.episode import EpisodeRequest, RolloutSettings
from geo_sokoban_pipeline.rollout.rollout import rollout
from policies.library import library_log_probs
from policies.thin import VOCABULARY, write_thin_policy
from task_options import EnvOptions, RewardOptions


@pytest.fixture(scope="module")
def real_policy(shared_data, tmp_path_factory):
    folder = tmp_path_factory.mktemp("qwen3_vl")
    return load_policy(write_thin_policy(folder, shared_data / "qwen3_vl_processor"))


def test_the_files_are_the_published_ones(real_policy, shared_data):
    """Template and processor; marks and padding rows are banned."""
    banned = [*range(151_652, 151_657), *range(len(real_policy.tokenizer), VOCABULARY)]
    assert real_policy.banned_ids.tolist() == banned
    assert real_policy.codec.template == (shared_data / "qwen3_vl_processor/chat_template.jinja").read_text()
    assert real_policy.codec.decode(real_policy.codec.separator_ids) == "\n"
    processor = load_image_processor(shared_data / "qwen3_vl_processor")
    assert (processor.patch_size, processor.merge_size, processor.temporal_patch_size) == (16, 2, 2)
    # Its minimum of 65,536 pixels enlarges a small board: 256 × 256 pixels, 8 × 8 tokens.
    image = real_policy.reader.read(Image.new("RGB", (96, 96)))
    assert (processor.size["shortest_edge"], image.grid, image.token_count(2)) == (65_536, (1, 16, 16), 64)


@pytest.mark.slow
def test_it_plays_and_its_log_probs_are_those_of_a_plain_pass(real_policy, sokoban_rows):
    rows = sokoban_rows(2)[:2]
    env = EnvOptions(args={"cell_px": 16, "max_actions_per_turn": 3})
    # A random policy never ends its response by itself: truncated responses are played on, as the original rules do.
    limits = RolloutOptions(max_turns=2, max_tokens_per_turn=5, max_failed_share=0.0)
    settings = RolloutSettings(env, RewardOptions(), limits, SamplingOptions(), 0, "sokoban")
    tasks = [EpisodeRequest(f"e{number}", row, 0, number, number) for number, row in enumerate(rows)]
    for episode in rollout(TransformersEngine(real_policy), real_policy, tasks, settings):
        assert episode.status == "truncated"
        assert not np.isin(episode.token_ids[episode.loss_mask == 1], real_policy.banned_ids).any()
        expected = library_log_probs(real_policy, episode)
        np.testing.assert_allclose(episode.rollout_log_probs, expected, atol=1e-4)
