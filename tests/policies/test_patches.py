"""Images: the stock processor's patches, one decoding per content, memory bounded."""

from __future__ import annotations

import io
import json
import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from geo_sokoban_pipeline.envs.images import encode_png, png_data_uri
from geo_sokoban_pipeline.envs.sokoban import Board
from geo_sokoban_pipeline.envs.sokoban.drawing import render, render_observation
from geo_sokoban_pipeline.policies import patches
from geo_sokoban_pipeline.policies.patches import PatchReader, build_image_processor, decode_image, load_image_processor
from geo_sokoban_pipeline.policies.policy import processor_values
from stock_pixels import pixel_values


def noise(width: int, height: int, mode: str = "RGB", seed: int = 0) -> Image.Image:
    pixels = np.random.default_rng([seed, width, height]).integers(0, 256, (height, width, 4), np.uint8)
    return Image.fromarray(pixels, "RGBA").convert(mode)


def compare(processor, image: Image.Image) -> None:
    reader = PatchReader(processor)
    encoded = reader.read(image)
    expected = processor(images=[image.convert("RGB")], return_tensors="np")
    assert encoded.grid == tuple(expected["image_grid_thw"][0])
    np.testing.assert_allclose(pixel_values(reader, [encoded]), expected["pixel_values"], atol=1e-6)
    assert encoded.token_count(2) * 4 == len(encoded.patches)


# 96×96 passes unchanged, the small ones are enlarged, the large ones reduced.
@pytest.mark.parametrize("size", [(96, 96), (64, 32), (16, 16), (1, 1), (33, 31), (100, 250), (40, 700), (500, 500)])
def test_equals_the_stock_processor(size):
    processor = build_image_processor(min_pixels=64 * 64, max_pixels=256 * 256)
    for mode in ("RGB", "L", "RGBA", "P", "LA", "1"):
        compare(processor, noise(*size, mode))


@given(width=st.integers(8, 160), height=st.integers(8, 160), least=st.sampled_from([1024, 16_384]))
@settings(max_examples=25, deadline=None)
def test_equals_the_stock_processor_at_any_size(width, height, least):
    compare(build_image_processor(least, 100 * 100), noise(width, height))


QWEN = {"size": {"shortest_edge": 1024, "longest_edge": 10_000}, "patch_size": 16, "merge_size": 2,
        "temporal_patch_size": 2, "image_mean": [0.5] * 3, "image_std": [0.5] * 3}  # fmt: skip


def processor_folder(folder, **changes):
    (folder / "preprocessor_config.json").write_text(json.dumps(QWEN | changes))
    return folder


@pytest.mark.parametrize(
    "changes",
    [
        *({"resample": number} for number in range(6)),
        {"rescale_factor": 0.01},
        {"do_rescale": False},
        {"do_rescale": None},
        {"do_normalize": None, "transformers_version": "5.0.0", "auto_map": {}, "num_channels": 3},
        {"do_normalize": False},
        {"do_rescale": False, "do_normalize": False, "resample": 0},
        {"image_mean": 0.3, "image_std": 2},
        {"image_mean": [0.1, 0.2, 0.3], "image_std": [0.4, 0.5, 0.6], "do_convert_rgb": False},
        {"patch_size": 14, "merge_size": 1},
        {"min_pixels": 4096, "max_pixels": 8192},
        {"do_pad": False, "do_center_crop": None, "crop_size": {"height": 9, "width": 9}, "device": None},
        {"image_processor_type": "Qwen2VLImageProcessorFast", "processor_class": "Qwen3VLProcessor"},
    ],
    ids=str,
)
def test_a_processor_that_is_read_gives_the_pixels_of_the_library(tmp_path, changes):
    """Also after it is saved with a policy and read again, and from the file in which newer versions keep it."""
    stock = Qwen2VLImageProcessorPil.from_pretrained(processor_folder(tmp_path, **changes))
    read = load_image_processor(tmp_path)
    nested = tmp_path / "nested"
    nested.mkdir()
    (nested / "processor_config.json").write_text(
        json.dumps({"image_processor": QWEN | changes, "video_processor": {}})
    )
    processor_folder(nested, resample=0, rescale_factor=0.5)  # the library does not look at this one
    assert Qwen2VLImageProcessorPil.from_pretrained(nested).to_dict() == stock.to_dict()
    saved = tmp_path / "saved"
    saved.mkdir()
    (saved / "preprocessor_config.json").write_text(json.dumps(processor_values(read)))
    image = noise(150, 40)
    expected = stock(images=[image], return_tensors="np")
    for processor in (read, load_image_processor(saved), load_image_processor(nested)):
        reader = PatchReader(processor)
        encoded = reader.read(image)
        assert encoded.grid == tuple(expected["image_grid_thw"][0])
        np.testing.assert_allclose(pixel_values(reader, [encoded]), expected["pixel_values"], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"do_resize": False}, "do_resize=false: images are prepared as"),
        ({"do_resize": None}, "do_resize=false: images"),
        ({"patch_size": {"height": 16, "width": 16}}, 'patch_size={"height": 16, "width": 16}: a whole number'),
        ({"do_center_crop": True}, "do_center_crop=true"),
        ({"do_pad": True, "pad_size": {"height": 9, "width": 9}}, "do_pad=true: images"),
        ({"resample": 9}, "resample=9"),
        ({"resample": 12}, "resample=12"),
        ({"resample": 3.0}, r"resample=3\.0"),
        ({"do_flip": "vertical"}, 'do_flip="vertical"'),
        ({"image_processor_type": "CLIPImageProcessor"}, 'image_processor_type="CLIPImageProcessor"'),
        ({"image_processor_type": 3}, "image_processor_type=3"),
        ({"size": 448}, "size=448: give the least and most pixels"),
        ({"size": {"height": 448, "width": 448}}, "give the least and most pixels"),
    ],
    ids=str,
)
def test_a_processor_that_would_give_other_pixels_is_refused(tmp_path, changes, message):
    with pytest.raises(ValueError, match=message):
        load_image_processor(processor_folder(tmp_path, **changes))


