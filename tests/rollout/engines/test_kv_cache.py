"""KV cache: rows move, grow and are re-used, and each keeps exactly its own tokens."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from geo_sokoban_pipeline.rollout.engines.transformers import SlotKvCache

LAYERS, HEADS, DIM, ROWS = 2, 2, 3, 4


def block(values):
    """(B, heads, L, dim) tensor whose entries tell batch row and token apart."""
    tokens = torch.tensor(values, dtype=torch.float)
    return tokens[:, None, :, None] + torch.arange(HEADS)[None, :, None, None] / 4 + torch.arange(DIM) / 16


def store_fresh(cache, rows, tokens):
    cache.begin_fresh(torch.tensor(rows))
    for layer in range(LAYERS):
        cache.update(block(tokens), -block(tokens), layer)


def held(cache, row):
    """Tokens that attention sees before a new one of a row, the same in all layers, heads and in keys and values."""
    length = int(cache.lengths[row])
    cache.begin(1, 1, row)
    seen = [cache.update(block([[0]]), -block([[0]]), layer) for layer in range(LAYERS)]
    tokens = seen[0][0][0, 0, :length, 0].tolist()
    for keys, values in seen:
        assert torch.equal(keys[0, :, :length], block([tokens])[0])
        assert torch.equal(values[0, :, :length], -block([tokens])[0])
    return tokens


def test_masks():
    cache = SlotKvCache(ROWS)
    store_fresh(cache, [[0], [1]], [[1, 2], [3, 4]])
    cache.lengths[:2] = 2
    assert cache.begin(2, 1) is None, "one token after equal pasts sees everything"
    assert cache.begin(2, 2).tolist() == [[[[True, True, True, False], [True] * 4]]]
    cache.lengths[1] = 1
    mask = cache.begin(2, 2)
    assert mask.shape == (2, 1, 2, 4)
    assert mask[:, 0].sum(-1).tolist() == [[3, 4], [2, 3]]


def test_memory_grows_with_use_alone():
    cache = SlotKvCache(rows=512)
    store_fresh(cache, [[0], [1]], [[1, 2], [3, 4]])
    assert (cache.allocated_rows, cache.capacity) == (2, 2)
    cache.lengths[:2] = 2
    cache.begin(2, 1)
    assert (cache.allocated_rows, cache.capacity) == (2, 3)
    store_fresh(cache, [[7]], [[5]])
    assert (cache.allocated_rows, cache.capacity) == (8, 3)
    assert [held(cache, row) for row in (0, 1)] == [[1, 2], [3, 4]]
    # Also where nothing was stored: attention multiplies masked positions by zero.
    cache.lengths[0] = 2
    cache.begin(8, 1)
    for layer in range(LAYERS):
        buffers = cache.update(block([[0]] * 8), -block([[0]] * 8), layer)
        assert all(buffer.shape[2] == cache.capacity and torch.isfinite(buffer).all() for buffer in buffers)


actions = st.lists(
    st.one_of(
        st.tuples(st.just("fresh"), st.integers(0, ROWS - 1), st.integers(1, 4)),
        st.tuples(st.just("feed"), st.integers(1, ROWS), st.lists(st.integers(1, 3), min_size=ROWS, max_size=ROWS)),
        st.tuples(st.just("swap"), st.permutations(range(ROWS)), st.integers(1, 2)),
        st.tuples(st.just("free"), st.integers(0, ROWS - 1), st.just(0)),
    ),
    max_size=12,
)


@given(actions)
@settings(max_examples=120, deadline=None)
def test_rows_keep_their_tokens_under_any_history(history):
    cache, rows, clock = SlotKvCache(ROWS), [[] for _ in range(ROWS)], 0
    store_fresh(cache, [[0]], [[0.5]])
    rows[0], cache.lengths[0] = [0.5], 1
    for kind, first, second in history:
        if kind == "fresh":
            rows[first] = [float(clock + number) for number in range(second)]
            store_fresh(cache, [[first]], [rows[first]])
            cache.lengths[first] = second
        elif kind == "feed":
            width = max(second[:first])
            new = [[float(clock + 10 * row + number) for number in range(width)] for row in range(first)]
            cache.begin(first, width)
            seen = [cache.update(block(new), -block(new), layer)[0] for layer in range(LAYERS)][0]
            for row in range(first):
                rows[row] = rows[row] + new[row][: second[row]]
                cache.lengths[row] += second[row]
                assert seen[row, 0, : len(rows[row]), 0].tolist() == rows[row]
        elif kind == "swap":
            left, right = list(first[:second]), list(first[second : 2 * second])
            cache.swap(left, right)
            for a, b in zip(left, right, strict=True):
                rows[a], rows[b] = rows[b], rows[a]
        else:
            rows[first], cache.lengths[first] = [], 0
        clock += 100
        assert [held(cache, row) if rows[row] else [] for row in range(ROWS)] == rows


@pytest.mark.parametrize("first", [0, 1, 2])
def test_a_pass_over_later_rows_leaves_the_others_alone(first):
    cache = SlotKvCache(ROWS)
    store_fresh(cache, [[0], [1], [2], [3]], [[1, 2], [3, 4], [5, 6], [7, 8]])
    cache.lengths[:] = [2, 1, 2, 1]
    cache.begin(2, 1, first)
    for layer in range(LAYERS):
        keys, _ = cache.update(block([[50], [60]]), -block([[50], [60]]), layer)
    assert keys.shape[0] == 2
    cache.lengths[first : first + 2] += 1
    rows = [[1, 2], [3], [5, 6], [7]]
    rows[first].append(50)
    rows[first + 1].append(60)
    assert [held(cache, row) for row in range(ROWS)] == rows
