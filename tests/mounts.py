"""Real small file systems for tests of full and read-only disks: a tmpfs where this process may mount one."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def small_disk(folder: Path, size: int) -> Iterator[Path]:
    """Mount a tmpfs of `size` bytes at a folder, and take it away again; skips where mounting is not allowed."""
    folder.mkdir(parents=True, exist_ok=True)
    done = _run("mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder))
    if done.returncode:
        pytest.skip(f"a tmpfs cannot be mounted here: {done.stderr.strip()}")
    try:
        yield folder
    finally:
        _run("umount", "--lazy", str(folder))


def set_read_only(folder: Path, value: bool) -> None:
    """Make a mounted file system read-only, or writable again; root cannot write to it either."""
    done = _run("mount", "-o", f"remount,{'ro' if value else 'rw'}", str(folder))
    assert done.returncode == 0, done.stderr


def leave_free(folder: Path, free: int) -> Path:
    """Fill a file system but for so many bytes; deleting the returned file makes space again."""
    from geo_sokoban_pipeline.storage import free_bytes

    ballast = folder / "ballast"
    with ballast.open("wb") as file:
        while (left := free_bytes(folder) - free) > 0:
            file.write(bytes(min(left, 1 << 20)))
            file.flush()
    return ballast


def _run(*words: str) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(words, capture_output=True, text=True, check=False)
    except FileNotFoundError as error:
        return subprocess.CompletedProcess(words, 1, "", str(error))
