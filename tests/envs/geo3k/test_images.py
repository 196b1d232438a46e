"""Images of rows: every form and mode becomes the same RGB; what is remote, huge or broken is refused."""

from __future__ import annotations

import base64
import io
import struct
import zlib

import numpy as np
import pytest
from PIL import ExifTags, Image, ImageOps

from geo_sokoban_pipeline.envs.geo3k.data import image_hash, image_uri, read_images
from geo_sokoban_pipeline.envs.images import data_uri_bytes, png_data_uri, read_data_uri
from problem_rows import drawing, image_file, options, raw_of, uri

PNG = image_file(drawing())
PIXELS = np.asarray(drawing())


def read(image, **changes):
    return read_images(raw_of({"images": [image], "problem": "x", "answer": "1"})["images"], options(**changes))[0]


@pytest.mark.parametrize(
    "raw",
    [
        PNG,
        {"bytes": PNG, "path": None},
        {"bytes": PNG, "path": "images/1.png"},
        {"bytes": None, "path": uri(PNG)},
        uri(PNG),
        uri(PNG, "image/None"),
        uri(PNG, "image/jpeg"),
        uri(PNG, "application/octet-stream"),
        uri(PNG, ""),
        uri(PNG, "image/png;charset=utf-8"),
        base64.b64encode(PNG).decode(),
        base64.encodebytes(PNG).decode(),
        base64.urlsafe_b64encode(PNG).decode(),
        uri(PNG).replace("data:image/png", "DATA:image/PNG"),
        "data:image/png;base64,\n" + base64.encodebytes(PNG).decode().replace("\n", "\r\n"),
        "data:image/png;base64," + base64.urlsafe_b64encode(PNG).decode(),
    ],
    ids=str,
)
def test_forms(raw):
    image = read(raw)
    assert image.mode == "RGB"
    assert np.array_equal(np.asarray(image), PIXELS)


FLAT, GREY = Image.new("RGB", (40, 30), (200, 10, 60)), Image.new("L", (40, 30), 128)
SIXTEEN = Image.fromarray(np.full((30, 40), 128 << 8, np.uint16))


@pytest.mark.parametrize(
    ("image", "kind", "colour", "tolerance"),
    [
        (FLAT, "PNG", (200, 10, 60), 0),
        (FLAT.convert("RGBA"), "PNG", (200, 10, 60), 0),
        (FLAT.convert("P", palette=Image.Palette.ADAPTIVE), "PNG", (200, 10, 60), 0),
        (FLAT, "BMP", (200, 10, 60), 0),
        (FLAT.convert("P", palette=Image.Palette.ADAPTIVE), "GIF", (200, 10, 60), 0),
        (FLAT, "JPEG", (200, 10, 60), 3),
        (FLAT.convert("CMYK"), "JPEG", (200, 10, 60), 6),
        (FLAT, "WEBP", (200, 10, 60), 6),
        (GREY, "PNG", (128, 128, 128), 0),
        (Image.new("1", (40, 30), 1), "PNG", (255, 255, 255), 0),
        (GREY.convert("LA"), "PNG", (128, 128, 128), 0),
        (SIXTEEN, "PNG", (128, 128, 128), 0),
    ],
    ids=["rgb", "rgba", "palette", "bmp", "gif", "jpeg", "cmyk", "webp", "grey", "bits", "grey and alpha", "16 bits"],
)
def test_modes_and_formats(image, kind, colour, tolerance):
    found = np.asarray(read(image_file(image, kind)), int)
    assert found.shape == (30, 40, 3)
    assert np.abs(found - np.array(colour)).max() <= tolerance


STEPS = Image.fromarray(np.kron(np.arange(0, 240, 16).reshape(3, 5), np.ones((16, 16))).astype(np.uint8)).convert("RGB")


@pytest.mark.parametrize(("kind", "tolerance"), [("PNG", 0), ("JPEG", 12), ("WEBP", 12)])
@pytest.mark.parametrize("tag", range(1, 9))
def test_orientation_tags_are_applied(kind, tolerance, tag):
    """A file whose pixels lie, with the tag that turns them, is the upright image: in rows and in prompts."""
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = tag
    lying = next(
        turned
        for turned in [STEPS, *(STEPS.transpose(turn) for turn in Image.Transpose)]
        if np.array_equal(
            np.asarray(ImageOps.exif_transpose(Image.open(io.BytesIO(image_file(turned, exif=exif))))),
            np.asarray(STEPS),
        )
    )
    raw = image_file(lying, kind, exif=exif)
    prompt = read_data_uri(uri(raw), max_bytes=1 << 20, max_pixels=1 << 20)
    for found in (read(raw), prompt):
        assert found.size == STEPS.size
        assert np.abs(np.asarray(found, int) - np.asarray(STEPS, int)).max() <= tolerance
    if kind == "PNG":
        assert image_hash(read(raw)) == image_hash(read(image_file(STEPS)))
        with pytest.raises(ValueError, match="more than limits.max_pixels=3839"):
            read(raw, limits={"max_pixels": 48 * 80 - 1})


@pytest.mark.parametrize("exif", [b"Exif\0\0no tags", b"Exif\0\0MM\0*\0\0\0\x08\xff\xff"])
@pytest.mark.filterwarnings("ignore:.*EXIF")
def test_damaged_tags_leave_the_pixels(exif):
    assert image_hash(read(image_file(STEPS, exif=exif))) == image_hash(STEPS)


