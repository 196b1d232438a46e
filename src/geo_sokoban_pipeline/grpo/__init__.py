"""GRPO as pure functions of tensors and arrays; only the prompt sampler has state.

Importing this package imports numpy, not torch. The names that need torch (`policy_loss`, `kl_estimate`, …) are loaded
on first use, so that the pipeline registry imports fast.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from geo_sokoban_pipeline.grpo.batching import plan_micro_batches
from geo_sokoban_pipeline.grpo.groups import group_advantages, returns, scale_by_rms
from geo_sokoban_pipeline.grpo.sampler import PromptSampler
from geo_sokoban_pipeline.grpo.schedules import is_eval_due, is_save_due, learning_rate

if TYPE_CHECKING:
    from geo_sokoban_pipeline.grpo.loss import (
        PolicyLoss,
        entropy,
        kl_estimate,
        policy_loss,
        reduce_tokens,
        token_log_probs,
    )

__all__ = [
    "PolicyLoss",
    "PromptSampler",
    "entropy",
    "group_advantages",
    "is_eval_due",
    "is_save_due",
    "kl_estimate",
    "learning_rate",
    "plan_micro_batches",
    "policy_loss",
    "reduce_tokens",
    "returns",
    "scale_by_rms",
    "token_log_probs",
]


def __getattr__(name: str) -> Any:
    """Load a name that needs torch on its first use (PEP 562)."""
    if name in __all__:
        return getattr(import_module("geo_sokoban_pipeline.grpo.loss"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
