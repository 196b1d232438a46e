"""Scores of stored episodes: the trainer's log-probs, the whole distribution, blank images and covered parts."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from geo_sokoban_pipeline.config.grpo import OptimizerOptions
from geo_sokoban_pipeline.envs.images import ImagePart, encode_png
from geo_sokoban_pipeline.policies.policy import Policy
from geo_sokoban_pipeline.tasks import task_of
from geo_sokoban_pipeline.training.backend import build_backend
from geo_sokoban_pipeline.training.batch import build_sample
from geo_sokoban_pipeline.training.token_scoring import ScoringRequest, map_occlusion, score_tokens
from geo_sokoban_pipeline.trajectories.schema import OCCLUSION, TOKEN_SCORES
from geo_sokoban_pipeline.trajectories.types import Trajectory
from training.setup import Setup, copied

ABOUT = {"run": "train_sokoban", "run_id": "default", "scored_by": "train_sokoban/default@2", "scored_version": 3}
WHOLE = 10_000  # more than the vocabulary


def request(setup: Setup, top_k: int = 3, reliance: bool = True, **optimizer: Any) -> ScoringRequest:
    options = OptimizerOptions.model_validate({**setup.options.optimizer.model_dump(), **optimizer})
    return ScoringRequest(options, top_k, reliance, ABOUT)


def trainer(episodes: Sequence[Trajectory], policy: Policy, setup: Setup, temperature: float = 1.0) -> np.ndarray:
    backend = build_backend(policy, setup.options.optimizer, temperature)
    return np.concatenate(backend.log_probs([build_sample(episode, policy) for episode in episodes]))


def blind(policy: Policy) -> Policy:
    """The policy with image features of 0, whatever it is shown."""
    made = copied(policy)
    with torch.no_grad():
        for name, weight in made.model.named_parameters():
            if "merger" in name and "linear_fc2" in name:
                weight.zero_()
    return made


@pytest.mark.parametrize("sizes", [{}, {"logit_chunk": 5, "max_tokens": 300}], ids=["default", "small passes"])
def test_log_probs_are_those_of_the_trainer(setup: Setup, sizes: dict[str, int]) -> None:
    table = score_tokens(setup.episodes, setup.trained, request(setup, **sizes))
    assert table.schema == TOKEN_SCORES
    found = table["log_prob"].to_numpy()
    assert np.allclose(found, trainer(setup.episodes, setup.trained, setup), atol=1e-5)
    stored = np.concatenate([episode.rollout_log_probs[episode.loss_mask == 1] for episode in setup.episodes])
    assert np.array_equal(table["stored_log_prob"].to_numpy(), stored)
    assert np.allclose(table["ratio"].to_numpy(), np.exp(found - stored), rtol=1e-5)
    assert np.abs(table["ratio"].to_numpy() - 1).max() > 0.05  # another policy than the one that played


def test_the_policy_that_played_has_ratio_1(setup: Setup) -> None:
    table = score_tokens(setup.episodes, setup.policy, request(setup, reliance=False))
    assert np.abs(table["ratio"].to_numpy() - 1).max() < 1e-4
    assert table["image_reliance"].null_count == table.num_rows


def test_each_row_names_its_token(setup: Setup) -> None:
    rows = score_tokens(setup.episodes[:3], setup.policy, request(setup)).to_pylist()
    assert {name: rows[0][name] for name in ABOUT} == ABOUT
    for episode in setup.episodes[:3]:
        own = [row for row in rows if row["trajectory_id"] == episode.trajectory_id]
        assert [row["position"] for row in own] == np.flatnonzero(episode.loss_mask).tolist()
        assert [row["token_id"] for row in own] == episode.token_ids[episode.loss_mask == 1].tolist()
        for number, turn in enumerate(episode.turns):
            there = [row for row in own if row["turn"] == number]
            places = range(turn.token_start, turn.token_end) if turn.role == "assistant" else []
            assert [row["position"] for row in there] == list(places)
            assert "".join(row["token"] for row in there).removesuffix("<|im_end|>") == turn.text * bool(there)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_top_tokens_and_entropy_are_those_of_the_whole_distribution(setup: Setup, temperature: float) -> None:
    sampling = f'{{"temperature": {temperature}}}'
    episodes = [replace(episode, sampling=sampling) for episode in setup.episodes[:2]]
    rows = score_tokens(episodes, setup.trained, request(setup, WHOLE)).to_pylist()
    few = score_tokens(episodes, setup.trained, request(setup, 4)).to_pylist()
    banned = set(setup.policy.banned_ids.tolist())
    expected = trainer(episodes, setup.trained, setup, temperature)
    for row, short, log_prob in zip(rows, few, expected, strict=True):
        every = dict(zip(row["top_ids"], row["top_log_probs"], strict=True))
        assert row["top_log_probs"] == sorted(row["top_log_probs"], reverse=True)
        allowed = np.array([value for token, value in every.items() if token not in banned])
        assert np.isclose(np.exp(allowed).sum(), 1, atol=1e-5)
        assert all(value == -np.inf for token, value in every.items() if token in banned)
        assert every[row["token_id"]] == pytest.approx(log_prob, abs=1e-5)
        # The entropy is that at temperature 1.
        plain = allowed * temperature - np.log(np.exp(allowed * temperature).sum())
        assert row["entropy"] == pytest.approx(-(np.exp(plain) * plain).sum(), abs=1e-4)
        assert short["top_ids"] == row["top_ids"][:4] and len(short["top_tokens"]) == 4
        assert short["top_tokens"] == [setup.policy.codec.decode([token]) for token in short["top_ids"]]


def test_reliance_is_the_difference_to_blank_images(setup: Setup) -> None:
    black = encode_png(np.zeros((96, 96, 3), np.uint8))
    assert Image.open(io.BytesIO(setup.episodes[0].images[0])).size == (96, 96)
    unseen = [replace(episode, images=[black] * len(episode.images)) for episode in setup.episodes]
    found = score_tokens(setup.episodes, setup.policy, request(setup))["image_reliance"].to_numpy()
    expected = trainer(setup.episodes, setup.policy, setup) - trainer(unseen, setup.policy, setup)
    assert np.allclose(found, expected, atol=1e-5)
    assert np.abs(found).mean() > 1e-3


def test_a_blind_policy_has_no_reliance_and_empty_maps(setup: Setup) -> None:
    policy = blind(setup.policy)
    reliance = score_tokens(setup.episodes, policy, request(setup))["image_reliance"]
    assert reliance.null_count == 0 and set(reliance.to_pylist()) == {0.0}
    maps = map_occlusion(setup.episodes[:1], policy, request(setup), task_of("sokoban").image_parts)
    assert maps.num_rows and np.allclose(np.concatenate(maps["drops"].to_pylist()), 0, atol=1e-6)


def test_episodes_without_images_have_no_reliance(setup: Setup) -> None:
    episode = setup.episodes[0]
    first = next(turn for turn in episode.turns if turn.role == "assistant")
    start, ids = first.token_start, episode.token_ids[: first.token_end]
    kept = ids != setup.policy.codec.image_pad_id
    alone = replace(
        episode,
        token_ids=ids[kept],
        loss_mask=episode.loss_mask[: first.token_end][kept],
        rollout_log_probs=episode.rollout_log_probs[: first.token_end][kept],
        turns=[
            replace(episode.turns[0], image_indices=[], token_end=int(kept[:start].sum())),
            replace(first, token_start=int(kept[:start].sum()), token_end=int(kept.sum())),
        ],
        images=[],
        image_grid_thw=[],
    )
    reliance = score_tokens([alone, episode], setup.policy, request(setup))["image_reliance"].to_pylist()
    count = int(alone.loss_mask.sum())
    assert set(reliance[:count]) == {None} and None not in reliance[count:]
    assert map_occlusion([alone], setup.policy, request(setup), task_of("sokoban").image_parts).num_rows == 0


def test_a_map_covers_each_cell_by_itself(setup: Setup) -> None:
    """Each drop again, from an episode whose stored image is the covered one and whose later images stay."""
    episode = next(one for one in setup.episodes if len(one.images) > 1)
    maps = map_occlusion([episode], setup.policy, request(setup), task_of("sokoban").image_parts)
    assert maps.schema == OCCLUSION
    rows = maps.to_pylist()
    assert len(rows) == 36 * sum(turn.role == "user" for turn in episode.turns[: responses(episode)[-1]])
    own = trainer([episode], setup.policy, setup)
    places = np.flatnonzero(episode.loss_mask).tolist()
    for row in rows[3:80:11]:
        pixels = np.asarray(Image.open(io.BytesIO(episode.images[row["image"]])).convert("RGB")).copy()
        pixels[row["top"] : row["top"] + row["height"], row["left"] : row["left"] + row["width"]] = 127
        images = list(episode.images)
        images[row["image"]] = encode_png(pixels)
        turn = episode.turns[row["turn"] + 1]
        assert row["positions"] == list(range(turn.token_start, turn.token_end))
        covered = trainer([replace(episode, images=images)], setup.policy, setup)
        at = [places.index(position) for position in row["positions"]]
        assert np.allclose(row["drops"], (own - covered)[at], atol=1e-5)
        assert row["drop"] == pytest.approx(sum(row["drops"]), abs=1e-5)
    assert {row["content"] for row in rows} >= {"wall", "floor", "box", "player"}
    assert max(abs(row["drop"]) for row in rows) > 1e-3


def responses(episode: Trajectory) -> list[int]:
    return [number for number, turn in enumerate(episode.turns) if turn.role == "assistant"]


def test_a_map_counts_all_responses_up_to_the_next_image(setup: Setup) -> None:
    """As in geometry with several turns: one image, then text alone."""
    episode = next(one for one in setup.episodes if len(one.images) > 1)
    turns = [
        replace(turn, image_indices=turn.image_indices * (number == 0)) for number, turn in enumerate(episode.turns)
    ]
    second = episode.turns[2]
    pads = np.flatnonzero(episode.token_ids == setup.policy.codec.image_pad_id)
    ids = episode.token_ids.copy()
    ids[pads[pads >= second.token_start]] = episode.token_ids[0]  # text in place of the later images
    one_image = replace(episode, turns=turns, token_ids=ids, images=episode.images[:1])
    whole = [ImagePart(0, 0, 96, 96)]
    (row,) = map_occlusion([one_image], setup.policy, request(setup), lambda png: whole).to_pylist()
    assert row["positions"] == np.flatnonzero(episode.loss_mask).tolist()
    assert row["content"] is None
