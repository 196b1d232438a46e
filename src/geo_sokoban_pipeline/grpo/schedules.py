"""Schedules: pure functions of the step, so a resumed run needs only its step number, not a scheduler's state.

A schedule has its own length, independent of the number of iterations: an extended run keeps the learning rates of its
earlier iterations.
"""

from __future__ import annotations

DECAY_TO = 0.1  # share of GRPO's highest learning rate at the end of its schedule and after it


def learning_rate(
    step: float, *, base: float, warmup_steps: int, total_steps: int, decay_fraction: float, decay_to: float
) -> float:
    """Learning rate of one step, counted from 0: a linear rise, then `base`, then a linear decay.

    Args:
        step: 0 for the first; in optimizer steps or iterations, as the other counts. Fractions are allowed.
        base: rate after warm-up.
        warmup_steps: steps of the linear rise `base * (step + 1) / warmup_steps`; 0: start at `base`.
        total_steps: length of the schedule; later steps keep the last rate.
        decay_fraction: in [0, 1]: decay over this last fraction of `total_steps`, but not in warm-up; 0: no decay.
        decay_to: final rate as a factor of `base`, in [0, 1].

    Raises:
        ValueError: a value is out of range; the message names it.
    """
    if step < 0 or base < 0 or warmup_steps < 0:
        raise ValueError(f"step={step}, base={base}, warmup_steps={warmup_steps}: none may be negative.")
    if total_steps < 1:
        raise ValueError(f"total_steps={total_steps}: it must be 1 or more.")
    if not 0.0 <= decay_fraction <= 1.0 or not 0.0 <= decay_to <= 1.0:
        raise ValueError(f"decay_fraction={decay_fraction}, decay_to={decay_to}: both must be in [0, 1].")
    if step < warmup_steps:
        return base * min(1.0, (step + 1) / warmup_steps)
    if decay_fraction == 0:
        return base
    start = max(float(warmup_steps), total_steps - decay_fraction * total_steps)
    # The last step, total_steps - 1, is at progress 1; the step before the decay starts is at 0.
    progress = min(1.0, max(0.0, (step + 1 - start) / max(1e-12, total_steps - start)))
    return base * (1.0 - (1.0 - decay_to) * progress)


def is_save_due(iteration: int, interval: int | None, *, num_iterations: int | None = None) -> bool:
    """Whether a checkpoint is due after an iteration, counted from 0: every `interval`, and at the end.

    Args:
        iteration: the iteration that has ended.
        interval: iterations between two checkpoints; None: never.
        num_iterations: length of the run; its last iteration is always due. None: open-ended.
    """
    if is_eval_due(iteration, interval):
        return True
    return interval is not None and num_iterations is not None and iteration + 1 == num_iterations


def is_eval_due(iteration: int, interval: int | None) -> bool:
    """Whether a validation is due after an iteration, counted from 0: every `interval`; None: never."""
    if interval is not None and interval < 1:
        raise ValueError(f"interval={interval}: it must be 1 or more, or null.")
    return interval is not None and (iteration + 1) % interval == 0
