"""Jobs of a crew: what a child can be asked to do. Each is a value that says everything it needs; `Play`, `Learn` and
`Imitate` are a part of what the parent does at the same time, by the same functions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from geo_sokoban_pipeline.rollout.conversation import EpisodeTask
from geo_sokoban_pipeline.rollout.episode import PlaySettings, load_player
from geo_sokoban_pipeline.training.backends.gradients import GradientPass, PassSetting
from geo_sokoban_pipeline.training.crew_member import Member
from geo_sokoban_pipeline.training.demonstrations import Demonstrator
from geo_sokoban_pipeline.training.objectives import ImitationObjective, Objective
from geo_sokoban_pipeline.training.process import collect_garbage
from geo_sokoban_pipeline.training.samples import TrainSample
from geo_sokoban_pipeline.trajectories import Trajectory


@dataclass(frozen=True)
class Part:
    """A process's part of a step's gradients.

    Attributes:
        metrics: of the objective, over the part.
        tokens: trained tokens of a part whose gradients are means over them.
        names: parameters that have a gradient; only of a child's part.
    """

    metrics: dict[str, float]
    tokens: int = 0
    names: tuple[str, ...] = ()


@dataclass(frozen=True)
class Renew:
    """Forget what was computed with earlier weights; the shared ones are of this version."""

    version: int

    def __call__(self, member: Member) -> None:
        """Do it."""
        member.engine.update_weights(None, self.version)
        collect_garbage(self.version)


@dataclass(frozen=True)
class Play:
    """Play episodes; the result is their trajectories, in order."""

    tasks: Sequence[EpisodeTask]
    settings: PlaySettings

    def __call__(self, member: Member) -> list[Trajectory]:
        """Do it."""
        play = load_player(self.settings.rollout)
        return play(member.engine, member.policy, self.tasks, self.settings)


@dataclass(frozen=True)
class Score:
    """Log-probs of the samples' trained tokens."""

    samples: Sequence[TrainSample]
    setting: PassSetting

    def __call__(self, member: Member) -> list[np.ndarray]:
        """Do it."""
        return member.gradient_pass(self.setting).log_probs(self.samples)


@dataclass(frozen=True)
class Learn:
    """Gradients of samples under an objective that has begun with all samples of the step."""

    samples: Sequence[TrainSample]
    objective: Objective
    setting: PassSetting

    def __call__(self, member: Member) -> Part:
        """Do it."""
        metrics = member.gradient_pass(self.setting).accumulate(self.samples, self.objective)
        return Part(metrics, names=tuple(member.hand_over()))


@dataclass(frozen=True)
class Appoint:
    """Make demonstrations of these prompts from here on (see `Demonstrator`)."""

    prompts: Sequence[dict[str, Any]]
    seed: int
    purpose: str

    def __call__(self, member: Member) -> None:
        """Do it."""
        member.teacher = Demonstrator(self.prompts, member.policy, member.options, self.seed, self.purpose)


@dataclass(frozen=True)
class Imitate:
    """Gradients of demonstrations by number, as the mean over the part's own tokens; after `Appoint`."""

    numbers: range
    setting: PassSetting

    def __call__(self, member: Member) -> Part:
        """Do it."""
        assert member.teacher is not None
        part = imitate(self.numbers, member.teacher, member.gradient_pass(self.setting))
        return Part(part.metrics, part.tokens, tuple(member.hand_over()))


def imitate(numbers: range, teacher: Demonstrator, gradients: GradientPass) -> Part:
    """Make demonstrations and leave their gradients in the parameters, as the mean over their tokens."""
    samples = [teacher.demonstrate(number) for number in numbers]
    objective = ImitationObjective()
    objective.begin(samples)
    return Part(gradients.accumulate(samples, objective), sum(len(sample.targets) for sample in samples))
