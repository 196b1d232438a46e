"""Scores of stored episodes under a policy: every sampled token, the use of the images, and of each part of them.

Log-probs are those of the trainer: one forward pass, temperature and set of banned ids. The reliance of a token on the
images is its log-prob minus that with black images of the same size, so it is exactly 0 for a policy that does not use
its vision tower.
"""

from __future__ import annotations

import io
import json
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from PIL import Image
from torch import Tensor, nn

from geo_sokoban_pipeline.config.grpo import OptimizerOptions
from geo_sokoban_pipeline.envs.images import ImagePart
from geo_sokoban_pipeline.evaluation.rollouts import blank_image
from geo_sokoban_pipeline.grpo.loss import MAX_LOG_RATIO, entropy, log_distribution
from geo_sokoban_pipeline.policies.patches import EncodedImage
from geo_sokoban_pipeline.policies.policy import Policy
from geo_sokoban_pipeline.training.backends.torch import GradientPass, PassSetting
from geo_sokoban_pipeline.training.batch import TrainSample, build_sample
from geo_sokoban_pipeline.trajectories.schema import OCCLUSION, TOKEN_SCORES
from geo_sokoban_pipeline.trajectories.types import Trajectory

_TOGETHER = 16  # samples whose images are encoded at once
_COVER = (127, 127, 127)  # about 0 after the normalisation of pixels, and no colour of a board


@dataclass(frozen=True, eq=False)
class TokenScores:
    """Scores of the trained tokens of a sample.

    Attributes:
        log_probs: (M,) float32 nats, as the trainer computes them.
        entropies: (M,) float32 nats, of the distribution at temperature 1.
        top_ids, top_log_probs: (M, K) the likeliest ids, the likeliest first, at the temperature of the log-probs.
    """

    log_probs: np.ndarray
    entropies: np.ndarray
    top_ids: np.ndarray
    top_log_probs: np.ndarray


class TokenScorer(GradientPass):
    """The trainer's pass, which tells more of each trained token."""

    @torch.no_grad()
    def score(self, samples: Sequence[TrainSample], top_k: int) -> list[TokenScores]:
        """Scores of each sample, in order."""
        features = self._encode(self._images(samples))
        found: dict[int, TokenScores] = {}
        for batch in self._plan(samples):
            members = [samples[index] for index in batch]
            columns = self._forward(members, features, partial(self._describe, top_k))
            ends = np.cumsum([len(sample.targets) for sample in members])[:-1]
            parts = zip(*(np.split(column.cpu().numpy(), ends) for column in columns), strict=True)
            found |= {index: TokenScores(*part) for index, part in zip(batch, parts, strict=True)}
        return [found[index] for index in range(len(samples))]

    def _describe(self, top_k: int, states: Tensor, labels: Tensor, head: nn.Module) -> tuple[Tensor, ...]:
        """(M,) log-probs, (M,) entropies, (M, K) likeliest ids and their log-probs after (M, hidden) states."""
        rows = []
        for part, ids in zip(
            states.split(self.setting.logit_chunk), labels.split(self.setting.logit_chunk), strict=True
        ):
            logits = head(part)
            whole = log_distribution(logits, self.setting.temperature, self._banned)
            values = whole.gather(-1, ids.unsqueeze(-1)).squeeze(-1)
            top = whole.topk(min(top_k, whole.shape[-1]), dim=-1)
            rows.append((values, entropy(logits, banned_ids=self._banned), top.indices, top.values))
        return tuple(torch.cat(column) for column in zip(*rows, strict=True))


@dataclass(frozen=True)
class ScoringRequest:
    """Values that are computed of episodes, and columns of their rows about the whole.

    Attributes:
        optimizer: sizes of the trainer's passes.
        top_k: likeliest tokens of a position.
        image_reliance: whether episodes with images are scored with blank ones, too.
        about: values of the columns `run`, `run_id`, `scored_by` and `scored_version`.
    """

    optimizer: OptimizerOptions
    top_k: int
    image_reliance: bool
    about: Mapping[str, Any]


