"""Disk of a run: how many bytes it will still write and keep, whether they fit, whether its folders can be written.

Sizes are those of what the run has stored already where it has, else computed from the model's shape and one episode.
Only what is known to be needed is a failure; what an upper bound asks for is a warning.
"""

from __future__ import annotations

import os
import tempfile
from dataclasses import dataclass
from pathlib import Path

from geo_sokoban_pipeline.options.training import LoopOptions, TrainOptions
from geo_sokoban_pipeline.preflight.checks import Check
from geo_sokoban_pipeline.preflight.episode import EpisodeShape
from geo_sokoban_pipeline.preflight.stored_run import Stored
from geo_sokoban_pipeline.storage import free_bytes, nearest_folder

_GROUP = "disk"
# Weights, and two moments of the optimizer in the same type.
_TENSORS_PER_CHECKPOINT = 3
_TEXT_BYTES = 4 << 20  # tokenizer and configuration of a policy folder
_TOKEN_BYTES = 10  # of a stored token: id, mask, one or two log-probs, compressed
_TURN_BYTES = 200  # of a stored message: text, spans, info
_LONGEST_NAME = ".part-000.parquet.00000000.tmp"


@dataclass(frozen=True)
class DiskPlan:
    """Bytes that a run still has to write and keeps, at most, by kind.

    Attributes:
        measured: part of `trajectories` whose size is known from stored ones; a computed one counts no picture twice
            and no byte as compressed, and is several times too large where boards repeat.
    """

    checkpoints: int
    policies: int
    trajectories: int
    measured: int = 0

    @property
    def total(self) -> int:
        """All of it."""
        return self.checkpoints + self.policies + self.trajectories

    @property
    def certain(self) -> int:
        """What is no mere upper bound."""
        return self.checkpoints + self.policies + self.measured


def plan_disk(
    options: TrainOptions,
    weight_bytes: int,
    shape: EpisodeShape,
    *,
    validation: int,
    evaluation: int,
    stored: Stored,
    linked: bool = False,
) -> DiskPlan:
    """Bytes that a run still has to write and will keep.

    Args:
        weight_bytes: of the model.
        shape: of an episode, for stored episodes.
        validation, evaluation: prompts that are played.
        stored: what is there already.
        linked: the starting policy lies on the disk of the data root, so that its files are shared and not copied.
    """
    loop = options.loop
    left = max(loop.iterations - stored.iterations, 0)
    per_episode = episode_bytes(options, shape)
    validations = count_validations(loop, stored.iterations) * 2 * validation
    played = 2 * evaluation * (options.evaluation.samples + int(options.evaluation.greedy))
    episodes = options.grpo.groups * options.grpo.group_size
    iterations = left * (stored.iteration_bytes or episodes * per_episode)
    one = stored.checkpoint_bytes or _TENSORS_PER_CHECKPOINT * weight_bytes + _TEXT_BYTES
    base = 0 if stored.base_policy or linked else weight_bytes + _TEXT_BYTES
    # The optimizer state lies beside what the warm start has made; without one, the files are the base policy's.
    learnt = (
        0 if stored.policy or not options.warm_start.steps else _TENSORS_PER_CHECKPOINT * weight_bytes + _TEXT_BYTES
    )
    return DiskPlan(
        checkpoints=_checkpoints(options, left, stored) * one,
        policies=base + learnt,  # the final one shares the files of its checkpoint
        trajectories=iterations + (validations + played) * per_episode,
        measured=0 if stored.iteration_bytes is None else iterations,
    )


def count_validations(loop: LoopOptions, done: int) -> int:
    """Validations that a run has still to make, the one before training included, with so many iterations done."""
    if not loop.eval_interval:
        return 0
    last = max(loop.iterations, done)
    return last // loop.eval_interval - done // loop.eval_interval + int(done == 0)


def _checkpoints(options: TrainOptions, left: int, stored: Stored) -> int:
    """Checkpoints that will lie beside the stored ones at most."""
    loop = options.loop
    if not left:
        return 0
    to_save = -(-loop.iterations // loop.save_interval) - stored.iterations // loop.save_interval
    if loop.keep_last is None:
        return to_save
    # The best one may be older than the newest, and one more lies there while it is written.
    return min(to_save, max(loop.keep_last + int(loop.keep_best) + 1 - stored.checkpoints, 1))


def episode_bytes(options: TrainOptions, shape: EpisodeShape) -> int:
    """Bytes of one stored episode at most: every turn is played, no picture is shared with another episode."""
    turns = options.rollout.max_turns
    reply = options.rollout.max_tokens_per_turn or max(shape.reply, 1)
    tokens = shape.prompt + turns * (reply + shape.observation)
    return tokens * _TOKEN_BYTES + (turns + 1) * (shape.picture_bytes + 2 * _TURN_BYTES)


def check_space(plan: DiskPlan, root: Path, free: int | None = None) -> Check:
    """Whether a plan fits on the disk of the data root.

    Args:
        free: bytes that the run will find free; None: as the file system says.
    """
    there = free_bytes(root) if free is None else free
    parts = f"checkpoints {size(plan.checkpoints)}, policies {size(plan.policies)}, trajectories "
    text = f"{size(plan.total)} needed at most ({parts}{size(plan.trajectories)}), {size(there)} free at {root}"
    way_out = "free space, move data_root, or lower loop.keep_last or loop.iterations"
    if plan.certain > there:
        return Check(_GROUP, "space", "failure", text, way_out)
    if plan.total > there:
        return Check(_GROUP, "space", "warning", f"{text}; an upper bound", way_out)
    return Check(_GROUP, "space", "ok", text)


def held_bytes(folders: list[Path]) -> int:
    """Bytes that deleting folders frees: a file that is linked from elsewhere too frees none."""
    links: dict[tuple[int, int], int] = {}
    found = 0
    for path in (path for folder in folders for path in folder.rglob("*") if path.is_file() and not path.is_symlink()):
        status = path.stat()
        key = status.st_dev, status.st_ino
        links[key] = links.get(key, 0) + 1
        found += status.st_size if links[key] == status.st_nlink else 0
    return found


def check_writable(folders: list[Path]) -> list[Check]:
    """Whether files can be made in folders, or in the nearest existing one above each; nothing is left behind."""
    found = []
    for folder in folders:
        place = nearest_folder(folder)
        try:
            with tempfile.TemporaryFile(dir=place) as file:
                file.write(b"x")
        except OSError as error:
            text = f"{folder}: no file can be made in {place} ({error.strerror or error})"
            found.append(Check(_GROUP, "writing", "failure", text, "allow writing, free space, or move data_root"))
    return found or [Check(_GROUP, "writing", "ok", f"{len(folders)} folders can be written")]


def check_paths(outputs: Path) -> Check:
    """Whether the longest path of a run is one that the system takes.

    Args:
        outputs: folder of the run id in 07_model_output.
    """
    longest = outputs / "held_out_trajectories" / "iter=00000" / _LONGEST_NAME
    place = nearest_folder(outputs)
    name_limit, path_limit = os.pathconf(place, "PC_NAME_MAX"), os.pathconf(place, "PC_PATH_MAX")
    length = len(os.fsencode(longest))
    name = max(len(os.fsencode(part)) for part in longest.parts)
    text = f"longest path {length} of {path_limit} bytes, longest name {name} of {name_limit}"
    if length >= path_limit or name > name_limit:
        return Check(_GROUP, "paths", "failure", text, "move data_root nearer to the root, or shorten run_id")
    return Check(_GROUP, "paths", "ok", text)


def size(count: float) -> str:
    """Bytes in a unit that a person reads."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"
