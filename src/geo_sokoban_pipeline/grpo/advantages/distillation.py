"""On-policy distillation: a teacher scores the policy's own samples (MiniLLM, arXiv 2306.08543; GKD, 2306.13649)."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from geo_sokoban_pipeline.config.estimators import DistillationArguments
from geo_sokoban_pipeline.grpo.groups import Episodes, Floats, advantage, vector


@advantage(zero_on_equal_groups=False, per_token=True, reads_tokens=True)
def distillation(episodes: Episodes, args: DistillationArguments) -> Floats:
    """Mean gap between teacher and policy of an episode's sampled tokens, (N,), in nats; the reward has no part in it.

    Where no teacher has scored an episode it is 1: each one carries a signal for the filter `zero_variance`.
    """
    return np.array([gaps.mean() if len(gaps) else 1.0 for gaps in episodes.teacher_gaps])


def token_advantages(teacher_log_probs: ArrayLike, rollout_log_probs: ArrayLike) -> Floats:
    """`log p_teacher − log p_policy` of each sampled token, (M,): its sample of the negative reverse KL, in nats.

    Raises:
        ValueError: the lengths differ, or a log-prob is not finite; the message names its index.
    """
    teacher, policy = vector("teacher_log_probs", teacher_log_probs), vector("rollout_log_probs", rollout_log_probs)
    if teacher.shape != policy.shape:
        raise ValueError(f"teacher_log_probs has {len(teacher)} tokens and rollout_log_probs {len(policy)}.")
    gaps: Floats = teacher - policy
    return gaps