@pytest.mark.parametrize(
    ("name", "model"),
    [
        ("patch_size", "patch_size"),
        ("temporal_patch_size", "temporal_patch_size"),
        ("merge_size", "spatial_merge_size"),
    ],
)
def test_patches_of_another_size_than_the_models_are_refused(tmp_path, name, model):
    (tmp_path / "config.json").write_text(json.dumps({"vision_config": {model: QWEN[name]}}))
    assert getattr(load_image_processor(processor_folder(tmp_path)), name) == QWEN[name]
    with pytest.raises(ValueError, match=f"{name}=1, but the model's {model} is {QWEN[name]}"):
        load_image_processor(processor_folder(tmp_path, **{name: 1}))


@pytest.fixture
def reader():
    return PatchReader(build_image_processor(1024, 1 << 20))


@pytest.fixture
def encoded(monkeypatch):
    """Images that were encoded."""
    found = []
    monkeypatch.setattr(patches, "encode_png", lambda pixels: found.append(pixels) or encode_png(pixels))
    return found


def test_equal_images_are_read_once(reader, encoded, monkeypatch):
    """Those of prompts by their text, too; and what the reader holds of one is what it holds of the image itself."""
    first = reader.read(noise(64, 64))
    assert reader.read(noise(64, 64)) is first is reader.read_png(first.png)
    assert len(encoded) == 1
    uri, other = (png_data_uri(encode_png(np.asarray(noise(64, 64, seed=seed)))) for seed in (0, 1))
    decoded = []
    monkeypatch.setattr(patches, "decode_image", lambda source: decoded.append(source) or decode_image(source))
    assert reader.read_uri(uri) is first is reader.read_uri(uri)
    assert decoded == [uri]
    assert reader.read_uri(other) is reader.read(noise(64, 64, seed=1)) is not first


def test_live_and_stored_images_are_one(reader):
    board = Board.from_text("#####\n#@$.#\n#####")
    others = [PatchReader(build_image_processor(1024, 1 << 20)) for _ in range(2)]
    shown = reader.read(render_observation(board, 16))
    for other in (others[0].read(render(board, 16)), others[1].read_png(shown.png)):
        assert (other.key, other.grid) == (shown.key, shown.grid)
        np.testing.assert_array_equal(other.patches, shown.patches)
    assert Image.open(io.BytesIO(shown.png)).size == (80, 48)
    assert reader.read(render(board, 16)) is shown, "found by its pixels too"


@given(st.lists(st.integers(0, 5), max_size=30))
@settings(max_examples=20, deadline=None)
def test_the_cache_is_bounded_and_keeps_what_was_used_last(order):
    processor = build_image_processor(1024, 1 << 20)
    one = PatchReader(processor).read(noise(32, 32))
    bound = 3 * (one.patches.nbytes + len(one.png)) + 64
    reader = PatchReader(processor, cache_bytes=bound)
    held = {}  # by seed, the least recently used first
    for seed in order:
        image = noise(32, 32, seed=seed)
        found = reader.read(image)
        assert (found is held[seed]) if seed in held else not any(found is other for other in held.values())
        assert found.key == PatchReader(processor).read(image).key
        held.pop(seed, None)
        held[seed] = found
        while sum(image.patches.nbytes + len(image.png) for image in held.values()) > bound:
            held.pop(next(iter(held)))
        assert reader.read(noise(32, 32, seed=seed)) is found


def test_images_that_are_held_are_found_by_their_content_keys(reader, encoded):
    """However many have come and gone: looking one up costs no file."""
    one = reader.read(noise(32, 32))
    small = PatchReader(build_image_processor(1024, 1 << 20), cache_bytes=4 * (one.patches.nbytes + len(one.png)) + 64)
    favourite = noise(32, 32)
    favourite.content_key = "favourite"
    first = small.read(favourite)
    encoded.clear()
    for seed in range(1, 300):
        other = noise(32, 32, seed=seed)
        other.content_key = f"other {seed}"
        small.read(other)
        assert small.read(favourite) is first
    assert len(encoded) == 299


@pytest.mark.parametrize("images", [1, 540])
def test_content_keys_are_forgotten_again(reader, images):
    """Of one image, and of images that are no longer cached. Each key takes 10 kB here."""
    one = reader.read(noise(32, 32))
    small = PatchReader(build_image_processor(1024, 1 << 20), cache_bytes=4 * (one.patches.nbytes + len(one.png)))
    tracemalloc.start()
    try:
        for number in range(540):
            image = noise(32, 32, seed=number % images)
            image.content_key = f"{number:010000}"
            assert small.read(image).grid == (1, 2, 2)
        assert tracemalloc.get_traced_memory()[0] < 4_000_000
    finally:
        tracemalloc.stop()


def test_one_image_larger_than_the_cache_is_still_read():
    reader = PatchReader(build_image_processor(1024, 1 << 20), cache_bytes=10)
    assert reader.read(noise(64, 64)).grid == (1, 4, 4)


def test_what_is_drawn_on_a_held_image_is_encoded(reader):
    board = Board.from_text("#####\n#@$.#\n#####")
    first = reader.read(render_observation(board, 32))
    drawn = render_observation(board, 32)
    try:
        drawn.putpixel((1, 1), (1, 2, 3))
        assert reader.read(drawn).key != first.key
    finally:
        drawn.putpixel((1, 1), render(board, 32).getpixel((1, 1)))
