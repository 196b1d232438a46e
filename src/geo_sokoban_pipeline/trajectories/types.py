"""Episodes as dataclasses and as Arrow tables, with exact conversion between the two.

`Trajectory` has one field per column of `TRAJECTORY_SCHEMA`. Both directions keep every number bit for bit; columns
are built from flat arrays and offsets, and equal image bytes are stored once per table (dictionary encoding).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import orjson
import pyarrow as pa

from geo_sokoban_pipeline.trajectories.arrow import (
    DERIVED_COLUMNS,
    NAMED_COLUMNS,
    Spans,
    build_column,
    decode_names,
    derive_columns,
    gather_columns,
    one_array,
    read_column,
)
from geo_sokoban_pipeline.trajectories.schema import TRAJECTORY_SCHEMA, TableContext, schema_metadata

__all__ = [
    "TableContext",
    "Trajectory",
    "TrajectoryBatch",
    "Turn",
    "share_infos",
    "table_to_trajectories",
    "trajectories_to_table",
]

_TYPES = {spec.name: spec.type for spec in TRAJECTORY_SCHEMA}
_PLAIN_JSON = orjson.OPT_PASSTHROUGH_DATACLASS | orjson.OPT_PASSTHROUGH_DATETIME | orjson.OPT_PASSTHROUGH_SUBCLASS
_FIELDS = [name for name in TRAJECTORY_SCHEMA.names if name not in DERIVED_COLUMNS]


@dataclass(slots=True, kw_only=True)
class Turn:
    """One message of an episode.

    Attributes:
        role: `user`, `assistant`, `system` or `tool`.
        text: a user turn's text holds `<image>` where its images stand; an assistant turn's is the decoded response
            without its special end token.
        token_start, token_end: half-open span in `token_ids`.
        image_indices: positions in the episode's `images`.
        action: parsed action; None if the environment found none.
        reward: of the environment for this turn; None for turns without a reward.
        credit: part of the episode's reward that this response has earned; those of all responses add up to it. None
            unless the advantage is made of them, and in evaluation.
        advantage: of the response in training; None where the episode has one advantage.
        info: JSON values from the environment; turns with equal values may share one dict.
    """

    role: str
    text: str
    token_start: int
    token_end: int
    image_indices: list[int] = field(default_factory=list)
    action: str | None = None
    reward: float | None = None
    credit: float | None = None
    advantage: float | None = None
    info: dict[str, Any] = field(default_factory=dict)


@dataclass(slots=True, kw_only=True, eq=False)
class Trajectory:
    """One episode: fields, types and meaning of the columns of `TRAJECTORY_SCHEMA`.

    Columns that repeat a value of the lists (`DERIVED_COLUMNS`) are not fields; tables make them from the lists.

    Attributes:
        sampling: JSON text of an object: engine, its version, temperature and limits.
        token_ids: (T,) int32.
        loss_mask: (T,) int8.
        rollout_log_probs: (T,) float32, nats.
        old_log_probs, ref_log_probs: (T,) float32 or None.
        weight_spans: (policy version, start, end) per span of tokens.
        difficulty: of the prompt, as text, by which its task draws prompts: the fewest moves of a level, the family of
            a geometry problem. None if it is not known.
        images: PNG bytes.
        image_grid_thw: (t, h, w) in patches, one per image.
        reward_parts, metrics, timings: by name; stored sorted by it. Timings are seconds.
    """

    trajectory_id: str
    task: str
    task_id: str
    iteration: int
    group_index: int
    sample_index: int
    policy_version: int
    seed: int
    sampling: str
    status: str
    finish_reason: str | None = None
    error: str | None = None
    drop_reason: str | None = None
    trained: bool = False
    prompt_length: int
    token_ids: np.ndarray
    loss_mask: np.ndarray
    rollout_log_probs: np.ndarray
    old_log_probs: np.ndarray | None = None
    ref_log_probs: np.ndarray | None = None
    weight_spans: Spans
    turns: list[Turn]
    images: list[bytes]
    image_grid_thw: list[tuple[int, int, int]]
    label: str | None = None
    response: str
    reward: float | None = None
    advantage: float | None = None
    difficulty: str | None = None
    reward_parts: dict[str, float] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)
    timings: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class TrajectoryBatch:
    """Episodes with the context of their tokens; the trajectory dataset saves it like a table."""

    trajectories: list[Trajectory]
    context: TableContext

    def to_table(self) -> pa.Table:
        """The table of these episodes."""
        return trajectories_to_table(self.trajectories, self.context)


def trajectories_to_table(trajectories: Sequence[Trajectory], context: TableContext) -> pa.Table:
    """Table of N episodes in the pinned schema, image bytes dictionary-encoded, the context in the metadata.

    Only types are checked here; `validate_trajectories` checks the contract.

    Raises:
        ValueError, TypeError: a turn's `info` is not JSON (NaN included) or a value does not fit its column.
    """
    columns = dict(zip(_FIELDS, gather_columns(trajectories, _FIELDS), strict=True))
    built = {name: build_column(name, values, _TYPES[name]) for name, values in columns.items()}
    built |= derive_columns(built["metrics"], built["reward_parts"], built["turns"])
    built |= {name: decode_names(built[name], _TYPES[name]) for name in NAMED_COLUMNS}
    images = TRAJECTORY_SCHEMA.field("images").with_type(built["images"].type)
    schema = TRAJECTORY_SCHEMA.set(TRAJECTORY_SCHEMA.get_field_index("images"), images)
    arrays = [built[name] for name in _TYPES]
    return pa.Table.from_arrays(arrays, schema=schema.with_metadata(schema_metadata(context)))


def table_to_trajectories(table: pa.Table) -> list[Trajectory]:
    """Episodes of a table, in its order; the inverse of `trajectories_to_table`.

    Arrays of numbers are writable views into one copy per column; equal images of a table are one `bytes` object.
    """
    table = table.unify_dictionaries().combine_chunks()
    columns = {name: read_column(name, one_array(table, name)) for name in _FIELDS}
    columns["turns"] = [[Turn(**cells) for cells in turns] for turns in columns["turns"]]
    return [Trajectory(**dict(zip(columns, row, strict=True))) for row in zip(*columns.values(), strict=True)]


def share_infos(turns: Iterable[Turn]) -> None:
    """Replace equal `info` dicts of turns by one shared dict, which is read-only from then on.

    An info that is empty, contains None, or is not plain JSON keeps its own dict.
    """
    first: dict[bytes, dict[str, Any]] = {}
    for turn in turns:
        if turn.info:
            try:
                text = orjson.dumps(turn.info, option=_PLAIN_JSON)
            except TypeError:
                continue
            # orjson writes NaN and None both as null, so such infos must not be merged.
            if b"null" not in text:
                turn.info = first.setdefault(text, turn.info)
