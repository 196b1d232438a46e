"""Schemas of stored episodes: one row per episode, one pinned Arrow schema, one validator.

The schema is plain Arrow without map types, so pandas, polars, DuckDB and `datasets` open the files without this
package. All else that a reader must know (which token id is an image pad, how many patches one pad stands
for, which tokenizer, chat template and processor made the ids) is in the schema's metadata, so a table is checked
from its own content alone. A table that `validate_trajectories` accepts keeps every rule of the trajectory contract.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from geo_sokoban_pipeline.formats import type_name
from geo_sokoban_pipeline.runs.storage import Rewind, Thin
from geo_sokoban_pipeline.trajectories.arrow import PART_COLUMNS
from geo_sokoban_pipeline.trajectories.thinning import Thinning, read_thinning
from geo_sokoban_pipeline.trajectories.validation import (
    TrajectoryError,
    check_episodes,
    check_group_advantages,
    check_image_pads,
)

SCHEMA_VERSION = "2"
_NO_ZEROS = "zero_on_equal_groups"

__all__ = [
    "SCHEMA_VERSION",
    "TRAJECTORY_SCHEMA",
    "TableContext",
    "TrajectoryContract",
    "TrajectoryError",
    "check_version",
    "read_context",
    "schema_metadata",
    "validate_schema",
    "validate_trajectories",
]


def list_of(value: pa.DataType) -> pa.DataType:
    """List type with parquet's own name of the child: the schema read back from a file then equals the one written."""
    return pa.list_(pa.field("element", value))


_NAMED_VALUES = list_of(pa.struct([("name", pa.string()), ("value", pa.float64())]))
_TURN = pa.struct(
    [
        ("role", pa.string()),
        ("text", pa.string()),
        ("token_start", pa.int32()),
        ("token_end", pa.int32()),
        ("image_indices", list_of(pa.int32())),
        ("action", pa.string()),
        ("reward", pa.float64()),
        ("credit", pa.float64()),
        ("advantage", pa.float64()),
        ("info", pa.string()),
    ]
)
_COLUMNS: dict[str, pa.DataType] = {
    "trajectory_id": pa.string(),
    "task": pa.string(),
    "task_id": pa.string(),
    "iteration": pa.int32(),
    "group_index": pa.int32(),
    "sample_index": pa.int32(),
    "policy_version": pa.int32(),
    "seed": pa.int64(),
    "sampling": pa.string(),
    "status": pa.string(),
    "finish_reason": pa.string(),
    "error": pa.string(),
    "drop_reason": pa.string(),
    "trained": pa.bool_(),
    "prompt_length": pa.int32(),
    "token_ids": list_of(pa.int32()),
    "loss_mask": list_of(pa.int8()),
    "rollout_log_probs": list_of(pa.float32()),
    "old_log_probs": list_of(pa.float32()),
    "ref_log_probs": list_of(pa.float32()),
    "weight_spans": list_of(pa.struct([("version", pa.int32()), ("start", pa.int32()), ("end", pa.int32())])),
    "turns": list_of(_TURN),
    "images": list_of(pa.struct([("bytes", pa.binary()), ("path", pa.string())])),
    "image_grid_thw": list_of(list_of(pa.int32())),
    "label": pa.string(),
    "response": pa.string(),
    "reward": pa.float64(),
    "advantage": pa.float64(),
    # Values of the lists below, one per episode, for queries without an unpivot.
    "success": pa.bool_(),
    "n_turns": pa.int32(),
    "difficulty": pa.string(),
    "optimal_steps": pa.int32(),
    **dict.fromkeys(PART_COLUMNS, pa.float64()),
    "reward_parts": _NAMED_VALUES,
    "metrics": _NAMED_VALUES,
    "timings": _NAMED_VALUES,
}
_NULLABLE = frozenset(
    ["finish_reason", "error", "drop_reason", "old_log_probs", "ref_log_probs", "label", "reward", "advantage"]
    + ["success", "difficulty", "optimal_steps", *PART_COLUMNS]
)

# `images` is never null either, but `datasets` decodes a column as images only if its field is marked nullable.
_MARKED = _NULLABLE | {"images"}
TRAJECTORY_SCHEMA = pa.schema([pa.field(name, kind, nullable=name in _MARKED) for name, kind in _COLUMNS.items()])


@dataclass(frozen=True)
class TableContext:
    """Meaning of the token ids of a table; stored in the metadata of its schema.

    Attributes:
        image_pad_id: id of the token that stands for one merged image patch, in the expanded sequence.
        merge_size: patches along one side that one image pad covers (2 for Qwen3-VL).
        tokenizer_hash, template_hash, processor_hash: content hashes of the three files behind the ids.
        zero_on_equal_groups: whether equal rewards of a group give its episodes advantages of exactly 0, as the
            estimator promises. The metadata say only that it does not.
    """

    image_pad_id: int
    merge_size: int
    tokenizer_hash: str
    template_hash: str
    processor_hash: str
    zero_on_equal_groups: bool = True


