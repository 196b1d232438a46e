"""Pinned Arrow schemas of the Sokoban tables, so that empty tables and all-null columns keep their types.

`PROMPTS` starts with the columns of the published `sokoban_processed` and adds our own; further columns of a source
pass through behind them with the types they came with.
"""

from __future__ import annotations

import pyarrow as pa

ENV_CONFIG = pa.struct(
    [
        ("grid_size", pa.list_(pa.int64())),
        ("num_boxes", pa.int64()),
        ("render_mode", pa.string()),
        ("max_steps", pa.int64()),
        ("wall_fraction", pa.float64()),
        ("initial_base_grid", pa.list_(pa.list_(pa.int64()))),
        ("initial_boxes", pa.list_(pa.list_(pa.int64()))),
        ("initial_player", pa.list_(pa.int64())),
    ]
)

RAW_LEVELS = pa.schema(
    [
        pa.field("row_id", pa.string(), nullable=False),
        pa.field("source", pa.string(), nullable=False),  # generate, a hub id, or a file's name
        pa.field("data_source", pa.string(), nullable=False),  # name of the data set, as in the published rows
        pa.field("level_xsb", pa.string(), nullable=False),
        pa.field("prompt", pa.string()),  # the row's own text; null for levels without one
        pa.field("images", pa.list_(pa.string())),  # the row's own pictures; null for levels without
        pa.field("columns", pa.string(), nullable=False),  # JSON object of all other columns
        pa.field("seed", pa.int64()),  # null for levels that were read
        pa.field("solution_length", pa.int32()),  # fewest moves; null where the solver did not finish
        pa.field("level_hash", pa.string(), nullable=False),
        pa.field("layout_hash", pa.string(), nullable=False),
        pa.field("copies", pa.int32(), nullable=False),  # rows that this level stands for
        pa.field("split", pa.string(), nullable=False),
        pa.field("split_rule", pa.string(), nullable=False),  # layout or level: what no two splits share
    ]
)

PROMPTS = pa.schema(
    [
        pa.field("id", pa.string(), nullable=False),
        pa.field("prompt", pa.string(), nullable=False),
        pa.field("images", pa.list_(pa.string()), nullable=False),
        pa.field("extra_info", pa.struct([("env_config", ENV_CONFIG)]), nullable=False),
        pa.field("data_source", pa.string(), nullable=False),
        pa.field("level_xsb", pa.string(), nullable=False),
        pa.field("level_hash", pa.string(), nullable=False),
        pa.field("layout_hash", pa.string(), nullable=False),
        pa.field("solution_length", pa.int32()),
        pa.field("split", pa.string(), nullable=False),
        pa.field("split_rule", pa.string(), nullable=False),
    ]
)

REJECTED = pa.schema(
    [
        pa.field("row_id", pa.string(), nullable=False),
        pa.field("reason", pa.string(), nullable=False),
        pa.field("raw", pa.string(), nullable=False),
        pa.field("source", pa.string(), nullable=False),
    ]
)
