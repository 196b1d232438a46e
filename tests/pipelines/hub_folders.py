"""Folders with the layout of the published data sets, made from the real rows of the shared data."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from geo_sokoban_pipeline.envs.geo3k.data import instruct
from geo_sokoban_pipeline.envs.sokoban.config import SokobanDataOptions
from geo_sokoban_pipeline.envs.sokoban.data import PROMPTS
from geo_sokoban_pipeline.envs.sokoban.data_steps import make_prompts, read_levels

_TRAIN_ROWS = 45  # of the 69 real ones


def write_geometry(folder: Path, rows: Path, *, tool: bool = False) -> Path:
    """`geo3k_imgurl` (train and test; problem, answer, images as strings), or the processed set of the tool.

    Args:
        rows: parquet of the original's schema.
        tool: put the instruction block before each question, with the control character of the published rows.
    """
    folder.mkdir(parents=True)
    plain = [_imgurl_row(row, tool) for row in pq.read_table(rows).to_pylist()]
    for name, part in (("train", plain[:_TRAIN_ROWS]), ("test", plain[_TRAIN_ROWS:])):
        pq.write_table(pa.Table.from_pylist(part), folder / f"{name}.parquet")
    return folder


def write_sokoban(folder: Path, rows: Path, limit: int = 120) -> Path:
    """`sokoban_processed`: prompt, images, extra_info of boards of 384 by 384 pixels.

    Args:
        rows: parquet of the raw schema.
        limit: raw rows that are read.
    """
    counts = {"train": None, "validation": None, "eval": None}
    source = {"path": f"{rows}@[0:{limit}]", "format": "raw_parquet"}
    options = SokobanDataOptions.model_validate(
        {"source": "file", "file": source, "counts": counts, "cell_px": 64, "instruction": "full"}
    )
    levels, _, _ = read_levels(options)  # type: ignore[arg-type]
    parts = [part.to_dict("records") for part in make_prompts(levels, options)]  # type: ignore[arg-type]
    published = ("prompt", "images", "extra_info")
    schema = pa.schema([PROMPTS.field(name) for name in published])
    table = pa.Table.from_pylist([{name: row[name] for name in published} for part in parts for row in part], schema)
    folder.mkdir(parents=True)
    pq.write_table(table, folder / "train.parquet")
    return folder


def _imgurl_row(row: dict[str, Any], tool: bool) -> dict[str, Any]:
    # The media type of the published rows is reported to be this one.
    images = ["data:image/None;base64," + base64.b64encode(image["bytes"]).decode() for image in row["images"]]
    problem = instruct(row["problem"], "tool").replace("\\boxed", "\boxed") if tool else row["problem"]
    return {"problem": problem, "answer": row["answer"], "images": images}