def schema_metadata(context: TableContext) -> dict[bytes, bytes]:
    """Metadata of a table's schema: the `huggingface` features block, the schema version and the context."""
    values = {
        "huggingface": _FEATURES,
        "schema_version": SCHEMA_VERSION,
        "image_pad_id": str(context.image_pad_id),
        "merge_size": str(context.merge_size),
        "tokenizer_hash": context.tokenizer_hash,
        "template_hash": context.template_hash,
        "processor_hash": context.processor_hash,
        **({} if context.zero_on_equal_groups else {_NO_ZEROS: "false"}),
    }
    return {name.encode(): value.encode() for name, value in values.items()}


def read_context(schema: pa.Schema) -> TableContext:
    """Context from a schema's metadata.

    Raises:
        TrajectoryError: an entry is missing or of another schema version; the message names it.
    """
    metadata = schema.metadata or {}

    def entry(name: str) -> str:
        if name.encode() not in metadata:
            raise TrajectoryError("schema metadata", None, f"no `{name}`", "build tables with trajectories_to_table")
        return metadata[name.encode()].decode()

    entry("schema_version")
    check_version(schema)
    hashes = {name: entry(name) for name in ("tokenizer_hash", "template_hash", "processor_hash")}
    zeros = _NO_ZEROS.encode() not in metadata
    return TableContext(int(entry("image_pad_id")), int(entry("merge_size")), **hashes, zero_on_equal_groups=zeros)


def check_version(schema: pa.Schema) -> None:
    """Refuse a table of another schema version.

    Raises:
        TrajectoryError: the metadata name another schema version; tables without the entry pass.
    """
    version = (schema.metadata or {}).get(b"schema_version", SCHEMA_VERSION.encode()).decode()
    if version != SCHEMA_VERSION:
        raise TrajectoryError("schema_version", None, version, f"this version of the project reads {SCHEMA_VERSION}")


def features_of(schema: pa.Schema) -> dict[str, Any]:
    """The `datasets.Features` of a schema as its JSON; lists of (bytes, path) structs are images."""
    # Written by hand instead of through `datasets.Features`, whose import takes a second; a test compares the two.
    return {field.name: _feature(field.type) for field in schema}


def _feature(kind: pa.DataType) -> dict[str, Any]:
    if pa.types.is_list(kind):
        return {"feature": _feature(kind.value_type), "_type": "List"}
    if pa.types.is_struct(kind):
        if [field.name for field in kind] == ["bytes", "path"]:
            return {"_type": "Image"}
        return {field.name: _feature(field.type) for field in kind}
    names = {pa.float64(): "float64", pa.float32(): "float32"}
    return {"dtype": names.get(kind, str(kind)), "_type": "Value"}


_FEATURES = json.dumps({"info": {"features": features_of(TRAJECTORY_SCHEMA)}}, separators=(",", ":"))


def validate_schema(schema: pa.Schema) -> None:
    """Compare version, names, order and types with `TRAJECTORY_SCHEMA`; dictionary encoding and null flags may differ.

    Raises:
        TrajectoryError: naming the version, or the first differing column and both types.
    """
    check_version(schema)
    names, wanted = schema.names, TRAJECTORY_SCHEMA.names
    if names != wanted:
        missing = [name for name in wanted if name not in names]
        extra = [name for name in names if name not in wanted]
        if missing or extra:
            raise TrajectoryError("columns", None, f"missing {missing}, unknown {extra}", "not a trajectory table")
        raise TrajectoryError("columns", None, names, f"order them as {wanted}")
    for expected, found in zip(TRAJECTORY_SCHEMA, schema.types, strict=True):
        if found != expected.type and _plain(found) != _plain(expected.type):
            raise TrajectoryError(expected.name, None, f"type {found}", f"the schema demands {expected.type}")


def _plain(kind: pa.DataType) -> pa.DataType:
    if pa.types.is_dictionary(kind):
        return _plain(kind.value_type)
    if pa.types.is_list(kind):
        return list_of(_plain(kind.value_type))
    if pa.types.is_struct(kind):
        return pa.struct([(field.name, _plain(field.type)) for field in kind])
    return kind


