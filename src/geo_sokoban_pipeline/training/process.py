"""What this process is set to before it trains (threads, heap, what the garbage collector looks at), and its memory.

None of it changes a result but the number of threads, which every manifest therefore holds.
"""

from __future__ import annotations

import ctypes
import gc
import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager

import psutil
import torch

_COLLECT_EVERY = 10
# Parameters of glibc's mallopt (malloc.h), and where its users set them.
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
_USER_SETTINGS = ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "GLIBC_TUNABLES")
# Bytes. A lower bound costs time (a fresh mapping is filled with zeros), a higher one lets the heap grow.
_APART_FROM, _KEPT_FREE = 4 << 20, 64 << 20


def prepare_process(threads: int | None) -> int:
    """Set torch's threads where a number is given, and the heap; returns the number of threads in force."""
    if threads is not None:
        torch.set_num_threads(threads)
    keep_large_blocks_apart()
    return torch.get_num_threads()


def keep_large_blocks_apart() -> bool:
    """Give every block of 4 MiB and more a mapping of its own, which the system takes back when it is freed.

    glibc begins so, and then raises the bound up to 32 MiB, to the largest block freed so far. From there on a step's
    tensors, whose sizes are new each time, lie in the heap between objects that stay, and it grows for hundreds of
    iterations.

    Returns:
        False where nothing was set: without glibc, or where one of its environment variables is set.
    """
    if platform.libc_ver()[0] != "glibc" or any(name in os.environ for name in _USER_SETTINGS):
        return False
    library = ctypes.CDLL(None)
    return bool(library.mallopt(_MMAP_THRESHOLD, _APART_FROM) and library.mallopt(_TRIM_THRESHOLD, _KEPT_FREE))


def freeze_survivors() -> None:
    """Collect once, and let no later collection look at what is left.

    Importing torch, transformers and Kedro leaves more than half a million objects. A full collection that walks them
    takes a third of a second, and the many small objects of an iteration set it off again and again.
    """
    # What an earlier call has set aside may be garbage by now.
    gc.unfreeze()
    gc.collect()
    gc.freeze()


def collect_garbage(iteration: int) -> None:
    """Free what lies in cycles of references, every tenth iteration.

    Python itself waits until a quarter of all objects is new: fifty iterations of the default run, and by then
    100 MB lie about in its two processes.
    """
    if iteration % _COLLECT_EVERY == 0:
        gc.collect()


@contextmanager
def collector_paused() -> Iterator[None]:
    """Keep the garbage collector from looking at many objects that are made at once and none of which is garbage."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def resident_bytes() -> int:
    """Resident memory of this process and all it has started; what several of them share counts in each."""
    own = psutil.Process()
    found = 0
    for process in (own, *own.children(recursive=True)):
        try:
            found += process.memory_info().rss
        except psutil.NoSuchProcess:  # it has ended meanwhile
            continue
    return found
