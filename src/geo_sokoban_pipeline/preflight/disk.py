"""Disk of a run: how many bytes it will write and keep, whether they fit, and whether its folders can be written.

Sizes are those of what the run has stored already where it has, else computed from the model's shape and one episode.
"""

from __future__ import annotations

import os
import tempfile
from dataclasses import dataclass
from pathlib import Path

from geo_sokoban_pipeline.options.training import TrainOptions
from geo_sokoban_pipeline.preflight.checks import Check
from geo_sokoban_pipeline.preflight.episode import EpisodeShape
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
    """Bytes that a run keeps at most, by kind.

    Attributes:
        measured: the size of an iteration's trajectories is known from stored ones; a computed one counts no picture
            twice and no byte as compressed, and is several times too large where boards repeat.
    """

    checkpoints: int
    policies: int
    trajectories: int
    measured: bool = False

    @property
    def total(self) -> int:
        """All of it."""
        return self.checkpoints + self.policies + self.trajectories


def plan_disk(
    options: TrainOptions,
    weight_bytes: int,
    shape: EpisodeShape,
    *,
    validation: int,
    evaluation: int,
    checkpoint_bytes: int | None = None,
    iteration_bytes: int | None = None,
    done: int = 0,
) -> DiskPlan:
    """Bytes that a run still has to write and will keep.

    Args:
        weight_bytes: of the model.
        shape: of an episode, for stored episodes.
        validation, evaluation: prompts that are played.
        checkpoint_bytes, iteration_bytes: measured size of a checkpoint, and of an iteration's trajectories.
        done: iterations that are stored.
    """
    loop = options.loop
    left = max(loop.iterations - done, 0)
    one = checkpoint_bytes or _TENSORS_PER_CHECKPOINT * weight_bytes + _TEXT_BYTES
    saved = -(-loop.iterations // loop.save_interval)
    # The best one may be older than the newest, and one more lies there while it is written.
    kept = saved if loop.keep_last is None else min(saved, loop.keep_last + int(loop.keep_best) + 1)
    episodes = options.grpo.groups * options.grpo.group_size
    per_episode = episode_bytes(options, shape)
    validations = left // loop.eval_interval + 1 if loop.eval_interval else 0
    validated = validations * 2 * validation
    played = 2 * evaluation * (options.evaluation.samples + int(options.evaluation.greedy))
    per_iteration = iteration_bytes or episodes * per_episode
    return DiskPlan(
        checkpoints=kept * one,
        # Starting, warm-start and final policy; the last one shares the files of its checkpoint.
        policies=2 * (weight_bytes + _TEXT_BYTES),
        trajectories=left * per_iteration + (validated + played) * per_episode,
        measured=iteration_bytes is not None,
    )


def episode_bytes(options: TrainOptions, shape: EpisodeShape) -> int:
    """Bytes of one stored episode at most: every turn is played, no picture is shared with another episode."""
    turns = options.rollout.max_turns
    reply = options.rollout.max_tokens_per_turn or max(shape.reply, 1)
    tokens = shape.prompt + turns * (reply + shape.observation)
    return tokens * _TOKEN_BYTES + (turns + 1) * (shape.picture_bytes + 2 * _TURN_BYTES)


def check_space(plan: DiskPlan, root: Path, free: int | None = None) -> Check:
    """Whether a plan fits on the disk of the data root.

    Args:
        free: bytes that are free; None: as the file system says.
    """
    there = free_bytes(root) if free is None else free
    parts = f"checkpoints {size(plan.checkpoints)}, policies {size(plan.policies)}, trajectories "
    text = f"{size(plan.total)} needed at most ({parts}{size(plan.trajectories)}), {size(there)} free at {root}"
    way_out = "free space, move data_root, or lower loop.keep_last or loop.iterations"
    if (plan.total if plan.measured else plan.checkpoints + plan.policies) > there:
        return Check(_GROUP, "space", "failure", text, way_out)
    if plan.total > there:
        return Check(_GROUP, "space", "warning", text, way_out)
    return Check(_GROUP, "space", "ok", text)


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
