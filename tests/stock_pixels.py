"""Pixels as the library's own model takes them, computed from the patches of our reader."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from geo_sokoban_pipeline.policies.patches import EncodedImage, PatchReader


def pixel_values(reader: PatchReader, images: Sequence[EncodedImage]) -> np.ndarray:
    """(t·h·w, 3·temporal·patch²) float32 of some images, as `pixel_values` of the stock processor."""
    processor = reader.processor
    mean = np.asarray(processor.image_mean, np.float32).reshape(1, 3, 1, 1)
    std = np.asarray(processor.image_std, np.float32).reshape(1, 3, 1, 1)
    patches = np.concatenate([image.patches for image in images]).astype(np.float32)
    planes = patches.reshape(-1, 3, 1, int(processor.patch_size) ** 2) * np.float32(processor.rescale_factor)
    return np.repeat((planes - mean) / std, int(processor.temporal_patch_size), axis=2).reshape(len(patches), -1)
