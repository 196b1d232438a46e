"""Real small file systems for tests of full and read-only disks: a tmpfs where this process may mount one.

Who is not root closes a folder by its rights instead, so that only tests of full disks need a mount.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

_MAY_MOUNT = 1 << 21  # CAP_SYS_ADMIN
_NEW_MOUNTS = 0x20000  # CLONE_NEWNS


@contextmanager
def small_disk(folder: Path, size: int) -> Iterator[Path]:
    """Mount a tmpfs of `size` bytes at a folder, and take it away again.

    Skips where mounting is not allowed; in continuous integration it fails where it is allowed and does not work.
    """
    folder.mkdir(parents=True, exist_ok=True)
    done = _run("mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder))
    if done.returncode:
        message = f"a tmpfs cannot be mounted here: {done.stderr.strip()}"
        if os.environ.get("CI") == "true" and _may_mount():
            pytest.fail(message)
        pytest.skip(message)
    try:
        yield folder
    finally:
        _run("umount", "--lazy", str(folder))


@contextmanager
def closable_folder(folder: Path, size: int) -> Iterator[Path]:
    """A folder for `set_read_only`: a small disk for root, whom rights do not stop, else a folder as any other."""
    if os.geteuid() == 0:
        with small_disk(folder, size):
            yield folder
        return
    folder.mkdir(parents=True, exist_ok=True)
    try:
        yield folder
    finally:
        folder.chmod(0o755)


def set_read_only(folder: Path, value: bool) -> None:
    """Make a closable folder read-only, or writable again."""
    if not folder.is_mount():
        folder.chmod(0o555 if value else 0o755)
        return
    done = _run("mount", "-o", f"remount,{'ro' if value else 'rw'}", str(folder))
    assert done.returncode == 0, done.stderr


def leave_free(folder: Path, free: int) -> Path:
    """Fill a file system but for so many bytes; deleting the returned file makes space again."""
    from geo_sokoban_pipeline.runs.storage import free_bytes

    ballast = folder / "ballast"
    with ballast.open("wb") as file:
        while (left := free_bytes(folder) - free) > 0:
            file.write(bytes(min(left, 1 << 20)))
            file.flush()
    return ballast


def _may_mount() -> bool:
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    (held,) = (line.split()[1] for line in lines if line.startswith("CapEff:"))
    return bool(int(held, 16) & _MAY_MOUNT)


def _run(*words: str) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(words, capture_output=True, text=True, check=False)
    except FileNotFoundError as error:
        return subprocess.CompletedProcess(words, 1, "", str(error))


def may_hide() -> bool:
    """Whether a process may be started that sees an empty folder in place of another one."""
    return subprocess.run(["unshare", "--mount", "true"], check=False, capture_output=True).returncode == 0


def hide_here(folder: Path) -> None:
    """This process sees an empty folder in place of another one from now on, as do those that it starts."""
    # Python 3.12 has os.unshare.
    if ctypes.CDLL(None, use_errno=True).unshare(_NEW_MOUNTS):
        raise OSError(ctypes.get_errno(), "no mounts of its own")
    for words in (("--make-rprivate", "/"), ("-t", "tmpfs", "none", str(folder))):
        subprocess.run(["mount", *words], check=True)
