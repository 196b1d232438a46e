"""Side tables of stored episodes: scores of each sampled token under a policy, and the effect of each part of an image.

A row belongs to the episode of its `trajectory_id`; `position` is a place in the episode's `token_ids`. So these tables
join with trajectories and index without this package.
"""

from __future__ import annotations

import pyarrow as pa

from geo_sokoban_pipeline.trajectories.schema import list_of

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
