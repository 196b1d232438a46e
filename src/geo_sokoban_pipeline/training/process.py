"""What this process is set to before it trains (torch's threads, what the garbage collector looks at), and its memory.

None of it changes a result but the number of threads, which every manifest therefore holds.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

import psutil
import torch

_COLLECT_EVERY = 10


def set_threads(threads: int | None) -> int:
    """Set torch's threads where a number is given; returns the number in force."""
    if threads is not None:
        torch.set_num_threads(threads)
    return torch.get_num_threads()


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
