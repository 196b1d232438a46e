"""Runtime settings of a process (threads, malloc, garbage collection), and measurements of time and memory.

Only the number of threads changes results, so every manifest records it.
"""

from __future__ import annotations

import ctypes
import gc
import os
import platform
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import psutil

_COLLECT_EVERY = 10
# Parameters of glibc's mallopt (malloc.h).
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
# Bytes. The system fills a fresh mapping with zeros, so a lower threshold (2 MiB) slows a wider policy down.
_MMAP_THRESHOLD = 4 << 20
# Bytes. glibc's own maximum: twice its largest mmap threshold.
_TRIM_THRESHOLD = 64 << 20
# Bytes, where ranks share weights. Parts of weights, gradients and moments stay while gathered weights come and go: in
# one heap with them they would leave holes, a quarter of the state at 80 million weights.
PART_THRESHOLD = 256 << 10
# Bytes, once the moments lie outside the heap. Activations then use the same memory in every micro-batch; the system
# would fill mappings of their own with zeros each time. Gradients, and the weights of a unit, are larger.
STEP_THRESHOLD = 2 << 20
_USER_SETTINGS = ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_")
_USER_TUNABLES = ("glibc.malloc.mmap_threshold", "glibc.malloc.trim_threshold")


def prepare_process(threads: int | None) -> int:
    """Set torch's threads (None: unchanged) and the heap's thresholds; returns the number of threads."""
    import torch  # here, so that the registry of pipelines does not load it

    if threads is not None:
        torch.set_num_threads(threads)
    limit_heap()
    return torch.get_num_threads()


def limit_heap(threshold: int = _MMAP_THRESHOLD) -> None:
    """Give large blocks mappings of their own, so that the heap does not grow with them.

    glibc's mmap threshold begins at 128 KiB and rises, up to 32 MiB, to the largest mapped block freed so far. Then the
    tensors of a step, whose sizes change every time, lie in the heap between long-lived objects, and the heap grows for
    hundreds of iterations. Nothing is set without glibc, or where the environment sets one of the two thresholds.

    Args:
        threshold: bytes of a large block.
    """
    tunables = os.environ.get("GLIBC_TUNABLES", "")
    is_set = any(name in os.environ for name in _USER_SETTINGS) or any(name in tunables for name in _USER_TUNABLES)
    if platform.libc_ver()[0] == "glibc" and not is_set:
        library = ctypes.CDLL(None)
        library.mallopt(_M_MMAP_THRESHOLD, threshold)
        library.mallopt(_M_TRIM_THRESHOLD, _TRIM_THRESHOLD * threshold // _MMAP_THRESHOLD)


def freeze_survivors() -> None:
    """Collect once, then exclude all surviving objects from later collections.

    Importing torch, transformers and Kedro leaves more than half a million objects. A full collection that walks them
    takes a third of a second, and the many small objects of an iteration trigger it again and again.
    """
    # Objects frozen by an earlier call may be garbage by now.
    gc.unfreeze()
    gc.collect()
    gc.freeze()


def collect_garbage(iteration: int) -> None:
    """Free reference cycles, every tenth iteration.

    Python itself waits until a quarter of all objects is new. In the default run that takes fifty iterations and leaves
    100 MB of garbage in its two processes.
    """
    if iteration % _COLLECT_EVERY == 0:
        gc.collect()


@contextmanager
def collector_paused() -> Iterator[None]:
    """Switch the garbage collector off while many objects are created, none of which is garbage."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def resident_bytes() -> int:
    """Resident memory of this process and all its descendants; shared pages count in each."""
    own = psutil.Process()
    found = 0
    for process in (own, *own.children(recursive=True)):
        with suppress(psutil.NoSuchProcess):  # it has ended meanwhile
            found += process.memory_info().rss
    return found


class Stopwatch:
    """Adds up wall-clock and CPU time spent inside `running()`.

    CPU seconds do not depend on other programs, so they compare stages of runs that share a machine.

    Args:
        cpu_clock: CPU seconds so far: of this process with all its threads by default, of a worker group by its
            `cpu_clock`.

    Attributes:
        seconds: wall-clock time.
        cpu_seconds: CPU time.
    """

    def __init__(self, cpu_clock: Callable[[], float] = time.process_time) -> None:
        self._cpu_clock = cpu_clock
        self.seconds = 0.0
        self.cpu_seconds = 0.0

    @contextmanager
    def running(self) -> Iterator[None]:
        """Count the time of the `with` block, also if it raises."""
        wall, cpu = time.perf_counter(), self._cpu_clock()
        try:
            yield
        finally:
            self.seconds += time.perf_counter() - wall
            self.cpu_seconds += self._cpu_clock() - cpu

    def read(self) -> dict[str, float]:
        """`seconds` and `cpu_seconds` so far."""
        return {"seconds": self.seconds, "cpu_seconds": self.cpu_seconds}
