"""Pictures of rows: whatever form they come in, out come RGB pixels, and from equal pixels equal PNG data URIs."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from geo_sokoban_pipeline.envs.data_uris import base64_bytes, data_uri_bytes, png_data_uri
from geo_sokoban_pipeline.envs.pictures import decode_picture
from geo_sokoban_pipeline.envs.png import encode_png
from geo_sokoban_pipeline.options.geo3k import Geo3kDataOptions
from geo_sokoban_pipeline.seeding import content_hash

_ADDRESS = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
# Shorter texts of these characters are names of files.
_BASE64 = re.compile(r"[A-Za-z0-9+/]{200,}={0,2}")


def read_pictures(images: Sequence[Mapping[str, Any]], options: Geo3kDataOptions) -> list[Image.Image]:
    """RGB pictures of a raw row, checked against the limits.

    Args:
        images: `bytes` and `path` of each; a data URI stands in `path`.

    Raises:
        ValueError: too many pictures, or one that is remote, outside the allowed folder, too large or unreadable.
    """
    if len(images) > options.limits.max_images:
        raise ValueError(f"{len(images)} images, more than limits.max_images={options.limits.max_images}")
    return [
        decode_picture(
            _picture_bytes(image, options),
            max_pixels=options.limits.max_pixels,
            max_aspect=options.limits.max_aspect,
            transparency=options.transparency,
        )
        for image in images
    ]


def picture_hash(picture: Image.Image) -> str:
    """Hash of an RGB picture's pixels and size, whatever file it came from."""
    return content_hash(f"{picture.width}x{picture.height}", picture.tobytes())


def picture_uri(picture: Image.Image) -> str:
    """PNG data URI of an RGB picture."""
    return png_data_uri(encode_png(np.asarray(picture)))


def _picture_bytes(image: Mapping[str, Any], options: Geo3kDataOptions) -> bytes:
    raw, text = image["bytes"], image["path"]
    limit = options.limits.max_bytes
    if raw:
        if len(raw) > limit:
            raise ValueError(f"picture has {len(raw)} bytes, more than limits.max_bytes={limit}")
        return bytes(raw)
    if not text:
        raise ValueError("picture is empty")
    if text.startswith("data:"):
        return data_uri_bytes(text, limit)
    if _ADDRESS.match(text):
        raise ValueError(f"picture {text[:60]!r} is remote; only bytes and data: URIs are read")
    if _BASE64.fullmatch(text):
        return base64_bytes(text, limit)
    return _file_bytes(text, options.image_folder, limit)


def _file_bytes(name: str, folder: str | None, limit: int) -> bytes:
    """Bytes of a picture below the allowed folder; links that lead out of it are not followed."""
    if folder is None:
        raise ValueError(f"picture {name[:60]!r} is a path; set image_folder to read pictures below it")
    root = Path(folder).resolve()
    try:
        path = (root / name).resolve()
        if not path.is_relative_to(root):
            raise ValueError(f"picture {name[:60]!r} lies outside image_folder")
        if path.stat().st_size > limit:
            raise ValueError(f"picture has {path.stat().st_size} bytes, more than limits.max_bytes={limit}")
        return path.read_bytes()
    except OSError as error:
        raise ValueError(f"picture {name[:60]!r} cannot be read: {error.strerror or error}") from error
