"""Pinned Arrow schemas of the geometry tables.

`RAW_PROBLEMS` and `PROMPTS` hold pictures and are written row by row; `PROBLEM_INDEX` and `REJECTED` are small.
`PROMPTS` holds the columns of the published `geo3k_imgurl` and `geo3k_imgurl_processed` (images, problem, answer) and
our own.
"""

from __future__ import annotations

import pyarrow as pa

IMAGES_AS_READ = pa.list_(pa.struct([("bytes", pa.binary()), ("path", pa.string())]))
CANDIDATES = pa.list_(pa.struct([("rule", pa.string()), ("label", pa.string())]))

RAW_PROBLEMS = pa.schema(
    [
        pa.field("row_id", pa.string(), nullable=False),
        pa.field("source", pa.string(), nullable=False),  # generate, a hub id, or a file's name
        pa.field("source_split", pa.string(), nullable=False),  # train, validation or eval, as published or generated
        pa.field("images", IMAGES_AS_READ, nullable=False),  # a text (data URI, address, path) stands in `path`
        pa.field("problem", pa.string()),  # null in rows that are none
        pa.field("answer", pa.string()),
        pa.field("columns", pa.string(), nullable=False),  # JSON object of all other columns
        pa.field("error", pa.string()),  # why the row could not be read; null for all others
    ]
)

PROBLEM_INDEX = pa.schema(
    [
        pa.field("row_id", pa.string(), nullable=False),
        pa.field("source_split", pa.string(), nullable=False),
        pa.field("status", pa.string(), nullable=False),  # kept, rejected, excluded (overlap), left_out (counts)
        pa.field("split", pa.string()),  # null for rows that are not kept
        pa.field("image_hashes", pa.list_(pa.string()), nullable=False),  # of the pixels in RGB
        pa.field("problem_hash", pa.string()),  # of pictures and question together; null for rejected rows
        pa.field("answer", pa.string()),
        pa.field("answer_form", pa.string()),  # integer, decimal, surd, fraction, pi, other
        pa.field("family", pa.string()),  # null for problems that were read
        pa.field("difficulty", pa.string()),
        pa.field("repaired", pa.bool_(), nullable=False),  # whether control characters were replaced
        pa.field("sizes", pa.list_(pa.list_(pa.int32())), nullable=False),  # width and height of each picture
    ]
)

PROMPTS = pa.schema(
    [
        pa.field("id", pa.string(), nullable=False),
        pa.field("prompt", pa.string(), nullable=False),  # what the policy reads; equals `problem`
        pa.field("problem", pa.string(), nullable=False),
        pa.field("answer", pa.string(), nullable=False),
        pa.field("images", pa.list_(pa.string()), nullable=False),
        pa.field("question", pa.string(), nullable=False),  # without instruction and placeholders
        pa.field("data_source", pa.string(), nullable=False),
        pa.field("problem_hash", pa.string(), nullable=False),
        pa.field("image_hashes", pa.list_(pa.string()), nullable=False),
        pa.field("answer_form", pa.string(), nullable=False),
        pa.field("family", pa.string()),
        pa.field("difficulty", pa.string()),
        pa.field("candidates", CANDIDATES, nullable=False),  # answers of plausible rules; empty where none are known
        pa.field("columns", pa.string(), nullable=False),  # JSON object of the source's other columns
        pa.field("split", pa.string(), nullable=False),
    ]
)

REJECTED = pa.schema(
    [
        pa.field("row_id", pa.string(), nullable=False),
        pa.field("reason", pa.string(), nullable=False),
        pa.field("raw", pa.string(), nullable=False),  # long texts cut; the whole row is in the raw table
        pa.field("source", pa.string(), nullable=False),
    ]
)
