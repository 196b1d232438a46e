"""The process that trains: what the garbage collector is told to leave alone may still be collected later."""

from __future__ import annotations

import gc
import weakref

from geo_sokoban_pipeline.training.process import freeze_survivors


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
