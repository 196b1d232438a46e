"""The part of an audit that needs the weights: stored log-probs against recomputed ones, and whether a policy sees.

A version's log-probs are recomputed under the stored checkpoint that sampled them, as the trainer computes them. In
float32 only the order of sums differs between sampling and training, which moves a token by some 1e-6 nats; in bfloat16
each rounding moves a logit by up to 0.4 %, so the mean over tokens is some hundredths of a nat.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from geo_sokoban_pipeline.config.grpo import OptimizerOptions
from geo_sokoban_pipeline.config.policy import PolicyOptions
from geo_sokoban_pipeline.config.rollout import RolloutOptions
from geo_sokoban_pipeline.config.study import AuditOptions
from geo_sokoban_pipeline.console import track
from geo_sokoban_pipeline.evaluation.audit import AuditCheck, AuditedEntry, RunRules, build_check
from geo_sokoban_pipeline.evaluation.audit_checks import Found
from geo_sokoban_pipeline.policies.chat import ChatCodec
from geo_sokoban_pipeline.policies.policy import Policy, load_as
from geo_sokoban_pipeline.runs.fingerprint import unflatten
from geo_sokoban_pipeline.training.backend import build_backend
from geo_sokoban_pipeline.training.batch import build_sample, sampled_by
from geo_sokoban_pipeline.training.runtime import prepare_process
from geo_sokoban_pipeline.training.token_scoring import sampling_temperature, with_blank_images
from geo_sokoban_pipeline.trajectories.index import spread
from geo_sokoban_pipeline.trajectories.types import Trajectory, table_to_trajectories

_FLOAT32, _ROUNDED = 0.0001, 0.1  # nats
_ONE_EPISODE = 10  # times the tolerance of a version
_WORST = 3  # tokens in context
_AROUND = 12  # ids on each side of a token that is shown


def audit_scores(
    entries: Sequence[AuditedEntry], policies: Mapping[int, Path], rules: RunRules, options: AuditOptions
) -> list[AuditCheck]:
    """Check log-probs and the use of images under the stored policies of a run.

    Args:
        policies: folder of each policy version that is stored.
    """
    values = unflatten(rules.settings)
    prepare_process(values.get("threads"))  # as the trainer; more threads on a small policy only wait for each other
    weights = _StoredWeights(
        PolicyOptions.model_validate(values["policy"]), OptimizerOptions.model_validate(values["optimizer"]), policies
    )
    tolerance = _tolerance(options, weights.loading, rules.rollout)
    audits = [_EntryScores(entry, options, tolerance) for entry in entries]
    known = sorted(policies)
    chosen = [known[place] for place in spread(len(known), options.versions)]
    with track("score tokens, policy versions", len(chosen), keep=False) as progress:
        for version in chosen:
            for audit in audits:
                audit.add(version, weights)
            progress.advance()
    return [check for audit in audits for check in audit.checks()]


class _StoredWeights:
    """The stored policies of a run; one is in memory at a time."""

    def __init__(self, loading: PolicyOptions, optimizer: OptimizerOptions, policies: Mapping[int, Path]) -> None:
        self.loading, self.optimizer, self.policies = loading, optimizer, policies
        self._loaded: tuple[int, Policy] | None = None

    def load(self, version: int) -> Policy:
        """The policy of a version."""
        if self._loaded is None or self._loaded[0] != version:
            self._loaded = None
            self._loaded = (version, load_as(self.loading, self.policies[version]))
        return self._loaded[1]

    def score(self, weights: int, episodes: Sequence[Trajectory], version: int) -> list[ScoredEpisode]:
        """Scores of the tokens of one version under the weights of another, or the same."""
        return score_episodes(episodes, self.load(weights), self.optimizer, version)

    def neighbours(self, version: int) -> list[int]:
        """The stored versions before and after one."""
        known = sorted(self.policies)
        place = known.index(version)
        return known[max(0, place - 1) : place] + known[place + 1 : place + 2]


def _tolerance(options: AuditOptions, policy: PolicyOptions, rollout: RolloutOptions) -> float:
    if options.log_prob_tolerance is not None:
        return options.log_prob_tolerance
    exact = rollout.engine == "transformers" and policy.dtype == "float32" and policy.compute is None
    return _FLOAT32 if exact else _ROUNDED


_PADS = re.compile(r"(<\|image_pad\|>)+")


class _EntryScores:
    """Scores of one entry, version by version."""

    def __init__(self, entry: AuditedEntry, options: AuditOptions, tolerance: float) -> None:
        self.entry, self.options, self.tolerance = entry, options, tolerance
        self.found: Found = []
        self.blind: Found = []
        self.notes: list[str] = []
        self.seen: list[str] = []
        self.episodes = self.shown = 0

    def add(self, version: int, weights: _StoredWeights) -> None:
        """Score this version's share of the episodes."""
        if not (episodes := self._choose(version)):
            return
        scores = weights.score(version, episodes, version)
        codec = weights.load(version).codec
        self.episodes += len(scores)
        mean, largest, tokens = _describe_gaps(scores)
        line = f"version {version}: mean |stored − recomputed| {mean:.2g} nats, largest {largest:.2g}, {tokens} tokens"
        if mean > self.tolerance:
            fits = [
                other
                for other in weights.neighbours(version)
                if _describe_gaps(weights.score(other, episodes, version))[0] <= self.tolerance
            ]
            was = f"; they are those of version {fits[0]}" if fits else ""
            self.found.append(
                (None, f"{line}, tolerance {self.tolerance:g}{was}; worst, {_worst_tokens(scores, codec)}")
            )
        else:
            self.notes.append(line)
            self.found += [
                (
                    one.episode.trajectory_id,
                    f"mean |stored − recomputed| {gap:.2g} nats over its {len(one.gaps)} tokens, tolerance "
                    f"{_ONE_EPISODE * self.tolerance:g}; worst, {_worst_tokens([one], codec)}",
                )
                for one in scores
                if (gap := float(np.abs(one.gaps).mean())) > _ONE_EPISODE * self.tolerance
            ]
        if effects := [one.image_effects for one in scores if one.image_effects is not None]:
            self.shown += len(effects)
            effect = float(np.abs(np.concatenate(effects)).mean())
            line = f"version {version}: blank images change a token's log-prob by {effect:.2g} nats on average"
            if effect < self.options.image_effect:
                self.blind.append((None, f"{line}: the policy does not see its images"))
            else:
                self.seen.append(line)

    def _choose(self, version: int) -> list[Trajectory]:
        """The share of the episodes of which this version has sampled tokens."""
        episodes: list[Trajectory] = []
        for read in self.entry.parts.values():
            try:
                if version in read(columns=["policy_version"]).column("policy_version").to_pylist():
                    episodes += [one for one in table_to_trajectories(read()) if sampled_by(one, version).any()]
            except Exception:  # noqa: BLE001, S112 - a part that cannot be read is a finding of the contract
                continue
        return [
            episodes[place] for place in spread(len(episodes), math.ceil(self.options.scored_share * len(episodes)))
        ]

    def checks(self) -> list[AuditCheck]:
        """Both checks of the entry."""
        return [
            build_check("log-probs", self.entry.name, self.episodes, self.found, self.notes),
            build_check("image effect", self.entry.name, self.shown, self.blind, self.seen),
        ]


