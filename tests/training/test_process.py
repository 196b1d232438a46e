"""The process that trains: where large blocks lie, what the garbage collector leaves alone, and for how long."""

from __future__ import annotations

import ctypes
import gc
import os
import platform
import subprocess
import sys
import time
import weakref
from contextlib import suppress

import pytest
from benchmarks.peer.setting import describe_heap

from geo_sokoban_pipeline.training.runtime import (
    Stopwatch,
    collector_paused,
    freeze_survivors,
    limit_heap,
    resident_bytes,
)

MALLOC_VARIABLES = ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "GLIBC_TUNABLES")


PROBE = """
from benchmarks.peer.setting import describe_heap
from geo_sokoban_pipeline.training.runtime import prepare_process
if {prepared}:
    prepare_process(1)
print(describe_heap())
"""


@pytest.mark.slow
@pytest.mark.skipif("unknown" in describe_heap(), reason="old ones do not count their maps, others are not set")
@pytest.mark.parametrize(
    ("prepared", "environment", "place"),
    [
        (False, {}, "inside"),
        (True, {"GLIBC_TUNABLES": "glibc.pthread.rseq=0"}, "outside"),
        # A setting of the user stands.
        (True, {"MALLOC_MMAP_THRESHOLD_": str(32 << 20)}, "inside"),
    ],
)
def test_the_heap_does_not_grow_for_large_blocks(prepared: bool, environment: dict[str, str], place: str) -> None:
    inherited = {name: value for name, value in os.environ.items() if name not in MALLOC_VARIABLES}
    environment = {**inherited, **environment, "PYTHONPATH": os.pathsep.join(sys.path)}
    words = [sys.executable, "-c", PROBE.format(prepared=prepared)]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout == f"blocks of 8 MiB {place} the heap\n"


@pytest.mark.parametrize(
    ("name", "value", "libc", "is_set"),
    [
        ("GLIBC_TUNABLES", "", "glibc", True),
        ("GLIBC_TUNABLES", "glibc.pthread.rseq=0", "glibc", True),
        ("MALLOC_ARENA_MAX", "1", "glibc", True),  # another setting of the heap
        ("MALLOC_MMAP_THRESHOLD_", "65536", "glibc", False),
        ("MALLOC_TRIM_THRESHOLD_", "65536", "glibc", False),
        ("GLIBC_TUNABLES", "glibc.pthread.rseq=0:glibc.malloc.mmap_threshold=65536", "glibc", False),
        ("GLIBC_TUNABLES", "glibc.malloc.trim_threshold=65536", "glibc", False),
        ("MALLOC_ARENA_MAX", "1", "musl", False),
    ],
)
def test_the_heap_is_left_to_whoever_has_set_it(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str, libc: str, is_set: bool
) -> None:
    """By the names that glibc itself reads; both thresholds are set or none."""
    calls: list[tuple[int, int]] = []

    class Library:
        def mallopt(self, parameter: int, bytes_: int) -> None:
            calls.append((parameter, bytes_))

    for variable in MALLOC_VARIABLES:
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv(name, value)
    monkeypatch.setattr(platform, "libc_ver", lambda: (libc, "2.36"))
    monkeypatch.setattr(ctypes, "CDLL", lambda _: Library())
    limit_heap()
    # M_MMAP_THRESHOLD is -3 and M_TRIM_THRESHOLD is -1 in malloc.h.
    assert calls == ([(-3, 4 << 20), (-1, 64 << 20)] if is_set else [])


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


def test_memory_is_that_of_all_descendants() -> None:
    held = "held = b'x' * 2**26; print(len(held), flush=True); input()"
    shell = ["sh", "-c", '"$0" -c "$1"; exit 0', sys.executable, held]  # the shell waits: Python is its child
    before = resident_bytes()
    with subprocess.Popen(shell, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline()
        assert resident_bytes() - before > 2**26
        process.communicate(b"\n")


def test_an_open_background_loop_does_not_keep_its_process() -> None:
    code = "from geo_sokoban_pipeline.background import BackgroundLoop as Loop; Loop('own').call(print)"
    subprocess.run(
        [sys.executable, "-c", code],
        check=True,
        timeout=60,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )


def test_a_stopwatch_adds_up_what_ran_also_where_it_ended_with_an_error() -> None:
    cpu = iter([1.0, 3.0, 10.0, 14.0])
    watch = Stopwatch(lambda: next(cpu))
    began = time.perf_counter()
    with watch.running():
        pass
    with suppress(KeyError), watch.running():
        raise KeyError
    assert watch.cpu_seconds == 2.0 + 4.0
    assert 0.0 < watch.seconds <= time.perf_counter() - began
    assert watch.read() == {"seconds": watch.seconds, "cpu_seconds": 6.0}