def test_transparent_parts():
    layer = Image.new("RGBA", (3, 1), (0, 0, 0, 0))
    layer.putpixel((1, 0), (200, 0, 0, 255))
    layer.putpixel((2, 0), (0, 0, 0, 127))
    raw = image_file(layer)
    assert np.asarray(read(raw)).tolist() == [[[255, 255, 255], [200, 0, 0], [128, 128, 128]]]
    assert np.asarray(read(raw, transparency="drop")).tolist() == [[[0, 0, 0], [200, 0, 0], [0, 0, 0]]]


def png_of_size(width, height):
    """A PNG whose header promises pixels that its body has not."""

    def chunk(kind, data):
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"\0" * 9)) + chunk(b"IEND", b"")
    )


def text_bomb():
    body = zlib.compress(b"\0" * (80 << 20))
    return PNG[:33] + struct.pack(">I", len(body) + 8) + b"zTXtbomb\0\0\0\0" + body + struct.pack(">I", 0) + PNG[33:]


@pytest.mark.parametrize(
    ("image", "reason"),
    [
        (png_of_size(6000, 6000), r"6000×6000 pixels, more than limits\.max_pixels=16777216"),
        (uri(png_of_size(6000, 6000)), "6000×6000 pixels"),
        (png_of_size(60_000, 60_000), "decompression bomb"),
        (png_of_size(2010, 10), r"2010×10, longer than limits\.max_aspect=200"),
        pytest.param(b"\0" * 9_000_000, r"9000000 bytes, more than limits\.max_bytes=8388608", id="9 MB"),
        pytest.param("data:image/png;base64," + "A" * 12_000_000, "9000000 bytes", id="12 MB of base64"),
        pytest.param(text_bomb(), "cannot be decoded|Decompressed data too large", id="a bomb in a text chunk"),
        (PNG[:60], "cannot be decoded"),
        (b"GIF89a", "cannot be decoded"),
        (b"not an image", "cannot be decoded: none of PNG, JPEG, WEBP, GIF, BMP"),
        (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "cannot be decoded"),
        ("https://example.com/a.png", "is remote"),
        ("file:///etc/passwd", "is remote"),
        ("s3://bucket/a.png", "is remote"),
        ("/etc/passwd", "is a path; set image_folder"),
        ("images/1.png", "is a path"),
        ("data:image/png,rawtext", "is not base64"),
        ("data:image/png;base64,@@@", "is not valid base64"),
    ],
    ids=str,
)
def test_refused(image, reason):
    with pytest.raises(ValueError, match=reason):
        read(image)


@pytest.mark.parametrize("size", range(1, 8))
def test_the_limit_of_bytes_holds_to_the_byte(size):
    text = png_data_uri(bytes(size))
    assert data_uri_bytes(text, size) == bytes(size)
    with pytest.raises(ValueError, match=f"image has {size} bytes, more than limits.max_bytes={size - 1}"):
        data_uri_bytes(text, size - 1)


def test_files_below_the_allowed_folder(tmp_path):
    folder = tmp_path / "pictures"
    (folder / "sub").mkdir(parents=True)
    (folder / "sub" / "a.png").write_bytes(PNG)
    (tmp_path / "secret.png").write_bytes(PNG)
    (folder / "link.png").symlink_to(tmp_path / "secret.png")
    allowed = {"image_folder": str(folder)}
    assert np.array_equal(np.asarray(read("sub/a.png", **allowed)), PIXELS)
    assert np.array_equal(np.asarray(read(str(folder / "sub" / "a.png"), **allowed)), PIXELS)
    for name in ("../secret.png", "link.png", str(tmp_path / "secret.png")):
        with pytest.raises(ValueError, match="lies outside image_folder"):
            read(name, **allowed)
    with pytest.raises(ValueError, match="cannot be read: No such file"):
        read("sub/b.png", **allowed)
    with pytest.raises(ValueError, match=r"more than limits\.max_bytes=100"):
        read("sub/a.png", **allowed, limits={"max_bytes": 100})


def test_equal_pixels_equal_uris():
    files = [image_file(drawing(), "PNG", compress_level=level) for level in (1, 9)]
    files += [image_file(drawing().convert("RGBA")), image_file(drawing(), "BMP")]
    images = [read(raw) for raw in files]
    assert len(set(files)) == 4
    assert len({image_uri(image) for image in images}) == len({image_hash(image) for image in images}) == 1
    again = read_data_uri(image_uri(images[0]), max_bytes=1 << 20, max_pixels=1 << 20)
    assert image_uri(again) == image_uri(images[0])
    assert Image.open(io.BytesIO(base64.b64decode(image_uri(again).split(",")[1]))).mode == "RGB"
    turned = drawing(0).transpose(Image.Transpose.ROTATE_180)
    reshaped = Image.frombytes("RGB", (30, 40), drawing(0).tobytes())
    assert len({image_hash(image) for image in (drawing(0), drawing(1), turned, reshaped)}) == 4
    with pytest.raises(ValueError, match=r"3 images, more than limits\.max_images=2"):
        read_images([{"bytes": PNG, "path": None}] * 3, options(limits={"max_images": 2}))
