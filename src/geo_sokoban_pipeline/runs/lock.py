"""A run's folders belong to one process at a time.

The lock is the kernel's (`flock`): it vanishes with its process, also by SIGKILL, so a left-over file blocks
no later process. The file's content only names the holder. `filelock` takes the same lock, but cannot look at one
without the right to write it, as pre-flight does.
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
import weakref
from datetime import datetime
from pathlib import Path
from typing import IO

from geo_sokoban_pipeline.runs.provenance import typed_command

LOCK_FILE = "run.lock"
_WAY_OUT = ", or take another run by --params run_id=…"


class RunLockedError(RuntimeError):
    """Another process works on the same run; the message names it."""


class RunLock:
    """Exclusive lock on a run, taken on creation.

    Args:
        folder: the run's folder under 06_models; made if absent.
        way_out: what to do beside waiting for the holder or stopping it.

    Raises:
        RunLockedError: another process, or another lock of this one, holds it.
        OSError: the folder cannot be written.
    """

    def __init__(self, folder: Path, way_out: str = _WAY_OUT) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / LOCK_FILE
        # "a+": opening must not empty the file, it may hold the name of a living holder
        self._handle: IO[str] | None = self.path.open("a+", encoding="utf-8")
        try:
            fcntl.flock(self._handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            self._handle.seek(0)
            message = _describe_holder(folder, self._handle.read(), way_out)
            self.close()
            raise RunLockedError(message) from error
        self._handle.truncate(0)
        holder = {
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "command": typed_command(),
            "started": datetime.now().astimezone().isoformat(timespec="seconds"),
        }
        self._handle.write(json.dumps(holder, indent=1) + "\n")
        self._handle.flush()
        _held.add(self)

    def close(self) -> None:
        """Release the lock. The file stays: deleting it could take a new holder's lock away."""
        if self._handle is not None:
            self._handle.close()
            self._handle = None


def find_holder(folder: Path) -> str | None:
    """Holder of the lock of a run's folder, as `RunLockedError` says it; None where it is free.

    Nothing is written. A process that asks for the lock in the very microseconds of the probe is refused.
    """
    path = folder / LOCK_FILE
    if not path.is_file():
        return None
    with path.open("r", encoding="utf-8") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return _describe_holder(folder, handle.read())
    return None


def _describe_holder(folder: Path, written: str, way_out: str = _WAY_OUT) -> str:
    try:
        who = "process {pid} on {host}, started {started}: {command}".format(**json.loads(written))
    except (ValueError, KeyError, TypeError):
        who = "a process that has not written its name yet"
    return f"{folder} is in use by {who}. Wait for it or stop it{way_out}"


# Locks of this process, for its forked children; weak, so that a lock ends with its holder.
_held: weakref.WeakSet[RunLock] = weakref.WeakSet()


def _forget_in_child() -> None:
    """A forked child shares the lock; without this, one that outlives a killed parent would keep the run locked."""
    for lock in list(_held):
        lock.close()


os.register_at_fork(after_in_child=_forget_in_child)
