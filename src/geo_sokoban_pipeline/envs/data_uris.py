"""Pictures inside rows: PNG data URIs out, checked pictures in.

Nothing but a `data:` URI is ever read, and its size is known before a pixel is decoded, so a row can neither fetch
from the network, read a local file, nor unpack to gigabytes.
"""

from __future__ import annotations

import base64
import binascii
import io
import struct
import zlib

from PIL import Image

# What Pillow's decoders raise on damaged bytes, besides ValueError.
_DAMAGED = (OSError, EOFError, SyntaxError, IndexError, struct.error, zlib.error, Image.DecompressionBombError)

PNG_PREFIX = "data:image/png;base64,"


def png_data_uri(png: bytes) -> str:
    """Data URI of PNG bytes."""
    return PNG_PREFIX + base64.b64encode(png).decode("ascii")


def read_data_uri(uri: object, *, max_bytes: int, max_pixels: int) -> Image.Image:
    """Picture of a base64 data URI, in RGB.

    Args:
        uri: any media type is accepted; published rows are known to say `image/None`.
        max_bytes: of the encoded picture.
        max_pixels: width times height.

    Raises:
        ValueError: not a data URI (remote or local), not base64, too large, or no readable picture.
    """
    if not isinstance(uri, str):
        raise ValueError(f"picture is a {type(uri).__name__}; only data: URIs are read")
    if not uri.startswith("data:"):
        raise ValueError(f"picture {uri[:60]!r} is no data: URI; remote and local pictures are not read")
    head, comma, body = uri.partition(",")
    if not comma or not head.endswith(";base64"):
        raise ValueError(f"picture {uri[:60]!r} is not base64 text; expected data:image/png;base64,…")
    if len(body) * 3 // 4 > max_bytes + 2:
        raise ValueError(f"picture has {len(body) * 3 // 4} bytes, more than limits.max_bytes={max_bytes}")
    try:
        raw = base64.b64decode(body, validate=True)
    except (binascii.Error, ValueError) as error:
        raise ValueError(f"picture is not valid base64: {error}") from error
    return _decode(raw, max_pixels)


def _decode(raw: bytes, max_pixels: int) -> Image.Image:
    try:
        # Opening reads the header only; the size is checked before pixels are unpacked.
        with Image.open(io.BytesIO(raw), formats=["PNG", "JPEG", "WEBP", "GIF", "BMP"]) as picture:
            width, height = picture.size
            if width * height > max_pixels:
                raise ValueError(f"picture has {width}×{height} pixels, more than limits.max_pixels={max_pixels}")
            return picture.convert("RGB")
    except _DAMAGED as error:
        raise ValueError(f"picture cannot be decoded: {error}") from error
