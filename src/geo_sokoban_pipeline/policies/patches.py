"""Image encoding: images become patches exactly as in the stock Qwen processor, cached by content.

Patches stay uint8 until the vision tower needs them: a quarter of the memory, and a still image has one frame instead
of `temporal_patch_size` copies. Normalised and copied, they equal the pixels of `Qwen2VLImageProcessorPil` up to float
rounding (tested).
"""

from __future__ import annotations

import hashlib
import io
import json
import re
import threading
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from cachetools import LRUCache
from PIL import Image
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil, smart_resize

from geo_sokoban_pipeline.envs.images import encode_png, read_data_uri
from geo_sokoban_pipeline.seeding import content_hash

# About 1,190 images of 96 × 96 pixels; an iteration of the default run needs 130 per process.
DEFAULT_CACHE_BYTES = 32 << 20
# The limits of the data options are stricter; these are for images that do not come from checked rows.
_MAX_IMAGE_BYTES = 64 << 20
_MAX_IMAGE_PIXELS = 1 << 26


# Keys of a preprocessor config: those that are followed, and those that change no pixel of an RGB image.
_READ = frozenset(
    {"size", "min_pixels", "max_pixels", "patch_size", "temporal_patch_size", "merge_size", "resample"}
    | {"do_rescale", "rescale_factor", "do_normalize", "image_mean", "image_std"}
)
_NEUTRAL = frozenset(
    {"do_resize", "do_convert_rgb", "crop_size", "pad_size", "default_to_square", "data_format", "input_data_format"}
    | {"device", "disable_grouping", "return_tensors", "processor_class", "image_processor_type", "use_fast"}
    | {"feature_extractor_type", "_processor_class", "_valid_processor_keys"}
    | {"transformers_version", "auto_map", "num_channels"}
)
_KINDS = re.compile(r"Qwen(?:2|2_5|3)_?VLImageProcessor(?:Fast|Pil)?")


@dataclass(frozen=True, eq=False)
class EncodedImage:
    """One image in the encoding of the policy.

    Attributes:
        key: content hash of the PNG; equal images share it.
        png: the image as stored in trajectories.
        patches: (t·h·w, 3·patch²) uint8, merge blocks together, each patch channel by channel.
        grid: (t, h, w) in patches.
    """

    key: str
    png: bytes
    patches: np.ndarray
    grid: tuple[int, int, int]

    def token_count(self, merge_size: int) -> int:
        """Language tokens of the image: t·h·w / merge²."""
        time, height, width = self.grid
        return time * height * width // merge_size**2


