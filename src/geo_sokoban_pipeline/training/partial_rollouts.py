"""Leftovers: groups that an over-sampled iteration gave up, kept so that the next one goes on with them.

Only tasks of one turn have them: what is kept is the prompt and what was sampled after it, with the weights that
sampled it. They live in memory; a run that is continued begins without.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from geo_sokoban_pipeline.rollout.engines.base import FinishReason, Result
from geo_sokoban_pipeline.trajectories.types import Trajectory


@dataclass(frozen=True)
class Leftover:
    """A group that was given up.

    Attributes:
        prompt: number of its prompt.
        seeds, pasts: of its episodes; a past is None where nothing was sampled.
    """

    prompt: int
    seeds: list[int]
    pasts: list[Result | None]


@dataclass
class Leftovers:
    """Groups that were given up, first in, first out."""

    groups: list[Leftover] = field(default_factory=list)

    def take(self, count: int) -> list[Leftover]:
        """So many groups at most."""
        taken, self.groups = self.groups[:count], self.groups[count:]
        return taken

    def keep(self, trajectories: Sequence[Trajectory], prompts: Mapping[int, int]) -> None:
        """Keep the groups that have an aborted episode.

        Args:
            trajectories: of an iteration, whole groups.
            prompts: number of the prompt of each group.
        """
        broken = sorted({episode.group_index for episode in trajectories if episode.status == "aborted"})
        for group in broken:
            members = [episode for episode in trajectories if episode.group_index == group]
            pasts = [past_of(member) for member in members]
            self.groups.append(Leftover(prompts[group], [member.seed for member in members], pasts))


def past_of(episode: Trajectory) -> Result | None:
    """What an episode of one turn has sampled so far; None where that is nothing."""
    start = episode.prompt_length
    count = int(episode.loss_mask.sum())
    if not count:
        return None
    spans = tuple((version, first - start, last - start) for version, first, last in episode.weight_spans)
    return Result(
        id=-1,
        token_ids=episode.token_ids[start : start + count].astype(np.int32),
        log_probs=episode.rollout_log_probs[start : start + count],
        finish_reason=_reason(episode),
        weight_version=episode.policy_version,
        weight_spans=spans,
    )


def _reason(episode: Trajectory) -> FinishReason:
    if episode.status == "aborted":
        return "abort"
    return "length" if episode.finish_reason == "length" else "stop"
