"""Stored episodes as training data for other trainers: token-exact, as chat, and as preference pairs.

An episode's tokens and mask are kept as they are: `input_ids` are the stored ids, `labels` repeat those that the
policy wrote and are −100 elsewhere, so supervised training on `tokens` sees exactly what the policy saw. `chat` and
`pairs` hold the same turns as messages, for trainers that apply a template of their own. The folder opens with
`datasets.load_dataset(folder, name)` and by the hub's viewer, without this package.
"""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from geo_sokoban_pipeline.config.grpo import ExportPipelineOptions
from geo_sokoban_pipeline.console import track
from geo_sokoban_pipeline.trajectories.parquet import read_trajectories
from geo_sokoban_pipeline.trajectories.schema import features_of

IGNORED = -100  # label of a token that no loss looks at, as in torch's cross entropy and in transformers
ROW_GROUP_BYTES = 64 << 20  # the hub's viewer refuses row groups of 100 MB and more
_LEAST_GAP = 1e-6  # of the two rewards of a preference pair
_CHOSEN = {"first_iteration", "last_iteration", "solved", "min_reward", "best_of_group"}  # options of the episodes
_IMAGE = "<image>"
_MARKED = re.compile(f"({re.escape(_IMAGE)})")

_IMAGES = pa.list_(pa.field("element", pa.struct([("bytes", pa.binary()), ("path", pa.string())])))
_CONTENT = pa.list_(pa.field("element", pa.struct([("type", pa.string()), ("text", pa.string())])))
_MESSAGES = pa.list_(pa.field("element", pa.struct([("role", pa.string()), ("content", _CONTENT)])))
_NAMED = [("trajectory_id", pa.string()), ("task", pa.string()), ("task_id", pa.string()), ("reward", pa.float64())]
TABLES: Mapping[str, pa.Schema] = {
    "tokens": pa.schema(
        [
            *_NAMED,
            ("input_ids", pa.list_(pa.field("element", pa.int32()))),
            ("labels", pa.list_(pa.field("element", pa.int32()))),
            ("images", _IMAGES),
            ("image_grid_thw", pa.list_(pa.field("element", pa.list_(pa.field("element", pa.int32()))))),
        ]
    ),
    "chat": pa.schema([*_NAMED, ("messages", _MESSAGES), ("images", _IMAGES)]),
    "pairs": pa.schema(
        [
            ("task", pa.string()),
            ("task_id", pa.string()),
            ("chosen_id", pa.string()),
            ("rejected_id", pa.string()),
            ("chosen_reward", pa.float64()),
            ("rejected_reward", pa.float64()),
            ("prompt", _MESSAGES),
            ("chosen", _MESSAGES),
            ("rejected", _MESSAGES),
            ("images", _IMAGES),
            ("chosen_images", _IMAGES),
            ("rejected_images", _IMAGES),
        ]
    ),
}
# Columns of an episode that any of the tables needs.
_COLUMNS = (
    "trajectory_id",
    "task",
    "task_id",
    "iteration",
    "group_index",
    "status",
    "prompt_length",
    "token_ids",
    "loss_mask",
    "turns",
    "images",
    "image_grid_thw",
    "reward",
    "success",
)


class NothingSelectedError(ValueError):
    """No stored episode fulfils the conditions of an export."""


@dataclass
class ExportCounts:
    """Counts of an export, read and written, for its card.

    Attributes:
        read: episodes of the chosen iterations.
        without_reward: failed and aborted ones among them, which no table holds.
        rows: by table.
    """

    read: int = 0
    without_reward: int = 0
    rows: dict[str, int] = field(default_factory=lambda: dict.fromkeys(TABLES, 0))


