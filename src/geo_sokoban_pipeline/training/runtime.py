"""Runtime settings of a process (threads, malloc, garbage collection), and what is measured of it (time, memory).

None of it changes a result but the number of threads, which every manifest therefore holds.
"""

from __future__ import annotations

import ctypes
import gc
import os
import platform
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import psutil
import torch

_COLLECT_EVERY = 10
# Parameters of glibc's mallopt (malloc.h).
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
# Bytes. The system fills a fresh mapping with zeros: a bound of 2 MiB already costs a wider policy time.
_MMAP_THRESHOLD = 4 << 20
# Bytes. What glibc itself comes to at most, twice its largest bound.
_TRIM_THRESHOLD = 64 << 20
_USER_SETTINGS = ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_")
_USER_TUNABLES = ("glibc.malloc.mmap_threshold", "glibc.malloc.trim_threshold")


def prepare_process(threads: int | None) -> int:
    """Set torch's threads where a number is given, and the heap; returns the number of threads in force."""
    if threads is not None:
        torch.set_num_threads(threads)
    limit_heap()
    return torch.get_num_threads()


def limit_heap() -> None:
    """Keep the heap from growing for blocks of 4 MiB and more: where it has no place, they get mappings of their own.

    glibc begins with a bound of 128 KiB and moves it up to 32 MiB, to the largest mapped block freed so far. From there
    on a step's tensors, whose sizes are new each time, lie in the heap between objects that stay, and it grows for
    hundreds of iterations. Nothing is set without glibc, or where the environment sets one of the two thresholds.
    """
    tunables = os.environ.get("GLIBC_TUNABLES", "")
    is_set = any(name in os.environ for name in _USER_SETTINGS) or any(name in tunables for name in _USER_TUNABLES)
    if platform.libc_ver()[0] == "glibc" and not is_set:
        library = ctypes.CDLL(None)
        library.mallopt(_M_MMAP_THRESHOLD, _MMAP_THRESHOLD)
        library.mallopt(_M_TRIM_THRESHOLD, _TRIM_THRESHOLD)


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


class Stopwatch:
    """Adds up the time spent inside `running()`, by the wall clock and by the processor.

    CPU seconds count all threads of the process, the worker processes' too where their clock is given, and nothing of
    its neighbours, so they compare stages of runs that share a machine.

    Args:
        cpu_clock: CPU seconds so far of all that works.

    Attributes:
        seconds: of the wall clock.
        cpu_seconds: of the processor.
    """

    def __init__(self, cpu_clock: Callable[[], float] = time.process_time) -> None:
        self._cpu_clock = cpu_clock
        self.seconds = 0.0
        self.cpu_seconds = 0.0

    @contextmanager
    def running(self) -> Iterator[None]:
        """Count the time of the `with` block, also where it ends with an error."""
        wall, cpu = time.perf_counter(), self._cpu_clock()
        try:
            yield
        finally:
            self.seconds += time.perf_counter() - wall
            self.cpu_seconds += self._cpu_clock() - cpu

    def read(self) -> dict[str, float]:
        """`seconds` and `cpu_seconds` so far."""
        return {"seconds": self.seconds, "cpu_seconds": self.cpu_seconds}
