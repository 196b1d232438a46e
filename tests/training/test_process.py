"""The process that trains: where large blocks lie, what the garbage collector leaves alone, and for how long."""

from __future__ import annotations

import gc
import os
import platform
import subprocess
import sys
import weakref

import pytest

from geo_sokoban_pipeline.training.process import collector_paused, freeze_survivors

# Freeing a block moves glibc's bound up to its size, so that the next one lies in the heap, unless the bound is set.
MAPPED_BYTES = """
import ctypes, sys, torch
from geo_sokoban_pipeline.training.process import prepare_process

class Info(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in "arena ord small maps mapped usm fsm used free top".split()]

def mapped():
    library = ctypes.CDLL(None)
    library.mallinfo2.restype = Info
    return library.mallinfo2().mapped

if sys.argv[1] == "prepared":
    prepare_process(1)
freed = torch.empty(24 << 20, dtype=torch.uint8)
del freed
before = mapped()
block = torch.empty(8 << 20, dtype=torch.uint8)
print(mapped() - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc's heap is set")
@pytest.mark.parametrize(
    ("process", "environment", "apart"),
    [
        ("as it is", {}, False),
        ("prepared", {}, True),
        ("prepared", {"MALLOC_MMAP_THRESHOLD_": str(32 << 20)}, False),  # what a user sets stands
    ],
)
def test_large_blocks_have_mappings_of_their_own(process: str, environment: dict[str, str], apart: bool) -> None:
    words = [sys.executable, "-c", MAPPED_BYTES, process]
    done = subprocess.run(words, env={**os.environ, **environment}, capture_output=True, text=True, check=True)
    assert (int(done.stdout) >= 8 << 20) is apart


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
