"""Images of rows and boards: encoded as PNG, decoded from bytes and data URIs, and checked before a pixel is decoded.

Equal pixels give equal bytes, so equal hashes mean equal images. The PNG encoder is our own because
Pillow's takes nine times as long on small drawn images.
"""

from __future__ import annotations

import base64
import binascii
import io
import struct
import zlib
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import numpy as np
from PIL import ExifTags, Image, UnidentifiedImageError

from geo_sokoban_pipeline.formats import type_name

_SIGNATURE = b"\x89PNG\r\n\x1a\n"
_LEVEL = 3


def encode_png(pixels: np.ndarray) -> bytes:
    """PNG file of (height, width, 3) uint8 RGB pixels; equal pixels give equal bytes."""
    height, width, _ = pixels.shape
    rows = np.zeros((height, 1 + 3 * width), np.uint8)  # each row begins with its filter type, 0: none
    rows[:, 1:] = pixels.reshape(height, -1)
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    body = zlib.compress(rows.data, _LEVEL)
    return _SIGNATURE + _chunk(b"IHDR", header) + _chunk(b"IDAT", body) + _chunk(b"IEND", b"")


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


# Images from bytes: the size is checked before a pixel is decoded, and the result is RGB.


Transparency = Literal["white", "drop"]

# Errors of Pillow's decoders on damaged bytes, besides ValueError.
_DAMAGED = (OSError, EOFError, SyntaxError, IndexError, struct.error, zlib.error, Image.DecompressionBombError)
_FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")


def decode_image(
    raw: bytes, *, max_pixels: int, max_aspect: float | None = None, transparency: Transparency = "drop"
) -> Image.Image:
    """Image of an image file, in RGB and turned as its orientation tag says; of an animation the first frame.

    Args:
        raw: PNG, JPEG, WebP, GIF or BMP.
        max_pixels: width times height.
        max_aspect: longer side over shorter side; None: any.
        transparency: `white` lays an image with transparent parts on white, as a page shows it; `drop` takes the
            colours under them, as Pillow's `convert("RGB")` does.

    Raises:
        ValueError: too large, too long, or not readable.
    """
    try:
        # Opening reads the header only; the size is checked before pixels are unpacked.
        with Image.open(io.BytesIO(raw), formats=_FORMATS) as image:
            _check_size(*image.size, max_pixels, max_aspect)  # no turn changes pixels or aspect
            image.load()  # a PNG may hold its tag behind the pixels
            return _as_rgb(_upright(image), transparency)
    except UnidentifiedImageError as error:  # its own message has an address in memory
        raise ValueError(f"image cannot be decoded: none of {', '.join(_FORMATS)}") from error
    except _DAMAGED as error:
        raise ValueError(f"image cannot be decoded: {error}") from error


def _check_size(width: int, height: int, max_pixels: int, max_aspect: float | None) -> None:
    if width * height > max_pixels:
        raise ValueError(f"image has {width}×{height} pixels, more than limits.max_pixels={max_pixels}")
    if max_aspect is not None and max(width, height) > max_aspect * min(width, height):
        raise ValueError(f"image is {width}×{height}, longer than limits.max_aspect={max_aspect:g} allows")


_TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}


def _upright(image: Image.Image) -> Image.Image:
    try:
        turn = _TURNS.get(image.getexif().get(ExifTags.Base.Orientation, 1))
    except (*_DAMAGED, ValueError, TypeError):  # damaged tags: viewers show the pixels as they are
        return image
    return image if turn is None else image.transpose(turn)


def _as_rgb(image: Image.Image, transparency: Transparency) -> Image.Image:
    if image.mode.startswith("I"):
        # 16-bit grey: Pillow would cut values off at 255 instead of scaling them.
        return Image.fromarray((np.asarray(image, np.uint32) >> 8).astype(np.uint8)).convert("RGB")
    if transparency == "white" and image.has_transparency_data:
        layer = image.convert("RGBA")
        page = Image.new("RGBA", layer.size, "white")
        page.alpha_composite(layer)
        return page.convert("RGB")
    return image.convert("RGB")


# Images in rows: data URIs.


PNG_PREFIX = "data:image/png;base64,"


def png_data_uri(png: bytes) -> str:
    """Data URI of PNG bytes."""
    return PNG_PREFIX + base64.b64encode(png).decode("ascii")


def is_data_uri(text: str) -> bool:
    """Whether a text begins as a data URI, whose scheme may have capitals."""
    return text[:5].lower() == "data:"


def read_data_uri(uri: object, *, max_bytes: int, max_pixels: int) -> Image.Image:
    """Image of a base64 data URI, in RGB.

    Args:
        uri: any media type is accepted; published rows have `image/None`.
        max_bytes: of the encoded image.
        max_pixels: width times height.

    Raises:
        ValueError: not a data URI (remote or local), not base64, too large, or not readable.
    """
    if not isinstance(uri, str):
        raise ValueError(f"image is {type_name(uri)}; only data: URIs are read")
    if not is_data_uri(uri):
        raise ValueError(f"image {uri[:60]!r} is not a data: URI; remote and local images are not read")
    return decode_image(data_uri_bytes(uri, max_bytes), max_pixels=max_pixels)


def data_uri_bytes(uri: str, max_bytes: int) -> bytes:
    """Bytes of a base64 data URI of any media type.

    Raises:
        ValueError: not base64, or more bytes than allowed, found before anything is decoded.
    """
    head, comma, body = uri.partition(",")
    if not comma or not head.lower().endswith(";base64"):
        raise ValueError(f"image {uri[:60]!r} is not base64 text; expected data:image/png;base64,…")
    return base64_bytes(body, max_bytes)


def base64_bytes(body: str, max_bytes: int) -> bytes:
    """Bytes of base64 text, in either alphabet, with or without line ends and padding.

    Raises:
        ValueError: not base64, or more bytes than allowed, found before anything is decoded.
    """
    body = "".join(body.split()).replace("-", "+").replace("_", "/").rstrip("=")
    size = len(body) * 3 // 4
    if size > max_bytes:
        raise ValueError(f"image has {size} bytes, more than limits.max_bytes={max_bytes}")
    try:
        return base64.b64decode(body + "=" * (-len(body) % 4), validate=True)
    except (binascii.Error, ValueError) as error:
        raise ValueError(f"image is not valid base64: {error}") from error


# Parts of an image, which an occlusion map covers one at a time.


@dataclass(frozen=True)
class ImagePart:
    """A rectangle of an image, in pixels.

    Attributes:
        content: what it shows, as a word; None: it is not known.
    """

    left: int
    top: int
    width: int
    height: int
    content: str | None = None


_PARTS_PER_SIDE, _SMALLEST_PART = 8, 16


def grid_parts(png: bytes) -> list[ImagePart]:
    """A grid over an image: up to 8 × 8 parts, each at least 16 pixels wide and high, or the image as a whole."""
    width, height = (int.from_bytes(png[at : at + 4], "big") for at in (16, 20))
    columns, rows = (_edges(side) for side in (width, height))
    return [
        ImagePart(left, top, right - left, bottom - top)
        for top, bottom in pairwise(rows)
        for left, right in pairwise(columns)
    ]


def _edges(side: int) -> list[int]:
    count = max(1, min(_PARTS_PER_SIDE, side // _SMALLEST_PART))
    return [round(side * number / count) for number in range(count + 1)]