def score_tokens(episodes: Sequence[Trajectory], policy: Policy, request: ScoringRequest) -> pa.Table:
    """Rows of `TOKEN_SCORES`: the sampled tokens of episodes, in their order.

    Raises:
        ValueError: an episode has no sampled token.
    """
    rows: dict[int, pa.Table] = {}
    for scorer, places in _by_temperature(episodes, policy, request.optimizer):
        for chosen in _chunks(places):
            samples = [build_sample(episodes[place], policy) for place in chosen]
            scores = scorer.score(samples, request.top_k)
            blank = _score_blank(samples, policy, scorer) if request.image_reliance else [None] * len(samples)
            for place, sample, score, other in zip(chosen, samples, scores, blank, strict=True):
                rows[place] = _token_rows(episodes[place], sample, score, other, policy, request.about)
    if not rows:
        return TOKEN_SCORES.empty_table()
    return pa.concat_tables(rows[place] for place in range(len(episodes))).combine_chunks()


def map_occlusion(
    episodes: Sequence[Trajectory],
    policy: Policy,
    request: ScoringRequest,
    find_parts: Callable[[bytes], Sequence[ImagePart]],
) -> pa.Table:
    """Rows of `OCCLUSION`: how much less likely responses are if a part of an image is covered with grey.

    An image is judged by the responses that follow it, up to the next turn with an image; the other images stay.

    Args:
        find_parts: the parts of an image.
    """
    rows: list[dict[str, Any]] = []
    for scorer, places in _by_temperature(episodes, policy, request.optimizer):
        for place in places:
            rows += _occlusion_rows(episodes[place], policy, scorer, request.about, find_parts)
    return pa.Table.from_pylist(rows, schema=OCCLUSION)


def sampling_temperature(episode: Trajectory) -> float:
    """Temperature of the stored log-probs; those of greedy decoding are untempered."""
    sampling = json.loads(episode.sampling)
    return 1.0 if sampling.get("greedy") else float(sampling.get("temperature", 1.0))


def with_blank_images(sample: TrainSample, policy: Policy) -> TrainSample:
    """The sample with a black image in place of each of its own."""
    return replace(sample, images=[_redraw(image.png, policy, blank_image) for image in sample.images])


def _redraw(png: bytes, policy: Policy, draw: Callable[[Image.Image], Image.Image]) -> EncodedImage:
    with Image.open(io.BytesIO(png)) as image:
        return policy.reader.read(draw(image))


def _by_temperature(
    episodes: Sequence[Trajectory], policy: Policy, optimizer: OptimizerOptions
) -> Iterator[tuple[TokenScorer, list[int]]]:
    places: dict[float, list[int]] = defaultdict(list)
    for place, episode in enumerate(episodes):
        places[sampling_temperature(episode)].append(place)
    for temperature, chosen in places.items():
        yield TokenScorer(policy, PassSetting.of(optimizer, temperature)), chosen


def _chunks(values: Sequence[Any]) -> Iterator[Sequence[Any]]:
    for first in range(0, len(values), _TOGETHER):
        yield values[first : first + _TOGETHER]


def _score_blank(samples: Sequence[TrainSample], policy: Policy, scorer: TokenScorer) -> list[np.ndarray | None]:
    """Log-probs with blank images; None for a sample without an image."""
    shown = [place for place, sample in enumerate(samples) if sample.images]
    values = dict(
        zip(shown, scorer.log_probs([with_blank_images(samples[place], policy) for place in shown]), strict=True)
    )
    return [values.get(place) for place in range(len(samples))]


