"""A Kedro hook of the tests: notes the resident memory after every saved row of metrics, by iteration.

What is garbage, or free in the allocator's hands, is given back first, so that the numbers are what a run holds. A run
takes it from `GEO_SOKOBAN_EXTRA_HOOKS=memory_hook:MemoryHook`, with this folder on PYTHONPATH; the numbers go to the
file named by `GEO_SOKOBAN_MEMORY_FILE`, one line `iteration bytes` each.
"""

from __future__ import annotations

import ctypes
import gc
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil
from kedro.framework.hooks import hook_impl


class MemoryHook:
    def __init__(self) -> None:
        self._process = psutil.Process()
        self._file = Path(os.environ["GEO_SOKOBAN_MEMORY_FILE"])
        self._trim = getattr(ctypes.CDLL(None), "malloc_trim", lambda size: None)  # glibc has it

    @hook_impl
    def after_dataset_saved(self, dataset_name: str, data: Any) -> None:
        if not dataset_name.endswith(".metrics") or not isinstance(data, Mapping):
            return
        for row in data.values():
            if isinstance(row, Mapping):
                gc.collect()
                self._trim(0)
                with self._file.open("a") as file:
                    file.write(f"{row['iteration']} {self._process.memory_info().rss}\n")
