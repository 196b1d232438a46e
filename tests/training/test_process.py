"""The process that trains: what the garbage collector leaves alone, and for how long."""

from __future__ import annotations

import gc
import weakref

import pytest

from geo_sokoban_pipeline.training.process import collector_paused, freeze_survivors


class Node:
    """Holds itself, so that only the collector frees it."""

    def __init__(self) -> None:
        self.me = self


def test_garbage_among_what_was_frozen_is_collected_at_the_next_freezing():
    node = Node()
    gone = weakref.ref(node)
    try:
        freeze_survivors()
        assert gc.get_freeze_count() > 1000
        del node
        gc.collect()
        assert gone() is not None
        freeze_survivors()
        assert gone() is None
    finally:
        gc.unfreeze()


@pytest.mark.parametrize("enabled", [True, False])
def test_a_pause_ends_as_it_found_the_collector_even_after_an_error(enabled: bool) -> None:
    (gc.enable if enabled else gc.disable)()
    try:
        with pytest.raises(KeyError), collector_paused():
            assert not gc.isenabled()
            raise KeyError
        assert gc.isenabled() is enabled
    finally:
        gc.enable()
