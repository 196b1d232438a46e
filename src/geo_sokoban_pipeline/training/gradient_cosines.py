"""Cosines: the policy gradient of estimated advantages against that of the true ones, on the same episodes.

The gradient is that of the log-probs of all sampled tokens, each weighed by the advantage of its turn: a step of GRPO
on fresh samples, before clipping and without other terms. The sampling variance of the truth lengthens its gradient; it
is subtracted, by gradients of drawn errors.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from geo_sokoban_pipeline.config.grpo import OptimizerOptions
from geo_sokoban_pipeline.console import track
from geo_sokoban_pipeline.evaluation.credit import Turns
from geo_sokoban_pipeline.grpo.groups import Floats
from geo_sokoban_pipeline.grpo.loss import EntropyUse, PolicyLoss, Sample, StepSize, pad, reduce_tokens
from geo_sokoban_pipeline.grpo.scoring import assistant_turns
from geo_sokoban_pipeline.policies.policy import Policy
from geo_sokoban_pipeline.seeding import derive_seed
from geo_sokoban_pipeline.training.backends.torch import GradientPass, PassSetting
from geo_sokoban_pipeline.training.batch import build_sample
from geo_sokoban_pipeline.trajectories.types import Trajectory

_ERRORS = 4  # drawn errors of the truth


class WeighedLogProbs:
    """Log-probs of tokens times their advantages, mean over the step's tokens."""

    entropy: EntropyUse = "none"

    def __call__(
        self, samples: Sequence[Sample], log_probs: Tensor, entropy: Tensor, mask: Tensor, step: StepSize
    ) -> PolicyLoss:
        """See `Objective`."""
        advantages = pad([sample.advantages for sample in samples], log_probs)
        return PolicyLoss(reduce_tokens(log_probs * advantages, mask, "token_mean", float(step.tokens)), {})


def measure_cosines(
    estimates: Mapping[str, Floats],
    turns: Turns,
    episodes: Sequence[Trajectory],
    policy: Policy,
    optimizer: OptimizerOptions,
    temperature: float,
    seed: int,
) -> dict[str, float]:
    """Cosine by estimator; NaN where a gradient is 0, or that of the truth no longer than its errors.

    Args:
        estimates: (N,) advantages of all turns, by the estimator's name.
        turns: the same turns, with the truth.
        episodes: all episodes, of which those of the first iteration are taken: their turns are measured.
        temperature: of the rollout.
        seed: of the drawn errors.
    """
    first = min(episode.iteration for episode in episodes)
    chosen = [episode for episode in episodes if episode.iteration == first]
    ends = np.cumsum([len(assistant_turns(episode)) for episode in chosen])
    begins = [int(end) - len(assistant_turns(episode)) for end, episode in zip(ends, chosen, strict=True)]
    # An episode whose prompt fills the budget has no sampled token.
    trained = [number for number, episode in enumerate(chosen) if episode.loss_mask.any()]
    samples = [build_sample(chosen[number], policy) for number in trained]
    scorer = GradientPass(policy, PassSetting.of(optimizer, temperature))
    weights = [weight for weight in policy.model.parameters() if weight.requires_grad]
    whole = np.flatnonzero(turns.is_whole)

    def gradient_of(values: Floats) -> list[Tensor]:
        """Of all turns, those of whole groups; a turn that has no value counts 0."""
        known = np.nan_to_num(values[whole])
        weighed = [
            replace(sample, advantages=known[begins[number] + sample.turns].astype(np.float32))
            for number, sample in zip(trained, samples, strict=True)
        ]
        scorer.accumulate(weighed, WeighedLogProbs(), StepSize.of(weighed))
        found = [torch.zeros_like(weight) if weight.grad is None else weight.grad for weight in weights]
        policy.model.zero_grad(set_to_none=True)
        return found

    measured = np.isfinite(turns.gain)
    with track("policy gradients", len(estimates) + 1 + _ERRORS, keep=False) as bar:
        true = gradient_of(turns.gain)
        bar.advance()
        errors = 0.0
        generator = np.random.default_rng(derive_seed(seed, "errors"))
        deviation = _deviations(turns)
        for _ in range(_ERRORS):
            drawn = generator.standard_normal(len(deviation)) * deviation
            error = gradient_of((drawn[turns.result] - drawn[turns.state]) * measured)
            errors += _product(error, error) / _ERRORS
            bar.advance()
        length = _product(true, true) - errors
        cosines = {}
        for name, values in estimates.items():
            own = gradient_of(values * measured)
            norm = math.sqrt(max(0.0, length) * _product(own, own))
            cosines[name] = min(1.0, _product(own, true) / norm) if norm > 0 else math.nan
            bar.advance()
    return cosines


def _deviations(turns: Turns) -> Floats:
    """Standard errors of the values of states by their number; 0 where nothing was sampled."""
    variance = np.zeros(max(turns.state.max(), turns.result.max()) + 1)
    measured = np.isfinite(turns.gain)
    variance[turns.result[measured]] = turns.after[measured]
    variance[turns.state[measured]] = turns.before[measured]
    return np.sqrt(variance)


def _product(one: Sequence[Tensor], other: Sequence[Tensor]) -> float:
    return sum(float(torch.dot(a.flatten().double(), b.flatten().double())) for a, b in zip(one, other, strict=True))