def write_export(
    files: Sequence[Path], folder: Path, options: ExportPipelineOptions, about: Mapping[str, Any]
) -> ExportCounts:
    """Write the chosen tables, and a card that says what they hold, into an empty folder.

    One file of episodes is in memory at a time; a group of samples lies in one file, so pairs are found in it.

    Args:
        files: stored episodes.
        options: the tables, and which episodes they hold.
        about: what the card says of the source, by name.

    Raises:
        NothingSelectedError: not one row is left.
    """
    counts = ExportCounts()
    with ExitStack() as opened, track("export episodes, files", len(files), keep=False) as progress:
        writers = {name: opened.enter_context(_open_table(folder / name, TABLES[name])) for name in options.tables}
        for file in files:
            episodes = _read_episodes(file, options, counts)
            chosen = choose_episodes(episodes, options)
            made = {
                "tokens": map(token_row, chosen),
                "chat": map(chat_row, chosen),
                "pairs": pair_rows(episodes),
            }
            for name, writer in writers.items():
                counts.rows[name] += _append(writer, made[name])
            progress.advance()
    for name in options.tables:
        if not counts.rows[name]:
            shutil.rmtree(folder / name)
    if not any(counts.rows.values()):
        raise NothingSelectedError(
            f"none of {counts.read} stored episodes is chosen by {json.dumps(options.model_dump(include=_CHOSEN))}: "
            "widen the conditions, such as solved=false, or name other iterations."
        )
    (folder / "README.md").write_text(write_card(options, counts, about), encoding="utf-8")
    return counts


def choose_episodes(episodes: Sequence[dict[str, Any]], options: ExportPipelineOptions) -> list[dict[str, Any]]:
    """Episodes for supervised training, in their stored order."""
    kept = [
        episode
        for episode in episodes
        if (not options.solved or episode["success"])
        and (options.min_reward is None or episode["reward"] >= options.min_reward)
    ]
    if not options.best_of_group:
        return kept
    best: dict[Any, dict[str, Any]] = {}
    for episode in kept:
        key = episode["iteration"], episode["group_index"]
        if key not in best or episode["reward"] > best[key]["reward"]:
            best[key] = episode
    return list(best.values())


def token_row(episode: Mapping[str, Any]) -> dict[str, Any]:
    """A row of `tokens`: the ids that the policy saw and wrote, with labels where it wrote."""
    ids, mask = np.asarray(episode["token_ids"], np.int32), np.asarray(episode["loss_mask"], bool)
    return {
        **{name: episode[name] for name, _ in _NAMED},
        "input_ids": ids,
        "labels": np.where(mask, ids, np.int32(IGNORED)),
        "images": episode["images"],
        "image_grid_thw": episode["image_grid_thw"],
    }


def chat_row(episode: Mapping[str, Any]) -> dict[str, Any]:
    """A row of `chat`: all turns as messages; images in the order in which the messages show them."""
    turns = episode["turns"]
    return {
        **{name: episode[name] for name, _ in _NAMED},
        "messages": [message_of(turn) for turn in turns],
        "images": _images_of(episode, turns),
    }


