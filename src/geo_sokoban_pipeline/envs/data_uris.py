"""Pictures inside rows: PNG data URIs out, checked pictures in.

Nothing but a `data:` URI is ever read, and its size is known before a pixel is decoded, so a row can neither fetch
from the network, read a local file, nor unpack to gigabytes.
"""

from __future__ import annotations

import base64
import binascii

from PIL import Image

from geo_sokoban_pipeline.envs.pictures import decode_picture

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
    return decode_picture(data_uri_bytes(uri, max_bytes), max_pixels=max_pixels)


def data_uri_bytes(uri: str, max_bytes: int) -> bytes:
    """Bytes of a base64 data URI of any media type.

    Raises:
        ValueError: not base64, or more bytes than allowed, found before anything is decoded.
    """
    head, comma, body = uri.partition(",")
    if not comma or not head.endswith(";base64"):
        raise ValueError(f"picture {uri[:60]!r} is not base64 text; expected data:image/png;base64,…")
    return base64_bytes(body, max_bytes)


def base64_bytes(body: str, max_bytes: int) -> bytes:
    """Bytes of base64 text.

    Raises:
        ValueError: not base64, or more bytes than allowed, found before anything is decoded.
    """
    # Four characters hold three bytes, less one for each of at most two signs of padding.
    size = len(body) * 3 // 4 - body[-2:].count("=")
    if size > max_bytes:
        raise ValueError(f"picture has {size} bytes, more than limits.max_bytes={max_bytes}")
    try:
        return base64.b64decode(body, validate=True)
    except (binascii.Error, ValueError) as error:
        raise ValueError(f"picture is not valid base64: {error}") from error
