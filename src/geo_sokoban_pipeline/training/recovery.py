"""After the end of a rank in a Ray cluster: a new group of ranks does the work since the newest checkpoint again.

Nothing is stored between a loss and the newest checkpoint: files that ranks write are with the driver before the first
file of an iteration is.
"""

from __future__ import annotations

import logging
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from geo_sokoban_pipeline.config.grpo import TrainOptions
from geo_sokoban_pipeline.datasets.iterations import CheckpointsDataset, read_resume_state
from geo_sokoban_pipeline.distributed.process import WorkerDied, WorkerError
from geo_sokoban_pipeline.runs.storage import Filled
from geo_sokoban_pipeline.training.checkpoint import CheckpointWriter
from geo_sokoban_pipeline.training.worker_group import WorkerGroup
from geo_sokoban_pipeline.trajectories.parquet import partition

logger = logging.getLogger(__name__)


def attempts(
    resume: Mapping[str, Any], options: TrainOptions
) -> Iterator[tuple[Mapping[str, Any], int, AbstractContextManager[None]]]:
    """A loop again and again, from the newest checkpoint and with new ranks, where a rank has ended.

    `for state, lost, attempt in attempts(…): with attempt: …`

    Args:
        resume: state to begin with, see `read_resume_state`.

    Yields:
        State to continue from; how often its first iteration has begun before; context of the loop.

    Raises:
        WorkerDied: within a context: the ranks of an iteration were lost more often than `ray.max_restarts` allows.
        WorkerError: a rank failed, or rollout workers were lost more often than allowed.
    """
    lost, again = 0, True

    @contextmanager
    def attempt() -> Iterator[None]:
        nonlocal resume, lost, again
        again = False
        try:
            yield
        except WorkerDied as error:
            before, resume, again = resume["iteration"], read_resume_state(resume["folder"]), True
            lost = lost + 1 if resume["iteration"] == before else 1
            newest = partition(resume["iteration"]) if resume["iteration"] >= 0 else "none yet"
            _note_loss(error, lost, options, f"newest checkpoint: {newest}")
        except WorkerError as error:
            stored = CheckpointsDataset(str(resume["folder"])).partitions()
            raise WorkerError(f"{error} Newest checkpoint: {stored[-1] if stored else 'none yet'}.") from error

    while again:
        yield resume, lost, attempt()


@dataclass
class Losses:
    """Losses of a piece of work.

    Attributes:
        count: how often its ranks were lost since something of it was stored; the work sets it back to 0.
    """

    count: int = 0


def restarting(options: TrainOptions, stored: str) -> Iterator[AbstractContextManager[Losses]]:
    """Contexts for one piece of work, another one each time that it has lost its ranks: `for one in …: with one: …`.

    Args:
        stored: what there is to go on from.

    Raises:
        WorkerDied: within a context: more ranks were lost than `ray.max_restarts` allows.
    """
    losses, again = Losses(), True

    @contextmanager
    def attempt() -> Iterator[Losses]:
        nonlocal again
        again = False
        try:
            yield losses
        except WorkerDied as error:
            losses.count, again = losses.count + 1, True
            _note_loss(error, losses.count, options, stored)

    while again:
        yield attempt()


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
    with tempfile.TemporaryDirectory(prefix=".ahead.", suffix=".tmp", dir=beside) as made:
        filled = writer(Path(made))

        def move(folder: Path) -> Filled:
            for path in sorted(Path(made).iterdir()):
                shutil.move(path, folder / path.name)  # a rename, unless a mount lies between
            return filled

        yield move


def _note_loss(error: WorkerDied, lost: int, options: TrainOptions, stored: str) -> None:
    """Log that a group of ranks is built anew.

    Args:
        lost: how many were lost since something was stored.
        stored: what there is to go on from.

    Raises:
        WorkerDied: they were more than allowed.
    """
    allowed = options.ray.max_restarts
    if lost > allowed:
        raise WorkerDied(
            f"{error} These ranks were built anew {allowed} times (ray.max_restarts={allowed}); {stored}. The same "
            "command continues from there."
        ) from error
    logger.warning("%s All ranks are built anew (%d of %d); %s", error, lost, allowed, stored)
