"""Seating: who asks sits in the first rows, nobody loses a row or its past, and nobody is moved further than needed."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from geo_sokoban_pipeline.config.rollout import SamplingOptions
from geo_sokoban_pipeline.rollout.engines.base import Request
from geo_sokoban_pipeline.rollout.engines.kv_cache import ConversationCache
from geo_sokoban_pipeline.rollout.engines.transformers import HeldConversation, Seating

ROWS = 6
SAMPLING = SamplingOptions()


def request(identity: int) -> Request:
    return Request(identity, np.array([1, 2, 3], np.int32), (), SAMPLING, 4, 0, 0)


def seat(seating: Seating, known: list[int], new: list[int]) -> list[HeldConversation]:
    """Place conversations, and note their past in the lengths: one more than the id, so that a mix-up is seen."""
    batch = [seating.held[identity] for identity in known] + [seating.hold(request(identity)) for identity in new]
    seating.place(batch)
    for talk in batch:
        talk.cached = talk.request.id + 1
        seating.cache.lengths[talk.row] = talk.cached
    return batch


@given(st.data())
def test_rows_are_never_shared_nor_mixed_up(data: st.DataObject) -> None:
    seating = Seating(ConversationCache(ROWS))
    fresh = iter(range(1000))
    for _ in range(data.draw(st.integers(1, 6))):
        held = sorted(seating.held)
        known = data.draw(st.lists(st.sampled_from(held), unique=True)) if held else []
        count = data.draw(st.integers(0 if known else 1, max(seating.free, 0 if known else 1)))
        if count > seating.free:
            seating.release([held.pop()])
            known = [identity for identity in known if identity in held]
        before = {identity: talk.row for identity, talk in seating.held.items()}
        batch = seat(seating, known, [next(fresh) for _ in range(count)])
        assert [talk.row for talk in batch] == list(range(len(batch)))
        rows = {identity: talk.row for identity, talk in seating.held.items()}
        assert len(set(rows.values())) == len(rows)
        assert all(seating.cache.lengths[row] == identity + 1 for identity, row in rows.items())
        # The buffers reach to the last row in use: nobody goes further back than the rows that are needed.
        assert max(rows.values()) <= max([*before.values(), len(rows) - 1])
        assert seating.free == ROWS - len(rows)
        seating.release(data.draw(st.lists(st.sampled_from(sorted(rows)), unique=True)))


def test_who_stands_in_the_way_moves_to_the_nearest_free_row() -> None:
    seating = Seating(ConversationCache(ROWS))
    seat(seating, [], [0, 1, 2])
    seating.release([0, 1])
    seat(seating, [], [3, 4, 5])
    assert {identity: talk.row for identity, talk in seating.held.items()} == {2: 3, 3: 0, 4: 1, 5: 2}


def test_who_sits_there_already_stays() -> None:
    seating = Seating(ConversationCache(ROWS))
    seat(seating, [], [0, 1, 2, 3])
    seat(seating, [3, 1], [])
    assert {identity: talk.row for identity, talk in seating.held.items()} == {0: 3, 1: 1, 2: 2, 3: 0}


def test_a_released_row_is_empty() -> None:
    seating = Seating(ConversationCache(ROWS))
    seat(seating, [], [0, 1])
    seating.release([0, 7])
    assert seating.cache.lengths.tolist() == [0, 2, 0, 0, 0, 0]
    assert (sorted(seating.held), seating.free) == ([1], ROWS - 1)
