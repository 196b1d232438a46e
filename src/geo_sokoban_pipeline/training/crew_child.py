"""A child of a crew, as its parent sees it: a process at the other end of a pipe, which answers each job once.

Its death shows as the end of the pipe, so nothing ever waits for a child that is gone.
"""

from __future__ import annotations

import signal
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import resource_tracker
from typing import Any

import torch
from torch import Tensor, multiprocessing

from geo_sokoban_pipeline.options.training import TrainOptions
from geo_sokoban_pipeline.training.crew_member import Blueprint, Failed, Job, serve
from geo_sokoban_pipeline.training.shared_tensors import SharedTensors

_PATIENCE = 5.0  # seconds that a child is given to end


class CrewError(RuntimeError):
    """A process of a crew failed or is gone; the message says which and why."""


@dataclass
class Child:
    """The parent's end of a child.

    Attributes:
        title: what errors call it.
        gradients: its gradients by parameter, in shared memory; valid once the job that made them is answered.
        cpu_seconds: of its jobs so far.
    """

    title: str
    process: Any
    pipe: Any
    gradients: dict[str, Tensor]
    cpu_seconds: float = 0.0

    def ask(self, job: Job) -> None:
        """Send a job."""
        try:
            self.pipe.send(job)
        except (BrokenPipeError, ConnectionResetError) as error:
            raise self._lost() from error

    def take(self) -> Any:
        """Wait for the answer to the last job."""
        try:
            answer = self.pipe.recv()
        except (EOFError, ConnectionResetError) as error:
            raise self._lost() from error
        if isinstance(answer, Failed):
            raise CrewError(f"{self.title} failed:\n{answer.text}")
        self.cpu_seconds = answer.cpu_seconds
        return answer.result

    def dismiss(self) -> None:
        """Close the pipe: an idle child ends by it."""
        self.pipe.close()

    def end(self, *, patient: bool) -> None:
        """Have the process ended: first by itself, where there is patience for it."""
        if patient:
            self.process.join(_PATIENCE)
        if self.process.is_alive():
            self.process.terminate()
            self.process.join(_PATIENCE)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()
        self.process.close()

    def _lost(self) -> CrewError:
        # A child that failed before it could do anything has said why.
        with suppress(EOFError, OSError):
            while self.pipe.poll():
                answer = self.pipe.recv()
                if isinstance(answer, Failed):
                    return CrewError(f"{self.title} failed:\n{answer.text}")
        self.process.join(_PATIENCE)
        code = self.process.exitcode
        name = f" ({signal.Signals(-code).name})" if code is not None and code < 0 else ""
        return CrewError(
            f"{self.title} ended with exit code {code}{name}. The same command continues from what is stored; "
            "with processes=1 there is nobody to lose, and less memory in use."
        )


def start_child(title: str, blueprint: Blueprint, options: TrainOptions, gradients: SharedTensors) -> Child:
    """Start a child; returns at once, while it still imports its libraries.

    Args:
        title: what errors call it.
        gradients: buffer for its gradients.
    """
    context = multiprocessing.get_context("spawn")
    pipe, far_end = context.Pipe()
    # A child inherits the mask, so it is deaf to Ctrl-C from its first moment. The tracker, which the first child would
    # start, sets a mask of its own.
    resource_tracker.ensure_running()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        process = context.Process(
            target=serve, args=(far_end, blueprint, options, gradients, torch.get_num_threads()), daemon=True
        )
        process.start()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    # The child's end must be open in the child alone: its closing is how its death shows.
    far_end.close()
    return Child(f"{title} (pid {process.pid})", process, pipe, gradients.views())
