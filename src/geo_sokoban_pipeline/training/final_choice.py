"""Which policy a run ends with: the newest checkpoint, the best validated one, or the policy that GRPO started from.

Solve rates are those of the sampled validations, as the manifest of the newest checkpoint holds them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from geo_sokoban_pipeline.run_store import START, best_iteration
from geo_sokoban_pipeline.tasks import Task


def better_choice(manifest: Mapping[str, Any], chosen: int, task: Task) -> str | None:
    """A sentence where an earlier policy solves more validation prompts than the newest one, by more than chance.

    Args:
        manifest: of the newest checkpoint.
        chosen: iteration of the final policy.
    """
    validated = manifest.get("validated") or {}
    newest, start, best = validated.get("newest"), validated.get("start"), best_iteration(manifest)
    if (
        newest is None
        or start is None
        or best is None
        or chosen != manifest["iteration"]
        or chosen != newest["iteration"]
    ):
        return None
    rate = start["solve_rate"] if best == START else manifest["best"]["solve_rate"]
    if rate <= newest["solve_rate"] or not _apart(rate, newest["solve_rate"], newest["episodes"]):
        return None
    earlier = "the policy before GRPO" if best == START else f"the checkpoint of iteration {best}"
    return (
        f"On the validation {task.words.units}, {earlier} has {100 * rate:.1f} %, the final policy "
        f"{100 * newest['solve_rate']:.1f} %. The same command with {task.run}.evaluation.checkpoint=best ends with "
        "the better one."
    )


def _apart(one: float, other: float, episodes: int) -> bool:
    """Whether two rates differ by more than twice the standard error of their difference."""
    variance = (one * (1 - one) + other * (1 - other)) / max(episodes, 1)
    return abs(one - other) > 2 * math.sqrt(variance)