class PatchReader:
    """Encodes images, with a least-recently-used cache bounded in bytes; several threads may use it."""

    def __init__(self, processor: Qwen2VLImageProcessorPil, cache_bytes: int = DEFAULT_CACHE_BYTES) -> None:
        self.processor = processor
        self.patch_size = int(processor.patch_size)
        self.merge_size = int(processor.merge_size)
        self._cache: LRUCache[str, EncodedImage] = LRUCache(cache_bytes, getsizeof=_byte_count)
        self._alias: dict[str, str] = {}
        self._lock = threading.Lock()  # of both

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_lock"}  # a copy has one of its own

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _lock=threading.Lock())

    def read(self, image: Image.Image) -> EncodedImage:
        """Encode an image; its `content_key` replaces the hash of its pixels, unless it is None or missing."""
        content = getattr(image, "content_key", None) or _pixel_key(image)
        return self._find(content) or self._encode(content, image)

    def read_uri(self, uri: str) -> EncodedImage:
        """Encode an image of a prompt, given as a data URI; a known URI is not decoded again.

        Raises:
            ValueError: it cannot be decoded, or is too large.
        """
        content = f"uri:{content_hash(uri)}"
        return self._find(content) or self._encode(content, decode_image(uri))

    def _find(self, content: str) -> EncodedImage | None:
        with self._lock:
            return self._cache.get(self._alias.get(content, ""))

    def _encode(self, content: str, image: Image.Image) -> EncodedImage:
        pixels = _rgb_pixels(image)
        png = encode_png(pixels)
        with self._lock:
            self._drop_aliases()
            key = self._alias[content] = png_key(png)
            known = self._cache.get(key)
        return known or self._remember(EncodedImage(key, png, *self._cut(pixels)))

    def read_png(self, png: bytes) -> EncodedImage:
        """Encode a stored image; known file bytes are not decoded again."""
        key = png_key(png)
        with self._lock:
            known = self._cache.get(key)
        if known is not None:
            return known
        with Image.open(io.BytesIO(png)) as image:
            return self._remember(EncodedImage(key, png, *self._cut(_rgb_pixels(image))))

    def _remember(self, image: EncodedImage) -> EncodedImage:
        with self._lock, suppress(ValueError):  # larger than the whole cache
            self._cache[image.key] = image
        return image

    def _drop_aliases(self) -> None:
        """Drop the aliases of images that are no longer cached, once there are many."""
        most = 2 * len(self._cache)
        if len(self._alias) > most + 256:
            held = {content: key for content, key in self._alias.items() if key in self._cache}
            self._alias = held if len(held) <= most else {}

    def grid_of_png(self, png: bytes) -> tuple[int, int, int]:
        """(t, h, w) in patches that a stored image is cut into, from the size in its header."""
        height, width = self._resized(int.from_bytes(png[20:24], "big"), int.from_bytes(png[16:20], "big"))
        return (1, height // self.patch_size, width // self.patch_size)

    def _resized(self, height: int, width: int) -> tuple[int, int]:
        size = self.processor.size
        return smart_resize(
            height,
            width,
            factor=self.patch_size * self.merge_size,
            min_pixels=size["shortest_edge"],
            max_pixels=size["longest_edge"],
        )

    def _cut(self, pixels: np.ndarray) -> tuple[np.ndarray, tuple[int, int, int]]:
        height, width = self._resized(*pixels.shape[:2])
        if (height, width) != pixels.shape[:2]:
            resampling = Image.Resampling(int(self.processor.resample))
            pixels = np.asarray(Image.fromarray(pixels).resize((width, height), resampling))
        patch, merge = self.patch_size, self.merge_size
        rows, columns = height // patch, width // patch
        blocks = pixels.reshape(rows // merge, merge, patch, columns // merge, merge, patch, 3)
        patches = blocks.transpose(0, 3, 1, 4, 6, 2, 5).reshape(rows * columns, 3 * patch * patch)
        return np.ascontiguousarray(patches), (1, rows, columns)


def decode_image(uri: str) -> Image.Image:
    """Decode an image of a prompt, given as a data URI."""
    return read_data_uri(uri, max_bytes=_MAX_IMAGE_BYTES, max_pixels=_MAX_IMAGE_PIXELS)


def build_image_processor(
    min_pixels: int, max_pixels: int, patch_size: int = 16, merge_size: int = 2
) -> Qwen2VLImageProcessorPil:
    """Image processor with Qwen3-VL's values, all of them explicit: the class defaults are Qwen2-VL's."""
    return Qwen2VLImageProcessorPil(
        size={"shortest_edge": min_pixels, "longest_edge": max_pixels},
        patch_size=patch_size,
        temporal_patch_size=2,
        merge_size=merge_size,
        image_mean=[0.5, 0.5, 0.5],
        image_std=[0.5, 0.5, 0.5],
    )


def load_image_processor(folder: Path) -> Qwen2VLImageProcessorPil:
    """Image processor of a saved policy folder, without torchvision; a key that changes pixels is read or refused.

    Steps that are switched off become values that change nothing: scale 1, mean 0, standard deviation 1.

    Raises:
        FileNotFoundError: the folder has no file of an image processor.
        ValueError: another kind of image processor, a value that cannot be followed here, an unknown key, or a size of
            patches that is not the model's.
    """
    path, stored = _stored_processor(folder)
    # A step whose value is null is off, as the library takes it; other nulls are defaults.
    values: dict[str, Any] = {
        name: False if value is None else value
        for name, value in stored.items()
        if value is not None or name.startswith("do_")
    }
    kind = values.get("image_processor_type", values.get("feature_extractor_type", "Qwen2VLImageProcessor"))
    wrong = {name: value for name, value in values.items() if name not in _READ | _NEUTRAL and value is not False}
    if not values.get("do_resize", True):
        wrong["do_resize"] = values["do_resize"]
    if json.dumps(values.get("resample", 0)) not in map(str, range(6)):  # the library takes 3.0 for another filter
        wrong["resample"] = values["resample"]
    if not _KINDS.fullmatch(str(kind)):
        wrong = {"image_processor_type": kind}
    if wrong:
        listed = ", ".join(f"{name}={json.dumps(value)}" for name, value in wrong.items())
        raise ValueError(
            f"{path}: {listed}: images are prepared as Qwen2VLImageProcessor does, resized to whole patches and "
            "without a step beyond it, so these may give other pixels. Remove what the policy was not trained with."
        )
    for name in ("patch_size", "temporal_patch_size", "merge_size"):
        if not isinstance(values.get(name, 1), int):
            raise ValueError(f"{path}: {name}={json.dumps(values[name])}: a whole number is needed, such as 16.")
    processor = Qwen2VLImageProcessorPil(**{name: values[name] for name in _READ if name in values})
    if not (processor.size.shortest_edge and processor.size.longest_edge):
        raise ValueError(
            f"{path}: size={json.dumps(values['size'])}: give the least and most pixels of an image as "
            'size={"shortest_edge": …, "longest_edge": …}.'
        )
    if not processor.do_rescale:
        processor.rescale_factor = 1.0
    if not processor.do_normalize:
        processor.image_mean, processor.image_std = 0.0, 1.0
    for name in ("image_mean", "image_std"):
        if isinstance(value := getattr(processor, name), int | float):
            setattr(processor, name, (float(value),) * 3)
    _check_patches(processor, path)
    return processor


def _stored_processor(folder: Path) -> tuple[Path, dict[str, Any]]:
    """File and values of an image processor; as in the library, `processor_config.json` comes first if it holds one."""
    path = folder / "processor_config.json"
    if path.is_file() and (nested := json.loads(path.read_text(encoding="utf-8")).get("image_processor")):
        return path, nested
    path = folder / "preprocessor_config.json"
    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing: {folder} is no vision-language policy with an image processor.")
    return path, json.loads(path.read_text(encoding="utf-8"))


def _check_patches(processor: Qwen2VLImageProcessorPil, path: Path) -> None:
    """See that an image is cut as the model in the folder of a processor's file, if there is one, takes it."""
    model = path.with_name("config.json")
    vision = json.loads(model.read_text(encoding="utf-8")).get("vision_config", {}) if model.is_file() else {}
    for name, known in (("patch_size", "patch_size"), ("temporal_patch_size", "temporal_patch_size"),
                        ("merge_size", "spatial_merge_size")):  # fmt: skip
        own = int(getattr(processor, name))
        if vision.get(known, own) != own:
            raise ValueError(
                f"{path}: {name}={own}, but the model's {known} is {vision[known]}; take both files from one source."
            )


def _rgb_pixels(image: Image.Image) -> np.ndarray:
    """(height, width, 3) uint8."""
    return np.asarray(image if image.mode == "RGB" else image.convert("RGB"))


def png_key(png: bytes) -> str:
    """Content hash of an image's PNG bytes, its key everywhere."""
    return hashlib.blake2b(png, digest_size=16).hexdigest()


def _pixel_key(image: Image.Image) -> str:
    digest = hashlib.blake2b(image.tobytes(), digest_size=16)
    digest.update(f"{image.mode}{image.size}".encode())
    if image.mode == "P":
        digest.update(bytes(image.getpalette() or ()))
    return digest.hexdigest()


def _byte_count(image: EncodedImage) -> int:
    return image.patches.nbytes + len(image.png)
