"""Scratch folders that no process leaves behind for ever: the next command removes those of processes that have ended.

A folder is locked (`flock`) before it gets its name, and as long as its process lives, however that ends. Process ids
would not do: containers that share a temporary folder count them apart. A killed SGLang server leaves files in shared
memory, which it does not lock; they go once no process maps them.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import shutil
import tempfile
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

logger = logging.getLogger(__name__)
_PREFIX = "geo_sokoban-"
_SHARED_MEMORY = Path("/dev/shm")
_OF_SERVERS = ("sglang_loads_", "sgl_shm_")
_YOUNG = 60.0  # seconds in which a server has mapped what it has made


class Scratch:
    """A folder that is this process's until `cleanup`, or until it ends.

    Args:
        place: folder in which it is made, and from which those of processes that have ended are removed; None: the
            temporary one.

    Attributes:
        path: of the folder.
        cleanup: removes it, at the latest when this object or the process ends.
    """

    def __init__(self, place: Path | None = None) -> None:
        place = place or Path(tempfile.gettempdir())
        _sweep(place)
        made = Path(tempfile.mkdtemp(prefix=f".{_PREFIX}", dir=place))
        lock = os.open(made, os.O_RDONLY | os.O_DIRECTORY)  # stays open
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
        except OSError as error:
            if error.errno != errno.EBADF:  # NFS locks no folders, and none is removed there
                raise
        self.path = made.rename(made.with_name(made.name.removeprefix(".")))
        self.cleanup = weakref.finalize(self, _remove, self.path, lock)


def _remove(path: Path, lock: int) -> None:
    shutil.rmtree(path, ignore_errors=True)
    os.close(lock)


def sweep() -> None:
    """Remove what processes of this user that have ended have left in the temporary folder and in shared memory."""
    _sweep(Path(tempfile.gettempdir()))
    old = [path for path in _SHARED_MEMORY.glob("sgl*") if path.name.startswith(_OF_SERVERS) and _is_old(path)]
    mapped = _mapped_paths() if old else ""
    for path in old:
        if str(path) not in mapped:
            logger.info("%s is of a server that has ended, and is removed", path)
            path.unlink(missing_ok=True)


def _is_old(path: Path) -> bool:
    """Whether a file of this user has existed for a while."""
    with suppress(OSError):
        found = path.stat()
        return found.st_uid == os.getuid() and time.time() - found.st_mtime > _YOUNG
    return False


def _mapped_paths() -> str:
    """All mappings of the processes of this machine, as the kernel writes them."""
    found = []
    for process in Path("/proc").glob("[0-9]*/maps"):
        with suppress(OSError):  # it has ended, or is another user's
            found.append(process.read_text(encoding="utf-8", errors="replace"))
    return "\n".join(found)


def _sweep(place: Path) -> None:
    """Remove this user's folders that no process holds."""
    for path in sorted(place.glob(f"{_PREFIX}*")):
        with suppress(OSError), _opened(path) as folder:  # it may be held, no folder of this user, or gone meanwhile
            if os.fstat(folder).st_uid == os.getuid():
                fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
                logger.info("%s is of a process that has ended, and is removed", path)
                shutil.rmtree(path, ignore_errors=True)


@contextmanager
def _opened(folder: Path) -> Iterator[int]:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        yield descriptor
    finally:
        os.close(descriptor)
