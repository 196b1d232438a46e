"""Feature bank: rows of an image stay findable while the tables grow."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from geo_sokoban_pipeline.policies.qwen3_vl import ImageFeatures
from geo_sokoban_pipeline.rollout.engines.transformers import FeatureBank


def features(names, counts):
    offsets, tables, total = {}, [], 0
    for name, count in zip(names, counts, strict=True):
        offsets[name], total = total, total + count
        tables.append(torch.full((count, 2), float(hash(name) % 997)))
    table = torch.cat(tables)
    return ImageFeatures([table, table + 1], offsets, dict(zip(names, counts, strict=True)))


@given(st.lists(st.lists(st.integers(1, 5), min_size=1, max_size=4), min_size=1, max_size=6))
@settings(max_examples=40, deadline=None)
def test_every_image_keeps_its_rows(batches):
    bank, sizes = FeatureBank(), {}
    for number, counts in enumerate(batches):
        names = [f"{number}/{index}" for index in range(len(counts))]
        bank.add(features(names, counts))
        sizes |= dict(zip(names, counts, strict=True))
        for name, count in sizes.items():
            rows = bank.rows([name])
            assert name in bank and len(rows) == count
            expected = torch.full((count, 2), float(hash(name) % 997))
            assert torch.equal(bank.tables[0][rows], expected)
            assert torch.equal(bank.tables[1][rows], expected + 1)
    order = list(sizes)[::-1]
    assert bank.rows(order).tolist() == [row for name in order for row in bank.rows([name])]
    assert "other" not in bank and len(bank.rows([])) == 0
