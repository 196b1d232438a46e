"""Disk full, read-only folder, file too large: said so that a person can act. Which path, how many bytes, what now.

Only errors that mean one of them are translated; all others pass untouched.
"""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

from geo_sokoban_pipeline.storage import free_bytes

_FULL = {errno.ENOSPC, errno.EDQUOT}
_TOO_LARGE = {errno.EFBIG}
_CLOSED = {errno.EACCES, errno.EPERM, errno.EROFS}


class StorageError(OSError):
    """The disk is full or the folder read-only; the message names the path and the bytes needed."""


class explain_storage_errors:  # noqa: N801 - read as a verb at its place of use
    """Context in which "no space" and "read-only" become a `StorageError`.

    Args:
        path: what is being written.
        needed: estimate of its bytes, asked only after an error; None where nobody can say.
    """

    def __init__(self, path: Path, needed: Callable[[], int | None] = lambda: None) -> None:
        self._path, self._needed = path, needed

    def __enter__(self) -> None:
        return None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None or isinstance(error, StorageError):
            return
        number = _storage_errno(error)
        if number is not None:
            raise StorageError(number, _explain(self._path, number, self._needed(), error)) from error


def _storage_errno(error: BaseException) -> int | None:
    number = getattr(error, "errno", None)
    if number in _FULL | _CLOSED | _TOO_LARGE:
        return int(number)
    # Libraries that write for us have error types without a number; safetensors prints Rust's name of the error.
    text = str(error)
    if "No space left on device" in text or "StorageFull" in text:
        return errno.ENOSPC
    return errno.EROFS if "Read-only file system" in text else None


def _explain(path: Path, number: int, needed: int | None, error: BaseException) -> str:
    amount = "an unknown number of bytes" if needed is None else f"about {needed:,} bytes"
    after = "what was committed before stays readable, and the same command continues from it"
    if number in _FULL:
        free = f"{free_bytes(path):,} free"
        return f"{path}: disk full, {amount} needed, {free} ({error}). Free space or move data_root; {after}"
    if number in _TOO_LARGE:
        return f"{path}: no file may be so large here, {amount} needed ({error}). Raise the limit (ulimit -f); {after}"
    return f"{path}: no right to write, {amount} needed ({error}). Allow writing or move data_root; {after}"
