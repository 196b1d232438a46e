"""Rows of geometry sources for tests: images of every form, files of both published schemas."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image

from geo_sokoban_pipeline.envs.geo3k.config import Geo3kDataOptions
from geo_sokoban_pipeline.envs.geo3k.data import raw_rows

ALL = {"train": None, "validation": None, "eval": None}
STRUCT_BYTES = pa.list_(pa.struct([("bytes", pa.binary()), ("path", pa.string())]))


def drawing(number: int = 0, size: tuple[int, int] = (40, 30)) -> Image.Image:
    """A small RGB image; another number, another image."""
    pixels = np.random.default_rng(number).integers(0, 255, (size[1], size[0], 3), np.uint8)
    return Image.fromarray(pixels)


def image_file(image: Image.Image, kind: str = "PNG", **arguments: Any) -> bytes:
    """Bytes of an image."""
    buffer = io.BytesIO()
    image.save(buffer, kind, **arguments)
    return buffer.getvalue()


def uri(raw: bytes, media_type: str = "image/png") -> str:
    """Data URI."""
    return f"data:{media_type};base64,{base64.b64encode(raw).decode()}"


def source_row(number: int = 0, **changes: Any) -> dict[str, Any]:
    """A row in the schema of geo3k_imgurl."""
    row = {"images": [uri(image_file(drawing(number)))], "problem": f"<image>Find $x_{{{number}}}$.", "answer": "15"}
    return row | changes


def raw_of(row: Mapping[str, Any]) -> dict[str, Any]:
    """The row as the raw table holds it."""
    return next(raw_rows([(0, row)], "test", "train", set()))


def write_uris(path: Path, rows: Iterable[Mapping[str, Any]]) -> Path:
    """A file in the schema of geo3k_imgurl: data URIs."""
    pq.write_table(pa.Table.from_pylist([dict(row) for row in rows]), path)
    return path


def write_bytes(path: Path, rows: Iterable[Mapping[str, Any]]) -> Path:
    """A file in the schema of hiyouga/geometry3k: bytes and path."""
    table = pa.Table.from_pylist([dict(row) for row in rows])
    column = table.schema.get_field_index("images")
    pq.write_table(table.set_column(column, "images", table["images"].cast(STRUCT_BYTES)), path)
    return path


def options(**changes: Any) -> Geo3kDataOptions:
    """Options of `source=file` for a file that need not be there."""
    given = {"source": "file", "file": {"path": "rows.parquet"}, "counts": ALL, "instruction": "question"}
    return Geo3kDataOptions.model_validate(given | changes)
