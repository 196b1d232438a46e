"""A crew: this process and children that do parts of its work on the same weights, in shared memory.

Torch's threads wait for each other by spinning, many times in a millisecond at small sizes; processes meet a few times
a second and sleep in between. The optimizer's step changes the shared weights in place, so children see new weights
without being told. What is asked of whom depends on the work alone and answers are taken in order, so equal runs with
equally many processes give equal results, whatever their timing.

A crew that has failed or was interrupted is closed: no answer of a broken step is ever taken for one of a later step.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, TypeVar

import torch

from geo_sokoban_pipeline.options.training import TrainOptions
from geo_sokoban_pipeline.policies.policy import Policy
from geo_sokoban_pipeline.rollout.conversation import EpisodeTask
from geo_sokoban_pipeline.rollout.engines.base import RolloutEngine
from geo_sokoban_pipeline.rollout.episode import PlaySettings, Progress, check_failures, load_player
from geo_sokoban_pipeline.training.crew_child import Child, CrewError, start_child
from geo_sokoban_pipeline.training.crew_jobs import Part, Play, Renew
from geo_sokoban_pipeline.training.crew_member import Blueprint, Job
from geo_sokoban_pipeline.training.shared_tensors import share_like, share_model
from geo_sokoban_pipeline.training.shares import deal_groups
from geo_sokoban_pipeline.trajectories import Trajectory

Result = TypeVar("Result")


class Crew:
    """This process and `options.processes` − 1 children.

    Args:
        policy: its weights move into shared memory; whoever changes them in place changes them for all.
        options: of the run; threads are as many in every child as here.

    Raises:
        ValueError, SharedMemoryError: the weights cannot be shared.
    """

    def __init__(self, policy: Policy, options: TrainOptions) -> None:
        self.size = options.processes
        self._parameters = dict(policy.model.named_parameters())
        weights = share_model(policy.model)
        config = policy.model.config
        blueprint = Blueprint(
            config,
            config._attn_implementation,
            policy.model.dtype,
            policy.tokenizer,
            policy.image_processor,
            weights,
        )
        self._children: list[Child] = []
        try:
            for number in range(1, self.size):
                title = f"process {number + 1} of {self.size}"
                self._children.append(start_child(title, blueprint, options, share_like(self._parameters)))
        except BaseException:
            self.close()
            raise

    @property
    def cpu_seconds(self) -> float:
        """Of the children's jobs that were answered so far."""
        return sum(child.cpu_seconds for child in self._children)

    def cpu_clock(self) -> float:
        """CPU-seconds of this process and of its children's jobs; differences mean something, the value does not."""
        return time.process_time() + self.cpu_seconds

    def work(self, own: Callable[[], Result], jobs: Sequence[Job]) -> list[Any]:
        """Do `own` here while the first children do one job each; returns all results in order, `own`'s first.

        Raises:
            CrewError: a child failed or is gone, or the crew is closed. Whatever is raised closes the crew.
        """
        if not self._children:
            raise CrewError("this crew is closed.")
        chosen = self._children[: len(jobs)]
        try:
            for child, job in zip(chosen, jobs, strict=True):
                child.ask(job)
            return [own(), *(child.take() for child in chosen)]
        except BaseException:  # an interrupt too: answers to this step must not wait in the pipes for the next one
            self.close(patient=False)
            raise

    def tell(self, job: Job) -> None:
        """Have every child do a job."""
        self.work(lambda: None, [job] * len(self._children))

    def renew(self, version: int) -> None:
        """Make the children forget what they computed with earlier weights."""
        self.tell(Renew(version))

    def play(
        self,
        engine: RolloutEngine,
        policy: Policy,
        tasks: Sequence[EpisodeTask],
        settings: PlaySettings,
        progress: Progress | None = None,
    ) -> list[Trajectory]:
        """Play as `rollout.function` does, groups dealt out among the processes; this one uses the given engine."""
        play = load_player(settings.rollout)
        dealt = deal_groups(tasks, self.size)
        # Which share of the episodes failed is a question to all of them together.
        lenient = replace(settings, rollout=settings.rollout.model_copy(update={"max_failed_share": 1.0}))
        parts = [[tasks[index] for index in numbers] for numbers in dealt] or [[]]
        watching = () if progress is None else (progress,)
        played = self.work(
            lambda: play(engine, policy, parts[0], lenient, *watching), [Play(part, lenient) for part in parts[1:]]
        )
        if progress is not None and len(dealt) > 1:
            progress(len(tasks) - len(dealt[0]))
        episodes = dict(
            zip([i for numbers in dealt for i in numbers], [e for part in played for e in part], strict=True)
        )
        trajectories = [episodes[index] for index in range(len(tasks))]
        check_failures(trajectories, settings.rollout.max_failed_share)
        return trajectories

    @torch.no_grad()
    def add_gradients(self, parts: Sequence[Part], weights: Sequence[float] | None = None) -> None:
        """Add the children's gradients to this process's own, in order.

        Args:
            parts: of this process and of as many children as were asked.
            weights: factor of each part's gradients; None: 1.
        """
        if weights is not None:
            for parameter in self._parameters.values():
                if parameter.grad is not None:
                    parameter.grad.mul_(weights[0])
        for number, (child, part) in enumerate(zip(self._children, parts[1:], strict=False), start=1):
            for name in part.names:
                gradient, parameter = child.gradients[name], self._parameters[name]
                scaled = gradient if weights is None else gradient.mul_(weights[number])
                parameter.grad = scaled.clone() if parameter.grad is None else parameter.grad.add_(scaled)

    def close(self, *, patient: bool = True) -> None:
        """End the children; an idle one ends by itself, and any other is ended."""
        children, self._children = self._children, []
        for child in children:
            child.dismiss()
        for child in children:
            child.end(patient=patient)


def sum_metrics(parts: Sequence[Part], weights: Sequence[float] | None = None) -> dict[str, float]:
    """Metrics that add up over a step, from those of its parts, each times its weight (None: 1)."""
    totals: dict[str, float] = {}
    for part, weight in zip(parts, weights or [1.0] * len(parts), strict=True):
        for name, value in part.metrics.items():
            totals[name] = totals.get(name, 0.0) + value * weight
    return totals


@contextmanager
def open_crew(policy: Policy, options: TrainOptions) -> Iterator[Crew | None]:
    """The crew that the options ask for, for the `with` block; None with one process."""
    if options.processes == 1:
        yield None
        return
    crew = Crew(policy, options)
    try:
        yield crew
    finally:
        crew.close()
