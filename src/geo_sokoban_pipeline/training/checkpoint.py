"""Checkpoints: how a folder is written, which checkpoints stay, and which policy of a run is the best.

A checkpoint is a Hugging Face policy folder plus optimizer moments; its manifest holds data cursor, fingerprint and
validations. Nothing is pickled.
"""

from __future__ import annotations

import logging
import math
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from geo_sokoban_pipeline.config.grpo import TrainOptions
from geo_sokoban_pipeline.datasets.iterations import CheckpointsDataset
from geo_sokoban_pipeline.envs.base import Task
from geo_sokoban_pipeline.events import Event, emit
from geo_sokoban_pipeline.formats import in_percent
from geo_sokoban_pipeline.runs.fingerprint import layout_differences, layout_parameters
from geo_sokoban_pipeline.runs.folders import START, best_iteration
from geo_sokoban_pipeline.runs.storage import Filled, partition
from geo_sokoban_pipeline.training.backends.base import TrainBackend
from geo_sokoban_pipeline.training.worker_group import WorkerGroup

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class CheckpointWriter:
    """Callable that writes policy and trainer state into a folder, so that training can continue from it.

    Attributes:
        entries: of the manifest, beside its files.
        merges: write the policy alone, with its adapter merged: training cannot continue from it.
    """

    backend: TrainBackend
    entries: dict[str, Any]
    merges: bool = False

    def __call__(self, folder: Path) -> Filled:
        """Fill the folder; returns the manifest's entries."""
        if self.merges:
            files = self.backend.export(folder)
        else:
            files = {**self.backend.export_trained(folder), **self.backend.save_state(folder)}
        emit(Event.CHECKPOINT, self.entries.get("iteration"))
        return Filled(self.entries, files)


@contextmanager
def written_ahead(
    writer: CheckpointWriter, beside: Path | None, workers: WorkerGroup | None
) -> Iterator[Callable[[Path], Filled]]:
    """A writer like the given one, for the `with` block, whose files are there already if ranks elsewhere write them.

    So a rank that dies while it writes is found before anything of an iteration is stored, and not within the save.

    Args:
        beside: a folder on the file system of the place to be written; None: nothing is written ahead.
    """
    if beside is None or workers is None or workers.drives_a_rank:
        yield writer
        return
    beside.mkdir(parents=True, exist_ok=True)
    # A rank that is about to be killed may still write there; what is left is removed as of any killed process.
    with tempfile.TemporaryDirectory(prefix=".ahead.", suffix=".tmp", dir=beside, ignore_cleanup_errors=True) as made:
        filled = writer(Path(made))

        def move(folder: Path) -> Filled:
            for path in sorted(Path(made).iterdir()):
                shutil.move(path, folder / path.name)  # a rename, unless a mount lies between
            return filled

        yield move


