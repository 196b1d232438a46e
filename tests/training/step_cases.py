"""Cases of the reference step: which option is changed, beside which others."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class StepCase:
    """One change of options, by dotted name.

    Attributes:
        changed: what the case is about; without it the weights must come out otherwise.
        given: what holds with and without the change.
        iteration: of the update, which is the step of the schedule.
        stale: whether some tokens are of earlier weights.
        same: the change must leave the result as it is.
    """

    name: str
    changed: dict[str, Any]
    given: dict[str, Any] = field(default_factory=dict)
    iteration: int = 1
    stale: bool = False
    same: bool = False


RECOMPUTE = {"grpo.old_log_probs": "recompute"}
KL = {"grpo.kl_coefficient": 0.5}
STEPS = {"grpo.groups_per_step": 1}
MUON = {"optimizer.matrices": "muon"}
EPISODE = {"grpo.advantage": "dr_grpo"}
STD = {"grpo.advantage_args.scale": "std", "grpo.normalize": "none"}
RAW = {"grpo.normalize": "none"}
GRPO = {"grpo.advantage": "grpo", "grpo.normalize": "none"}
# Gradients of this size pass the clip, so that what only scales them is seen.
UNCLIPPED = {"optimizer.clip": 1e6, "optimizer.eps": 1e-2}
BOUNDED = {"optimizer.logit_chunk": 7, "optimizer.vision_patches": 40, "optimizer.gradient_checkpointing": True}
# Every term has a metric, and a micro-batch its weight in each of them.
METRICS = (
    RECOMPUTE
    | KL
    | {"grpo.importance": "truncated", "grpo.importance_args.cap": 1.01}
    | {"grpo.entropy_coefficient": 0.1, "grpo.constant_denominator": 30.0}
)
T = "rollout.sampling.temperature"


MASKED = {"grpo.importance": "masked"}


def capped(cap: float) -> dict[str, Any]:
    """Truncated importance weights."""
    return {"grpo.importance": "truncated", "grpo.importance_args.cap": cap}


CASES = [
    StepCase("as it is", {}),
    # What the ratio is compared to, and how far it may go.
    StepCase("narrow clip below", {"grpo.loss_args.clip_low": 0.02}),
    StepCase("narrow clip above", {"grpo.loss_args.clip_high": 0.02}),
    StepCase("no clip below", {"grpo.loss_args.clip_low": 1.0}),
    StepCase("no clip above", {"grpo.loss_args.clip_high": 1e3}),
    StepCase("dual clip", {"grpo.loss_args.dual_clip": 1.05}),
    StepCase("old log-probs of the trainer", RECOMPUTE),
    StepCase("importance weights", capped(1.1), RECOMPUTE),
    StepCase("importance weights of two steps", capped(0.9), RECOMPUTE | STEPS),
    # Terms beside the policy loss.
    *(StepCase(f"kl {kind}", KL | {"grpo.kl_kind": kind}) for kind in ("k1", "k2", "k3", "low_var_kl")),
    *(StepCase(f"kl {kind} is no k3", {"grpo.kl_kind": kind}, KL | {"grpo.kl_kind": "k3"}) for kind in ("k1", "k2")),
    StepCase("kl and temperature", KL, {T: 0.6}),
    StepCase("kl by samples", KL, {"grpo.reduction": "sample_mean"}),
    StepCase("entropy bonus", {"grpo.entropy_coefficient": 0.5}),
    StepCase("no entropy bonus", {"grpo.entropy_coefficient": 0.0}, {"grpo.entropy_coefficient": 0.1}),
    StepCase("entropy bonus at a temperature", {"grpo.entropy_coefficient": 0.5}, {T: 0.6}),
    StepCase("cold", {T: 0.6}),
    StepCase("hot", {T: 1.7}),
    # How tokens add up.
    StepCase("sample mean", {"grpo.reduction": "sample_mean"}, UNCLIPPED),
    StepCase("constant", {"grpo.reduction": "constant", "grpo.constant_denominator": 30.0}, UNCLIPPED),
    StepCase(
        "larger constant",
        {"grpo.constant_denominator": 300.0},
        UNCLIPPED | {"grpo.reduction": "constant", "grpo.constant_denominator": 30.0},
    ),
    StepCase("sample mean of several steps", {"grpo.reduction": "sample_mean"}, STEPS),
    # Whose advantage a token has.
    StepCase("credit per episode", EPISODE),
    StepCase("credit per episode, std", GRPO, EPISODE),
    StepCase("credit per episode, raw", RAW, EPISODE | UNCLIPPED),
    StepCase("credit per turn, std", STD),
    StepCase("credit per turn, raw", RAW, UNCLIPPED),
    StepCase("no discount", {"grpo.advantage_args.gamma": 1.0}),
    StepCase("strong discount", {"grpo.advantage_args.gamma": 0.3}),
    StepCase("baseline of the board", {"grpo.advantage_args.baseline": "state"}),
    StepCase("low clip of advantages", {"grpo.advantage_clip": 0.5}),
    StepCase("low clip of advantages, std", {"grpo.advantage_clip": 0.5}, STD),
    StepCase("low clip of advantages, raw", {"grpo.advantage_clip": 0.02}, RAW | UNCLIPPED),
    StepCase("low clip of advantages of episodes", {"grpo.advantage_clip": 0.5}, EPISODE),
    StepCase("low clip of advantages of episodes, std", {"grpo.advantage_clip": 0.5}, GRPO),
    StepCase("no clip of advantages", {"grpo.advantage_clip": None}, {"grpo.advantage_clip": 0.5}),
    # Estimators by name, each against the same step with the default.
    *(StepCase(name, {"grpo.advantage": name}) for name in ("rloo", "reinforce_pp", "reinforce_pp_baseline", "gigpo")),
    StepCase("gigpo, raw", {"grpo.advantage_args.scale": "none"}, {"grpo.advantage": "gigpo"}),
    StepCase("gigpo, states count more", {"grpo.advantage_args.omega": 3.0}, {"grpo.advantage": "gigpo"}),
    StepCase("distillation", {"grpo.advantage": "distillation", "grpo.advantage_args.teacher": "any"}, RECOMPUTE),
    StepCase("state and turn", {"grpo.advantage_args.baseline": "state_turn"}),
    StepCase("leave one out", {"grpo.advantage_args.leave_one_out": True}),
    *(StepCase(name, {"grpo.loss": name}, STEPS) for name in ("gspo", "cispo", "sapo", "gmpo")),
    StepCase("gspo, wide below", {"grpo.loss_args.clip_low": 1.0}, STEPS | {"grpo.loss": "gspo"}),
    StepCase(
        "gspo, wide above",
        {"grpo.loss_args.clip_high": 1e3},
        STEPS | RECOMPUTE | {"grpo.passes": 3, "grpo.loss": "gspo"},
    ),
    StepCase("cispo, floor", {"grpo.loss_args.low": 1.0}, STEPS | {"grpo.loss": "cispo"}),
    StepCase("cispo, ceiling", {"grpo.loss_args.high": 1.0}, STEPS | {"grpo.loss": "cispo"}),
    StepCase("sapo, hot gains", {"grpo.loss_args.positive": 9.0}, STEPS | {"grpo.loss": "sapo"}),
    StepCase("sapo, hot losses", {"grpo.loss_args.negative": 9.0}, STEPS | {"grpo.loss": "sapo"}),
    StepCase("gmpo, narrow", {"grpo.loss_args.clip": 0.01}, STEPS | {"grpo.loss": "gmpo"}),
    *(
        StepCase(f"{name} per turn", {"grpo.loss_args.per": "turn"}, STEPS | {"grpo.loss": name})
        for name in ("gspo", "gmpo")
    ),
    *(
        StepCase(
            f"{rule} by {level} of {per}",
            {"grpo.importance_args.level": level, "grpo.importance_args.per": per},
            RECOMPUTE | {"grpo.importance": rule} | bounds,
        )
        for rule, bounds in (
            ("truncated", {"grpo.importance_args.cap": 1.0}),
            ("masked", {"grpo.importance_args.low": 1.0, "grpo.importance_args.high": 1.05}),
        )
        for level, per in (("sequence", "episode"), ("geometric", "turn"))
    ),
    *(
        StepCase(f"{bound} bound of masked", {f"grpo.importance_args.{bound}": 1.0}, RECOMPUTE | MASKED)
        for bound in ("low", "high")
    ),
    # Steps of an iteration.
    StepCase("a step per group", {"grpo.groups_per_step": 1}),
    StepCase("two groups a step", {"grpo.groups_per_step": 2}),
    StepCase("three passes", {"grpo.passes": 3}, STEPS),
    StepCase("two passes with fresh log-probs", {"grpo.passes": 2}, STEPS | RECOMPUTE),
    StepCase("without older tokens", {"grpo.mixed_versions": "mask"}, {"grpo.mixed_versions": "keep"}, stale=True),
    StepCase("without older episodes", {"grpo.mixed_versions": "drop"}, {"grpo.mixed_versions": "keep"}, stale=True),
    StepCase("mask and fresh log-probs", RECOMPUTE | KL, {"grpo.mixed_versions": "mask"}, stale=True),
    # The optimizer.
    StepCase("learning rate", {"optimizer.learning_rate": 0.001}),
    StepCase("first of the warm-up", {"optimizer.warmup_iterations": 2}, iteration=0),
    StepCase("after the warm-up", {"optimizer.warmup_iterations": 0}, iteration=1),
    StepCase("decay", {"optimizer.decay_fraction": 1.0}, iteration=8),
    StepCase("no decay", {"optimizer.decay_fraction": 0.0}, iteration=17),
    StepCase("shorter schedule", {"optimizer.schedule_iterations": 14}, iteration=12),
    StepCase("after the schedule", {"optimizer.decay_fraction": 0.5}, {"optimizer.decay_fraction": 0.0}, iteration=50),
    StepCase("gradient clip", {"optimizer.clip": 1e-3}),
    StepCase("hardly a gradient clip", {"optimizer.clip": 1e6}, {"optimizer.eps": 1e-2}),
    StepCase("betas", {"optimizer.betas": [0.5, 0.6]}, STEPS),
    StepCase("epsilon", {"optimizer.eps": 1e-2}),
    StepCase("weight decay", {"optimizer.weight_decay": 0.5}),
    StepCase("muon", MUON),
    StepCase("muon's momentum", STEPS, MUON),
    StepCase("muon's weight decay", {"optimizer.weight_decay": 0.5}, MUON),
    # How a step is cut changes nothing.
    *(
        StepCase(
            f"small micro-batches, {kind}", {"optimizer.max_tokens": 150}, METRICS | {"grpo.reduction": kind}, same=True
        )
        for kind in ("sample_mean", "token_mean", "constant")
    ),
    StepCase("few logits at once", {"optimizer.logit_chunk": 7}, same=True),
    StepCase("few logits and patches, layers run twice", BOUNDED, KL | STEPS, same=True),
]
