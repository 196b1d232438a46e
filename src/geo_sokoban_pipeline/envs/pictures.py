"""Pictures from bytes: the size is known before a pixel is decoded, and what comes out is RGB.

So a row can neither unpack to gigabytes nor hand on a mode that an image processor treats in its own way.
"""

from __future__ import annotations

import io
import struct
import zlib
from typing import Literal

import numpy as np
from PIL import Image

Transparency = Literal["white", "drop"]

# What Pillow's decoders raise on damaged bytes, besides ValueError.
_DAMAGED = (OSError, EOFError, SyntaxError, IndexError, struct.error, zlib.error, Image.DecompressionBombError)
_FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")


def decode_picture(
    raw: bytes, *, max_pixels: int, max_aspect: float | None = None, transparency: Transparency = "drop"
) -> Image.Image:
    """Picture of an image file, in RGB; of an animation the first frame.

    Args:
        raw: PNG, JPEG, WebP, GIF or BMP.
        max_pixels: width times height.
        max_aspect: longer side over shorter side; None: any.
        transparency: `white` lays a picture with transparent parts on white, as a page shows it; `drop` takes the
            colours that lie under them, as Pillow's `convert("RGB")` does.

    Raises:
        ValueError: too large, too long, or no readable picture.
    """
    try:
        # Opening reads the header only; the size is checked before pixels are unpacked.
        with Image.open(io.BytesIO(raw), formats=_FORMATS) as picture:
            _check_size(*picture.size, max_pixels, max_aspect)
            return _as_rgb(picture, transparency)
    except _DAMAGED as error:
        raise ValueError(f"picture cannot be decoded: {error}") from error


def _check_size(width: int, height: int, max_pixels: int, max_aspect: float | None) -> None:
    if width * height > max_pixels:
        raise ValueError(f"picture has {width}×{height} pixels, more than limits.max_pixels={max_pixels}")
    if max_aspect is not None and max(width, height) > max_aspect * min(width, height):
        raise ValueError(f"picture is {width}×{height}, longer than limits.max_aspect={max_aspect:g} allows")


def _as_rgb(picture: Image.Image, transparency: Transparency) -> Image.Image:
    if picture.mode.startswith("I"):
        # 16-bit grey: Pillow would cut values off at 255 instead of scaling them.
        return Image.fromarray((np.asarray(picture, np.uint32) >> 8).astype(np.uint8)).convert("RGB")
    if transparency == "white" and picture.has_transparency_data:
        layer = picture.convert("RGBA")
        page = Image.new("RGBA", layer.size, "white")
        page.alpha_composite(layer)
        return page.convert("RGB")
    return picture.convert("RGB")