@dataclass
class CheckpointHistory:
    """The stored checkpoints of a run, and the solve rates of its policies in validation.

    Attributes:
        stored: iterations of the stored checkpoints, ascending.
        best: `iteration` and `solve_rate` of the best stored checkpoint on validation; None: none was validated.
        validated: `iteration`, `solve_rate`, `episodes` and `error` (half of its 95 % interval over clusters, where the
            task reports it) of the policy that GRPO started from (`start`) and of the `newest` validation.
    """

    stored: list[int] = field(default_factory=list)
    best: dict[str, Any] | None = None
    validated: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, manifest: Mapping[str, Any], stored: Sequence[int]) -> CheckpointHistory:
        """History in the newest checkpoint's manifest; an empty manifest: the run has not begun."""
        return cls(list(stored), manifest.get("best"), dict(manifest.get("validated") or {}))

    @property
    def start_rate(self) -> float | None:
        """Solve rate of the policy that GRPO started from; None: not validated."""
        start = self.validated.get("start")
        return None if start is None else float(start["solve_rate"])

    def note_validation(self, version: int, metrics: Mapping[str, float], episodes: int, *, is_saved: bool) -> None:
        """Note a validation.

        Args:
            version: of the policy; 0 is the one that GRPO started from.
            metrics: of the validation; empty: there are no validation prompts.
            is_saved: whether the policy's checkpoint will be stored; only a stored one can be the best.
        """
        if not metrics:
            return
        solve_rate = metrics["eval/validation/sampled_solve_rate"]
        found = {"iteration": version - 1, "solve_rate": solve_rate}
        low, high = (metrics.get(f"eval/validation/sampled_{end}") for end in ("low", "high"))
        error = {} if low is None or high is None else {"error": (high - low) / 2}
        self.validated["newest" if version else "start"] = {**found, "episodes": episodes, **error}
        if is_saved and (self.best is None or solve_rate > self.best["solve_rate"]):
            self.best = found

    def add(self, iteration: int, keep_last: int | None, *, keep_best: bool) -> list[int] | None:
        """Note a new checkpoint; returns the iterations whose checkpoints stay, None: all.

        Args:
            keep_last: number of newest checkpoints that stay; None: all.
            keep_best: the best checkpoint stays too.
        """
        self.stored.append(iteration)
        if keep_last is None:
            return None
        best = self.best["iteration"] if self.best is not None and keep_best else None
        self.stored = [number for number in self.stored if number in self.stored[-keep_last:] or number == best]
        return list(self.stored)

    def way_out(self, run: str) -> str:
        """Way out for a run whose update has diverged, as a sentence."""
        if not self.stored:
            return f"No checkpoint is stored yet: lower {run}.optimizer.learning_rate, and start over with fresh=true."
        return (
            f"The last good checkpoint is {partition(self.stored[-1])} of {run}.checkpoints. Start a new run from its "
            f"weights, with a lower {run}.optimizer.learning_rate: --params run_id=<new>,"
            f"{run}.policy.source=folder,{run}.policy.path=<folder of the checkpoint>,{run}.warm_start.steps=0"
        )


def newest_checkpoint(folder: Path) -> str:
    """The newest checkpoint in the folder of all of them, in words."""
    names = CheckpointsDataset(str(folder)).partitions()
    return f"newest checkpoint: {names[-1] if names else 'none yet'}"


def better_choice(manifest: Mapping[str, Any], chosen: int, task: Task) -> str | None:
    """A hint where an earlier policy solves significantly more validation prompts than the newest one, else None.

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
    if rate <= newest["solve_rate"] or not _apart(rate, newest):
        return None
    earlier = "the policy before GRPO" if best == START else f"the checkpoint of iteration {best}"
    return (
        f"On the validation {task.words.units}, {earlier} has {in_percent(rate)} %, the final policy "
        f"{in_percent(newest['solve_rate'])} %. The same command with {task.run}.evaluation.checkpoint=best ends with "
        "the better one."
    )


def _apart(rate: float, newest: Mapping[str, Any]) -> bool:
    """Whether two rates differ by more than twice the standard error of their difference."""
    other = newest["solve_rate"]
    if "error" in newest:
        return abs(rate - other) > math.sqrt(2) * newest["error"]
    variance = (rate * (1 - rate) + other * (1 - other)) / max(newest["episodes"], 1)
    return abs(rate - other) > 2 * math.sqrt(variance)


def layout_of(options: TrainOptions, threads: int) -> dict[str, Any]:
    """How a run is computed, for its manifests: no part of its identity, but of its last bits.

    Args:
        threads: of torch in each process, as in force.

    Returns:
        An entry `layout`: options by their dotted names.
    """
    return {"layout": {**layout_parameters(options), "threads": threads}}


def compare_layout(manifest: Mapping[str, Any], layout: Mapping[str, Any]) -> None:
    """Warn where a run continues with another layout; an empty manifest is a new run.

    Args:
        layout: entry of manifests, of this command.
    """
    if lines := layout_differences(manifest.get("layout", {}), layout["layout"]):
        logger.warning(
            "the run continues with another layout (%s): sums are added in another order, so the last bits may "
            "differ from here on",
            "; ".join(lines),
        )
