"""Positions: the library's M-RoPE index, computed piece by piece."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from geo_sokoban_pipeline.policies.qwen3_vl import extend_positions

PAD, MERGE = 12, 2

pieces = st.lists(
    st.one_of(
        st.integers(0, 6).map(lambda count: ("text", count)),
        st.tuples(st.integers(1, 4), st.integers(1, 4)).map(lambda size: ("image", size)),
    ),
    min_size=1,
    max_size=8,
)


def build(parts):
    """Token ids and grids of a conversation; images stand between single tokens, as vision marks do."""
    ids, grids = [], []
    for kind, value in parts:
        if kind == "text":
            ids += [1] * value
        else:
            rows, columns = value
            ids += [2, *[PAD] * (rows * columns), 3]
            grids.append((1, rows * MERGE, columns * MERGE))
    return np.array(ids, np.int32), grids


@given(parts=pieces)
@settings(max_examples=80, deadline=None)
def test_equals_the_library(tiny_policy, parts):
    ids, grids = build([("text", 1), *parts])
    tensor = torch.from_numpy(ids.astype(np.int64))[None]
    expected, delta = tiny_policy.model.model.get_rope_index(
        input_ids=tensor,
        mm_token_type_ids=(tensor == PAD).int(),
        image_grid_thw=torch.tensor(grids) if grids else None,
        attention_mask=torch.ones_like(tensor),
    )
    positions, following = extend_positions(ids, grids, PAD, MERGE)
    np.testing.assert_array_equal(positions, expected[:, 0].numpy())
    assert following == int(delta) + len(ids)


@given(turns=st.lists(pieces, min_size=1, max_size=5))
@settings(max_examples=80, deadline=None)
def test_piece_by_piece_equals_the_whole(turns):
    whole_ids, whole_grids = build([part for turn in turns for part in turn])
    whole, end = extend_positions(whole_ids, whole_grids, PAD, MERGE)
    start, parts = 0, []
    for turn in turns:
        part, start = extend_positions(*build(turn), PAD, MERGE, start)
        parts.append(part)
    np.testing.assert_array_equal(np.concatenate(parts, axis=1), whole)
    assert start == end


@pytest.mark.parametrize(
    ("ids", "grids"), [([1, PAD], []), ([1, 2], [(1, 2, 2)]), ([PAD], [(1, 2, 4)]), ([PAD, PAD], [(1, 2, 2)])]
)
def test_pads_must_match_the_grids(ids, grids):
    with pytest.raises(ValueError, match="image-pad tokens, but the grids"):
        extend_positions(np.array(ids), grids, PAD, MERGE)


def test_an_image_after_text():
    ids = np.array([1, 1, PAD, PAD, PAD, PAD, PAD, PAD, 1])
    positions, following = extend_positions(ids, [(1, 4, 6)], PAD, MERGE, start=10)
    assert positions.tolist() == [
        [10, 11, 12, 12, 12, 12, 12, 12, 15],
        [10, 11, 12, 12, 12, 13, 13, 13, 15],
        [10, 11, 12, 13, 14, 12, 13, 14, 15],
    ]
    assert following == 16
