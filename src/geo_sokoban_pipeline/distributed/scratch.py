"""Scratch folders that no process leaves behind for ever: who makes one removes those of processes that have ended.

A folder is locked (`flock`) before it gets its name, and as long as its process lives, however that ends. Process ids
would not do: containers that share a temporary folder count them apart.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

logger = logging.getLogger(__name__)
_PREFIX = "geo_sokoban-"


def make_scratch() -> Path:
    """A folder in the temporary one that is this process's until it ends; removes those whose process has ended."""
    _sweep(Path(tempfile.gettempdir()))
    made = Path(tempfile.mkdtemp(prefix=f".{_PREFIX}"))
    try:
        fcntl.flock(os.open(made, os.O_RDONLY | os.O_DIRECTORY), fcntl.LOCK_EX)  # stays open
    except OSError as error:
        if error.errno != errno.EBADF:  # NFS locks no folders, so that nobody removes them there either
            raise
    return made.rename(made.with_name(made.name.removeprefix(".")))


def _sweep(place: Path) -> None:
    """Remove this user's folders that nobody holds."""
    for path in sorted(place.glob(f"{_PREFIX}*")):
        try:
            with _opened(path) as folder:
                if os.fstat(folder).st_uid != os.getuid():
                    continue
                fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
                logger.info("%s is of a process that has ended, and is removed", path)
                shutil.rmtree(path, ignore_errors=True)
        except OSError:  # it is held, no folder of this user, or gone meanwhile
            continue


@contextmanager
def _opened(folder: Path) -> Iterator[int]:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        yield descriptor
    finally:
        os.close(descriptor)