def validate_trajectories(table: pa.Table) -> None:
    """Check a table against the whole trajectory contract, vectorised: 1,000 episodes take some 20 ms.

    Args:
        table: N episodes in `TRAJECTORY_SCHEMA` (image bytes dictionary-encoded or not) with the metadata of
            `schema_metadata`; N may be 0, and columns may be chunked.

    Raises:
        TrajectoryError: the first broken rule, naming column, trajectory id and value.
    """
    validate_schema(table.schema)
    context = read_context(table.schema)
    thinning = read_thinning(table.schema) or Thinning()
    # Without tokens there are no image pads; groups are not whole, or the estimator does not promise zeros.
    exempt = {
        check_image_pads: not thinning.tokens,
        check_group_advantages: thinning.episodes > 1 or not context.zero_on_equal_groups,
    }
    left_out = [check for check, is_exempt in exempt.items() if is_exempt]
    check_episodes(
        table, _NULLABLE, image_pad_id=context.image_pad_id, merge_size=context.merge_size, left_out=left_out
    )


class TrajectoryContract:
    """Validator for Kedro's `validator:` key on trajectory entries; use it with `on: [save]`.

    On load such an entry gives callables; the dataset checks their tables when they are called.
    """

    def validate(self, data: dict[str, Any] | Rewind | Thin) -> dict[str, Any] | Rewind | Thin:
        """Check every table of a {partition: table} dict; orders pass.

        Args:
            data: tables, or anything with `to_table()` (a `TrajectoryBatch`).

        Returns:
            The dict with every value as a table, so that the conversion happens once.

        Raises:
            TrajectoryError: as in `validate_trajectories`; the message starts with the partition.
        """
        if isinstance(data, Rewind | Thin):
            return data
        return {name: self._validate_part(name, value) for name, value in data.items()}

    def _validate_part(self, name: str, value: Any) -> pa.Table:
        table = self.to_table(value)
        try:
            validate_trajectories(table)
        except TrajectoryError as error:
            error.args = (f"{name}: {error}",)
            raise
        return table

    @staticmethod
    def to_table(value: Any) -> pa.Table:
        """A table itself, or the table of an object with `to_table()`.

        Raises:
            TrajectoryError: the value is neither.
        """
        if isinstance(value, pa.Table):
            return value
        if not hasattr(value, "to_table"):
            way_out = "a pyarrow.Table from trajectories_to_table(trajectories, context), or a TrajectoryBatch"
            raise TrajectoryError("partition value", None, type_name(value), way_out)
        return value.to_table()


_WHOSE = [
    ("run", pa.string()),
    ("run_id", pa.string()),
    ("scored_by", pa.string()),
    ("scored_version", pa.int32()),
    ("trajectory_id", pa.string()),
    ("iteration", pa.int32()),
]

# One row per sampled token; docs/scores.md describes the columns.
TOKEN_SCORES = pa.schema(
    [
        *_WHOSE,
        ("position", pa.int32()),
        ("turn", pa.int32()),
        ("token_id", pa.int32()),
        ("token", pa.string()),
        ("log_prob", pa.float32()),
        ("entropy", pa.float32()),
        ("stored_log_prob", pa.float32()),
        ("ratio", pa.float32()),
        ("image_reliance", pa.float32()),
        ("top_ids", list_of(pa.int32())),
        ("top_tokens", list_of(pa.string())),
        ("top_log_probs", list_of(pa.float32())),
    ]
)

# One row per part of an image that an episode shows, where an occlusion map was asked for.
OCCLUSION = pa.schema(
    [
        *_WHOSE,
        ("turn", pa.int32()),
        ("image", pa.int32()),
        ("left", pa.int32()),
        ("top", pa.int32()),
        ("width", pa.int32()),
        ("height", pa.int32()),
        ("content", pa.string()),
        ("drop", pa.float32()),
        ("positions", list_of(pa.int32())),
        ("drops", list_of(pa.float32())),
    ]
)

_OF_A_STATE = [
    ("continuations", pa.int32()),
    ("failed", pa.int32()),
    ("value", pa.float64()),
    ("low", pa.float64()),
    ("high", pa.float64()),
    ("variance", pa.float64()),
    ("success", pa.float64()),
    ("success_low", pa.float64()),
    ("success_high", pa.float64()),
]

# One row per forked turn; docs/forks.md describes the columns.
TURN_VALUES = pa.schema(
    [
        ("run", pa.string()),
        ("run_id", pa.string()),
        ("forked_by", pa.string()),
        ("trajectory_id", pa.string()),
        ("iteration", pa.int32()),
        ("group_index", pa.int32()),
        ("turn", pa.int32()),
        ("policy_version", pa.int32()),
        ("is_greedy", pa.bool_()),
        ("history", pa.string()),
        *_OF_A_STATE,
        *((f"{name}_after", kind) for name, kind in _OF_A_STATE),
        ("advantage", pa.float64()),
        ("turns_left", pa.int32()),
        ("is_solvable", pa.bool_()),
        ("is_solvable_after", pa.bool_()),
        ("steps_left", pa.int32()),
        ("is_reseeded", pa.bool_()),
        ("left_out", pa.string()),
    ]
)
