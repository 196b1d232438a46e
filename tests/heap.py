"""Where this process's large blocks lie: glibc's own count of the bytes that it maps for blocks outside its heap."""

from __future__ import annotations

import ctypes
import sys

import torch

from geo_sokoban_pipeline.training.runtime import prepare_process

GLIBC = hasattr(ctypes.CDLL(None), "mallinfo2")  # from glibc 2.33 on
FREED, BLOCK = 31 << 20, 30 << 20
_NAMES = ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")


class _Info(ctypes.Structure):
    """`struct mallinfo2` of glibc's malloc.h."""

    _fields_ = [(name, ctypes.c_size_t) for name in _NAMES]


def map_large_block(member: object = None) -> int:
    """Bytes mapped for a block of 30 MiB after one of 31 was freed: 0 where glibc moves its bound.

    The block is larger than any place that may be free in a test's heap. A worker group's child does it as a job.
    """
    freed = torch.empty(FREED, dtype=torch.uint8)
    del freed
    before = _mapped_bytes()
    block = torch.empty(BLOCK, dtype=torch.uint8)
    mapped = _mapped_bytes() - before
    del block
    return mapped


def count_threads(member: object = None) -> int:
    """Threads of torch in force."""
    return torch.get_num_threads()


def _mapped_bytes() -> int:
    library = ctypes.CDLL(None)
    library.mallinfo2.restype = _Info
    return int(library.mallinfo2().hblkhd)


def main(prepare: bool) -> None:
    """What a test starts in a process of its own."""
    if prepare:
        prepare_process(1)
    sys.stdout.write(str(map_large_block()))