def pair_rows(episodes: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Rows of `pairs`: of each group the best and the worst completed episode, where their rewards differ enough.

    `prompt` is what both saw before their first own word; `chosen` and `rejected` are the rest, later observations
    included, which differ from there on.
    """
    groups: dict[Any, list[dict[str, Any]]] = {}
    for episode in episodes:
        if episode["status"] == "completed":
            groups.setdefault((episode["iteration"], episode["group_index"]), []).append(episode)
    for samples in groups.values():
        best = max(samples, key=lambda episode: episode["reward"])
        worst = min(samples, key=lambda episode: episode["reward"])
        if best["reward"] - worst["reward"] < _LEAST_GAP:
            continue
        (prompt, chosen), (_, rejected) = _split_prompt(best), _split_prompt(worst)
        yield {
            "task": best["task"],
            "task_id": best["task_id"],
            "chosen_id": best["trajectory_id"],
            "rejected_id": worst["trajectory_id"],
            "chosen_reward": best["reward"],
            "rejected_reward": worst["reward"],
            "prompt": [message_of(turn) for turn in prompt],
            "chosen": [message_of(turn) for turn in chosen],
            "rejected": [message_of(turn) for turn in rejected],
            "images": _images_of(best, prompt),
            "chosen_images": _images_of(best, chosen),
            "rejected_images": _images_of(worst, rejected),
        }


def write_card(options: ExportPipelineOptions, counts: ExportCounts, about: Mapping[str, Any]) -> str:
    """The folder's README: the hub's configuration block, then what the rows are and where they come from."""
    configs = "".join(
        f"- config_name: {name}\n  data_files:\n  - split: train\n    path: {name}/train-*.parquet\n"
        for name in options.tables
        if counts.rows[name]
    )
    meanings = {
        "tokens": "`input_ids` as the policy saw and wrote them, `labels` are −100 where it did not write; image pads "
        "are expanded by `image_grid_thw`.",
        "chat": "the same episodes as messages with their images, for a trainer that applies its own chat template.",
        "pairs": "best and worst sample of a group: `prompt`, `chosen`, `rejected`, with the images of each.",
    }
    lines = [f"| `{name}` | {counts.rows[name]:,} | {meanings[name]} |" for name in options.tables]
    source = "\n".join(f"- {name}: {value}" for name, value in about.items())
    return (
        f"---\nconfigs:\n{configs}---\n\n"
        "# Episodes of a policy\n\n"
        "Written by `geo_sokoban_pipeline`. Rewards are those of the run. The prompts are those that it "
        "trained on; choose a licence that theirs allows before you publish this folder.\n\n"
        "| table | rows | content |\n|---|---:|---|\n" + "\n".join(lines) + "\n\n"
        "## Source\n\n"
        f"{source}\n- episodes read: {counts.read:,}; without reward, left out: {counts.without_reward:,}\n"
        f"- chosen: {json.dumps(options.model_dump(include=_CHOSEN))}\n"
    )


def is_included(options: ExportPipelineOptions, iteration: int) -> bool:
    """Whether an iteration is among the chosen ones."""
    last = options.last_iteration
    return options.first_iteration <= iteration and (last is None or iteration <= last)


def _read_episodes(file: Path, options: ExportPipelineOptions, counts: ExportCounts) -> list[dict[str, Any]]:
    table = read_trajectories(file, _COLUMNS)
    inside = table.filter(
        pa.array([is_included(options, number) for number in table["iteration"].to_pylist()], pa.bool_())
    )
    graded = inside.filter(inside.column("reward").is_valid())
    counts.read += inside.num_rows
    counts.without_reward += inside.num_rows - graded.num_rows
    return graded.to_pylist()


def _split_prompt(episode: Mapping[str, Any]) -> tuple[list[Any], list[Any]]:
    turns = episode["turns"]
    first = next((k for k, turn in enumerate(turns) if turn["role"] == "assistant"), len(turns))
    return turns[:first], turns[first:]


def message_of(turn: Mapping[str, Any]) -> dict[str, Any]:
    """A turn as a message; only as many marks become images as the turn has, so that a written mark stays text."""
    left = len(turn["image_indices"])
    content = []
    for part in _MARKED.split(turn["text"]):
        if part == _IMAGE and left:
            left -= 1
            content.append({"type": "image", "text": None})
        elif part:
            content.append({"type": "text", "text": part})
    return {"role": turn["role"], "content": content}


def _images_of(episode: Mapping[str, Any], turns: Iterable[Mapping[str, Any]]) -> list[Any]:
    return [episode["images"][index] for turn in turns for index in turn["image_indices"]]


def _open_table(folder: Path, schema: pa.Schema) -> pq.ParquetWriter:
    folder.mkdir()
    features = json.dumps({"info": {"features": features_of(schema)}}, separators=(",", ":"))
    described = schema.with_metadata({"huggingface": features})
    return pq.ParquetWriter(folder / "train-00000-of-00001.parquet", described, compression="zstd")


def _append(writer: pq.ParquetWriter, rows: Iterable[dict[str, Any]]) -> int:
    """Append rows, in row groups below the viewer's limit; how many there were."""
    table = pa.Table.from_pylist(list(rows), schema=writer.schema)
    if table.num_rows:
        groups = math.ceil(table.nbytes / ROW_GROUP_BYTES)
        writer.write_table(table, row_group_size=max(1, table.num_rows // groups))
    return int(table.num_rows)
