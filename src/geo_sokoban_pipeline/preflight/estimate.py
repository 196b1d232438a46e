"""The estimate of a run: what one timed iteration took, and what is still to do, become seconds by part.

What the run has stored is not counted again.
"""

from __future__ import annotations

from dataclasses import dataclass

from geo_sokoban_pipeline.options.training import TrainOptions
from geo_sokoban_pipeline.preflight.checks import Check
from geo_sokoban_pipeline.preflight.disk import count_validations, size

_GROUP = "timed"


@dataclass(frozen=True)
class Timing:
    """What one iteration took, in seconds, bytes and counts.

    Attributes:
        imitation_step: seconds of a step of the warm start; None where none was made, as where the run has its policy.
        rollout, update, save: seconds.
        episodes, tokens: of the rollout; tokens count what the model saw and wrote.
        steps: optimizer steps. skipped: those without a finite gradient.
        checkpoint_bytes, trajectory_bytes: written.
        peak_bytes: largest resident memory so far, of all processes.
    """

    imitation_step: float | None
    rollout: float
    update: float
    save: float
    episodes: int
    tokens: int
    steps: int
    skipped: int
    checkpoint_bytes: int
    trajectory_bytes: int
    peak_bytes: int

    @property
    def iteration(self) -> float:
        """Seconds of an iteration without validation."""
        return self.rollout + self.update + self.save


def describe_timing(
    timing: Timing, options: TrainOptions, *, validation: int, evaluation: int, done: int = 0
) -> list[Check]:
    """Rows of the table.

    Args:
        validation, evaluation: prompts that are played.
        done: iterations that are stored.
    """
    speed = f"{timing.episodes / timing.rollout:,.0f} episodes/s, {timing.tokens / timing.rollout:,.0f} tokens/s"
    written = f"checkpoint {size(timing.checkpoint_bytes)}, trajectories {size(timing.trajectory_bytes)}"
    found = [
        Check(_GROUP, "rollout", "ok", f"{timing.rollout:.2f} s: {timing.episodes} episodes, {speed}"),
        Check(_GROUP, "update", "ok", f"{timing.update:.2f} s: {timing.steps} optimizer steps"),
        Check(_GROUP, "saving", "ok", f"{timing.save:.2f} s: {written}"),
        Check(_GROUP, "memory", "ok", f"at most {size(timing.peak_bytes)} resident"),
    ]
    if timing.skipped:
        text = f"{timing.skipped} of {timing.steps} optimizer steps had no finite gradient; the run goes on, but stops "
        text += f"after {options.optimizer.max_skipped} in a row"
        found.append(Check(_GROUP, "gradients", "warning", text, "lower optimizer.learning_rate or take float32"))
    elif not timing.steps:
        text = "no group to train on: the filter dropped all"
        found.append(Check(_GROUP, "gradients", "warning", text, "a run warms up first; else see grpo.filter"))
    parts = estimate_run(timing, options, validation=validation, evaluation=evaluation, done=done)
    shares = ", ".join(f"{name} {_clock(seconds)}" for name, seconds in parts.items())
    text = f"{timing.iteration:.2f} s an iteration; {_clock(sum(parts.values()))} in all ({shares})"
    return [*found, Check(_GROUP, "estimate of the run", "ok", text)]


def estimate_run(
    timing: Timing, options: TrainOptions, *, validation: int, evaluation: int, done: int = 0
) -> dict[str, float]:
    """Seconds that a run still takes, by part, from one iteration; a warm start of which no step was made is left out.

    Args:
        validation, evaluation: prompts that are played.
        done: iterations that are stored.
    """
    warm, chosen = options.warm_start, options.evaluation
    episode = timing.rollout / max(timing.episodes, 1)
    validated = 2 * validation * episode
    parts: dict[str, float] = {}
    if timing.imitation_step is not None:
        played = -(-warm.steps // warm.play_every) if warm.play_every else 0
        parts["warm start"] = timing.imitation_step * warm.steps + played * validated
    parts["iterations"] = timing.iteration * max(options.loop.iterations - done, 0)
    parts["validations"] = count_validations(options.loop, done) * validated
    per_prompt = chosen.samples + int(chosen.greedy)
    disguised = chosen.disguises * (1 + int(chosen.greedy))
    parts["evaluation"] = evaluation * (2 * per_prompt + disguised) * episode
    return parts


def _clock(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60} h {minutes % 60:02d} min"
