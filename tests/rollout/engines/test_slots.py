"""KV slots: a batch sits in the first rows, no slot loses its row or its past, none moves further than needed."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from geo_sokoban_pipeline.config.rollout import SamplingOptions
from geo_sokoban_pipeline.rollout.engines.base import Request
from geo_sokoban_pipeline.rollout.engines.transformers import Slot, SlotKvCache, SlotManager

ROWS = 6
SAMPLING = SamplingOptions()


def request(identity: int) -> Request:
    return Request(identity, np.array([1, 2, 3], np.int32), (), SAMPLING, 4, 0, 0)


def place(manager: SlotManager, known: list[int], new: list[int]) -> list[Slot]:
    """Place conversations, and note their past in the lengths: one more than the id, so that a mix-up is seen."""
    batch = [manager.slots[identity] for identity in known] + [manager.add(request(identity)) for identity in new]
    manager.place(batch)
    for slot in batch:
        slot.cached = slot.request.id + 1
        manager.cache.lengths[slot.row] = slot.cached
    return batch


@given(st.data())
@settings(deadline=None)
def test_rows_are_never_shared_nor_mixed_up(data: st.DataObject) -> None:
    manager = SlotManager(SlotKvCache(rows=ROWS))
    fresh = iter(range(1000))
    for _ in range(data.draw(st.integers(1, 6))):
        held = sorted(manager.slots)
        known = data.draw(st.lists(st.sampled_from(held), unique=True)) if held else []
        count = data.draw(st.integers(0 if known else 1, max(manager.free, 0 if known else 1)))
        if count > manager.free:
            manager.release([held.pop()])
            known = [identity for identity in known if identity in held]
        before = {identity: slot.row for identity, slot in manager.slots.items()}
        batch = place(manager, known, [next(fresh) for _ in range(count)])
        assert [slot.row for slot in batch] == list(range(len(batch)))
        rows = {identity: slot.row for identity, slot in manager.slots.items()}
        assert len(set(rows.values())) == len(rows)
        assert all(manager.cache.lengths[row] == identity + 1 for identity, row in rows.items())
        # The buffers reach to the last row in use: nobody goes further back than the rows that are needed.
        assert max(rows.values()) <= max([*before.values(), len(rows) - 1])
        assert manager.free == ROWS - len(rows)
        manager.release(data.draw(st.lists(st.sampled_from(sorted(rows)), unique=True)))


@pytest.mark.parametrize(
    ("held", "released", "known", "new", "rows"),
    [
        # One in the way moves to the nearest free row.
        (3, [0, 1], [], [3, 4, 5], {2: 3, 3: 0, 4: 1, 5: 2}),
        # One that is there already stays.
        (4, [], [3, 1], [], {0: 3, 1: 1, 2: 2, 3: 0}),
    ],
)
def test_where_slots_move(
    held: int, released: list[int], known: list[int], new: list[int], rows: dict[int, int]
) -> None:
    manager = SlotManager(SlotKvCache(rows=ROWS))
    place(manager, [], [*range(held)])
    manager.release(released)
    place(manager, known, new)
    assert {identity: slot.row for identity, slot in manager.slots.items()} == rows


def test_a_released_row_is_empty() -> None:
    manager = SlotManager(SlotKvCache(rows=ROWS))
    place(manager, [], [0, 1])
    manager.release([0, 7])
    assert manager.cache.lengths.tolist() == [0, 2, 0, 0, 0, 0]
    assert (sorted(manager.slots), manager.free) == ([1], ROWS - 1)