def _token_rows(
    episode: Trajectory,
    sample: TrainSample,
    scores: TokenScores,
    blank: np.ndarray | None,
    policy: Policy,
    about: Mapping[str, Any],
) -> pa.Table:
    targets = sample.targets
    count, top_k = scores.top_ids.shape
    stored = sample.rollout_log_probs
    differences = np.clip(scores.log_probs.astype(np.float64) - stored, -MAX_LOG_RATIO, MAX_LOG_RATIO)
    offsets = pa.array(np.arange(count + 1, dtype=np.int32) * top_k)
    top = (scores.top_ids.ravel(), _texts_of(scores.top_ids.ravel(), policy), scores.top_log_probs.ravel())
    lists = [pa.ListArray.from_arrays(offsets, pa.array(values)) for values in top]
    columns: dict[str, Any] = {
        **{name: pa.repeat(pa.scalar(value, TOKEN_SCORES.field(name).type), count) for name, value in about.items()},
        "trajectory_id": pa.repeat(episode.trajectory_id, count),
        "iteration": np.full(count, episode.iteration),
        "position": targets,
        "turn": _turns_of(episode, targets),
        "token_id": sample.labels,
        "token": _texts_of(sample.labels, policy),
        "log_prob": scores.log_probs,
        "entropy": scores.entropies,
        "stored_log_prob": stored,
        "ratio": np.exp(differences),
        "image_reliance": pa.nulls(count) if blank is None else scores.log_probs - blank,
        **dict(zip(("top_ids", "top_tokens", "top_log_probs"), lists, strict=True)),
    }
    arrays = [pa.array(columns[field.name]).cast(field.type) for field in TOKEN_SCORES]
    return pa.Table.from_arrays(arrays, schema=TOKEN_SCORES)


def _texts_of(ids: np.ndarray, policy: Policy) -> pa.Array:
    """Text of each token; one that is a part of a character gives a replacement character."""
    distinct, inverse = np.unique(ids, return_inverse=True)
    return pa.array([policy.codec.decode([token]) for token in distinct], pa.string()).take(pa.array(inverse))


def _turns_of(episode: Trajectory, positions: np.ndarray) -> np.ndarray:
    """Number of the turn that each position lies in."""
    return np.searchsorted(np.array([turn.token_start for turn in episode.turns]), positions, side="right") - 1


def _occlusion_rows(
    episode: Trajectory,
    policy: Policy,
    scorer: TokenScorer,
    about: Mapping[str, Any],
    find_parts: Callable[[bytes], Sequence[ImagePart]],
) -> Iterator[dict[str, Any]]:
    shown = [(number, image) for number, turn in enumerate(episode.turns) for image in turn.image_indices]
    for place, (number, image) in enumerate(shown):
        later = [turn for turn, _ in shown if turn > number]
        end = episode.turns[later[0]].token_start if later else len(episode.token_ids)
        mask = episode.loss_mask.copy()
        mask[: episode.turns[number].token_end] = 0
        mask[end:] = 0
        if not mask.any():
            continue
        sample = build_sample(replace(episode, loss_mask=mask), policy)
        own = scorer.log_probs([sample])[0]
        for chosen in _chunks(find_parts(episode.images[image])):
            covered = [_cover(sample, place, part, policy) for part in chosen]
            for part, values in zip(chosen, scorer.log_probs(covered), strict=True):
                drops = own - values
                yield {
                    **about,
                    "trajectory_id": episode.trajectory_id,
                    "iteration": episode.iteration,
                    "turn": number,
                    "image": image,
                    "left": part.left,
                    "top": part.top,
                    "width": part.width,
                    "height": part.height,
                    "content": part.content,
                    "drop": float(drops.sum()),
                    "positions": sample.targets,
                    "drops": drops,
                }


def _cover(sample: TrainSample, place: int, part: ImagePart, policy: Policy) -> TrainSample:
    """The sample with a part of one of its images covered."""

    def draw(image: Image.Image) -> Image.Image:
        covered = image.convert("RGB")
        covered.paste(_COVER, (part.left, part.top, part.left + part.width, part.top + part.height))
        return covered

    images = list(sample.images)
    images[place] = _redraw(images[place].png, policy, draw)
    return replace(sample, images=images)
