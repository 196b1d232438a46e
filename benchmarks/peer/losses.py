"""The registered losses against those of TRL's trainers, on the same random log-probs: value and gradient.

TRL's own `_compute_loss` runs, on a trainer without a model: its log-probs are those that it is given. Run with
`make bench-peer`, whose environment has TRL.
"""

from __future__ import annotations

from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor
from trl import GRPOTrainer
from trl.experimental.gmpo import GMPOTrainer

from geo_sokoban_pipeline.config.grpo import GrpoOptions
from geo_sokoban_pipeline.grpo import reduce_tokens
from geo_sokoban_pipeline.grpo.estimators import estimate_loss, load_estimator
from geo_sokoban_pipeline.grpo.loss import token_batch

ROWS, WIDTH = 6, 40
CLIP = {"clip_low": 0.2, "clip_high": 0.28}
# Our options, and the attributes of TRL's trainer that mean the same.
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "GRPO": ({"loss": "ppo", "reduction": "sample_mean"}, {"loss_type": "grpo"}),
    "DAPO": ({"loss": "ppo", "reduction": "token_mean"}, {"loss_type": "dapo"}),
    "Dr. GRPO": (
        {"loss": "ppo", "reduction": "constant", "constant_denominator": float(ROWS * WIDTH)},
        {"loss_type": "dr_grpo"},
    ),
    "GSPO": (
        {"loss": "gspo", "loss_args": CLIP, "reduction": "sample_mean"},
        {"loss_type": "grpo", "importance_sampling_level": "sequence"},
    ),
    "CISPO": (
        {"loss": "cispo", "loss_args": {"high": 2.0}, "reduction": "token_mean"},
        {"loss_type": "cispo", "epsilon_high": 2.0},
    ),
    "SAPO": ({"loss": "sapo", "reduction": "sample_mean"}, {"loss_type": "sapo"}),
    "GMPO": (
        {"loss": "gmpo", "reduction": "sample_mean"},
        {"loss_type": "grpo", "epsilon_low": 0.4, "epsilon_high": 0.4},
    ),
}


def main() -> int:
    """Print the differences; 1 if one is larger than rounding."""
    generator = torch.Generator().manual_seed(0)
    old = -3 * torch.rand(ROWS, WIDTH, generator=generator, dtype=torch.float64)
    new = old + 0.5 * torch.randn(ROWS, WIDTH, generator=generator, dtype=torch.float64)
    advantages = torch.randn(ROWS, generator=generator, dtype=torch.float64)
    mask = (torch.rand(ROWS, WIDTH, generator=generator) < 0.7).long()
    largest = 0.0
    for name, (ours, theirs) in CASES.items():
        one, other = (
            differentiate(loss, new)
            for loss in (our_loss(ours, old, advantages, mask), trl_loss(name, theirs, old, advantages, mask))
        )
        value, gradient = abs(one[0] - other[0]), float((one[1] - other[1]).abs().max())
        largest = max(largest, value, gradient)
        print(f"{name:9} loss {one[0]:+.6f}, TRL's {other[0]:+.6f}; gradients differ by {gradient:.1e}")
    return int(largest > 1e-6)  # our weights of tokens are float32


def differentiate(loss: Any, log_probs: Tensor) -> tuple[float, Tensor]:
    """Value of a loss of log-probs, and its gradient."""
    given = log_probs.clone().requires_grad_()
    value = loss(given)
    value.backward()
    assert given.grad is not None
    return float(value.detach()), given.grad


def our_loss(options: dict[str, Any], old: Tensor, advantages: Tensor, mask: Tensor) -> Any:
    """The loss by its registered name."""
    grpo = GrpoOptions(**options)

    def loss(log_probs: Tensor) -> Tensor:
        terms, _ = estimate_loss(load_estimator("loss", grpo), token_batch(log_probs, old, old, advantages, mask))
        return reduce_tokens(terms, mask, grpo.reduction, grpo.constant_denominator)

    return loss


def trl_loss(name: str, attributes: dict[str, Any], old: Tensor, advantages: Tensor, mask: Tensor) -> Any:
    """The loss of TRL's trainer with these attributes."""
    kind = GMPOTrainer if name == "GMPO" else GRPOTrainer
    trainer = object.__new__(kind)
    defaults = {
        "importance_sampling_level": "token",
        "epsilon_low": CLIP["clip_low"],
        "epsilon_high": CLIP["clip_high"],
        "top_entropy_quantile": 1.0,
        "off_policy_mask_threshold": None,
        "beta": 0.0,
        "use_vllm": False,
        "aux_loss_enabled": False,
        "_entropy_bonus_enabled": False,
        "max_completion_length": WIDTH,
        "current_gradient_accumulation_steps": 1,
        "accelerator": Accelerator(cpu=True),
        "model": SimpleNamespace(training=True),
        "_metrics": {"train": defaultdict(list)},
        "args": SimpleNamespace(
            delta=None,
            use_bias_correction_kl=False,
            sapo_temperature_pos=1.0,
            sapo_temperature_neg=1.05,
            steps_per_generation=1,
        ),
    }
    vars(trainer).update(defaults | attributes)
    inputs = {
        **{name: torch.zeros(ROWS, 1, dtype=torch.long) for name in ("prompt_ids", "prompt_mask")},
        "completion_ids": torch.zeros(ROWS, WIDTH, dtype=torch.long),
        "completion_mask": mask,
        "advantages": advantages,
        "old_per_token_logps": old,
        "num_items_in_batch": mask.sum(),
    }

    def loss(log_probs: Tensor) -> Tensor:
        scores = (log_probs, torch.zeros_like(log_probs), None)
        vars(trainer)["_get_per_token_logps_and_entropies"] = lambda *_, **__: scores
        found: Tensor = trainer._compute_loss(trainer.model, inputs)
        return found

    return loss


if __name__ == "__main__":
    raise SystemExit(main())