def _worst_tokens(scores: Sequence[ScoredEpisode], codec: ChatCodec) -> str:
    """The tokens with the largest gaps, marked between the texts around them."""
    places = sorted(
        ((abs(float(gap)), number, place) for number, one in enumerate(scores) for place, gap in enumerate(one.gaps)),
        reverse=True,
    )
    lines = []
    for _, number, place in places[:_WORST]:
        one = scores[number]
        ids, target = one.episode.token_ids, int(one.targets[place])
        pieces = (
            ids[max(0, target - _AROUND) : target],
            ids[target : target + 1],
            ids[target + 1 : target + 1 + _AROUND],
        )
        before, token, after = (_PADS.sub("<image>", codec.decode(piece)) for piece in pieces)
        lines.append(
            f"{one.gaps[place]:+.2g} at token {target} of {one.episode.trajectory_id}: {before!r}»{token}«{after!r}"
        )
    return "; ".join(lines)


def _describe_gaps(scores: Sequence[ScoredEpisode]) -> tuple[float, float, int]:
    """Mean and largest magnitude in nats, and the number of tokens."""
    gaps = np.abs(np.concatenate([one.gaps for one in scores]))
    return float(gaps.mean()), float(gaps.max()), len(gaps)


@dataclass(frozen=True)
class ScoredEpisode:
    """An episode under the weights that sampled it.

    Attributes:
        targets: (M,) places of the version's sampled tokens.
        gaps: (M,) stored minus recomputed log-probs, nats.
        image_effects: (M,) recomputed log-probs minus those with blank images, nats; None without images.
    """

    episode: Trajectory
    targets: np.ndarray
    gaps: np.ndarray
    image_effects: np.ndarray | None


def score_episodes(
    episodes: Sequence[Trajectory], policy: Policy, optimizer: OptimizerOptions, version: int
) -> list[ScoredEpisode]:
    """Recompute the log-probs of episodes under a policy, with their own images and with blank ones.

    Args:
        optimizer: sizes of the trainer's passes.
        version: only tokens that it sampled are scored; episodes without one are left out.
    """
    optimizer = optimizer.model_copy(update={"offload": False})  # nothing is trained
    by_temperature: dict[float, list[Trajectory]] = defaultdict(list)
    for episode in episodes:
        if (episode.loss_mask * sampled_by(episode, version)).any():
            by_temperature[sampling_temperature(episode)].append(episode)
    scored: list[ScoredEpisode] = []
    for temperature, chosen in by_temperature.items():
        backend = build_backend(policy, optimizer, temperature)
        samples = [build_sample(episode, policy, version) for episode in chosen]
        blank = [with_blank_images(sample, policy) for sample in samples]
        values, unseen = backend.log_probs(samples), backend.log_probs(blank)
        for episode, sample, own, other in zip(chosen, samples, values, unseen, strict=True):
            effects = own - other if sample.images else None
            scored.append(ScoredEpisode(episode, sample.targets, sample.rollout_log_probs - own, effects))
    return scored
