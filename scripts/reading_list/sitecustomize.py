"""Records which functions of the package a process executes: Python imports this module as it starts from this folder.

`page.py` puts the folder on `PYTHONPATH` of a command, so that its ranks and Ray's workers are recorded too, with all
their threads. Code at import and calls of hooks do not count.
"""

from __future__ import annotations

import mmap
import os
import sys
import threading
from types import CodeType, FrameType
from typing import Any

_PACKAGE = f"{os.sep}geo_sokoban_pipeline{os.sep}"
_HOOKS = f"{_PACKAGE}hooks{os.sep}"
_FUNCTION = 0x1  # flag of code that is neither a module's nor a class's (CO_OPTIMIZED)
# The driver's first call of each, after the one before it, begins a phase: start of the loop, iterations, end.
_BEGINNINGS = {"run_grpo": 1, "is_save_due": 2, "SignalWatch.close": 3}


def record_calls(folder: str) -> None:
    """Append each function to `calls` of a folder once a phase, whose number all processes share in `phase`."""
    with open(os.path.join(folder, "phase"), "r+b") as file:
        phase = mmap.mmap(file.fileno(), 1)
    out = os.open(os.path.join(folder, "calls"), os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    seen: list[dict[int, CodeType]] = [{}, {}, {}, {}]

    def note(frame: FrameType, event: str, _: Any) -> None:
        code, known = frame.f_code, seen[phase[0]]
        if event != "call" or id(code) in known:
            return
        known[id(code)] = code  # the reference keeps the id its own
        _, inside, path = code.co_filename.rpartition(_PACKAGE)
        if not inside or not code.co_flags & _FUNCTION:
            return
        if _BEGINNINGS.get(code.co_qualname) == phase[0] + 1:
            phase[0] += 1
        above = frame.f_back
        while above is not None:
            name = above.f_code.co_filename
            if _PACKAGE in name and (above.f_code.co_name == "<module>" or _HOOKS in name):
                del known[id(code)]  # others may call it too
                return
            above = above.f_back
        os.write(out, f"{phase[0]} {path} {code.co_qualname}\n".encode())

    def join(event: str, _: Any) -> None:
        """Record the present thread too; Ray starts some that `threading` does not know."""
        if event != "sys.setprofile" and sys.getprofile() is None:
            sys.setprofile(note)

    threading.setprofile(note)
    sys.setprofile(note)
    sys.addaudithook(join)


# Ray's own processes answer late enough without this.
if "READING_LIST" in os.environ and (
    "/ray/" not in " ".join(sys.orig_argv) or "default_worker.py" in " ".join(sys.orig_argv)
):
    record_calls(os.environ["READING_LIST"])
