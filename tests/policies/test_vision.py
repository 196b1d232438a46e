"""Vision tower: our order of the work gives the library's numbers."""

from __future__ import annotations

import pytest
import torch

from geo_sokoban_pipeline.policies import qwen3_vl
from policies.library import read_noise
from stock_pixels import pixel_values


@torch.no_grad()
def library_features(policy, image):
    pixels = torch.from_numpy(pixel_values(policy.reader, [image]))
    return policy.model.model.visual(pixels, grid_thw=torch.tensor([image.grid]))


@pytest.mark.parametrize("batch_patches", [16_384, 40, 1])
def test_image_features_equal_the_library(policy, monkeypatch, batch_patches):
    monkeypatch.setattr(qwen3_vl, "VISION_BATCH_PATCHES", batch_patches)
    images = read_noise(policy)
    with torch.no_grad():
        features = policy.network.encode(images)
    assert len(features.tables[0]) == sum(image.token_count(2) for image in images)
    for image in images:
        expected = library_features(policy, image)
        rows = features.rows([image.key])
        # 1e-5: sums of 768 products in another order, in float32.
        torch.testing.assert_close(features.tables[0][rows], expected.pooler_output, atol=1e-5, rtol=1e-5)
        assert len(features.tables[1:]) == len(expected.deepstack_features)
        for ours, theirs in zip(features.tables[1:], expected.deepstack_features, strict=True):
            torch.testing.assert_close(ours[rows], theirs, atol=1e-5, rtol=1e-5)


def test_rows_of_several_images_follow_the_order_asked(tiny_policy):
    images = read_noise(tiny_policy, [(96, 96), (32, 32)])
    with torch.no_grad():
        features = tiny_policy.network.encode(images)
    assert features.rows([images[1].key, images[0].key, images[1].key]).tolist() == [9, *range(9), 9]
    assert len(features.rows([])) == 0


def test_gradients_reach_the_vision_tower(deep_policy):
    images = read_noise(deep_policy, [(64, 64)])
    features = deep_policy.network.encode(images)
    sum(table.sum() for table in features.tables).backward()
    missing = [n for n, p in deep_policy.model.model.visual.named_parameters() if p.grad is None]
    deep_policy.model.zero_grad(set_to_none=True)
    assert not missing
