"""Events of a run, in the driver's process, for a hook that waits for one or acts there.

A hook of `sys.addaudithook` hears them beside those of Python, whose names are others. Without one an event costs
nothing.
"""

from __future__ import annotations

import sys
from enum import StrEnum
from typing import Any

EVENT = "geo_sokoban_pipeline.event"  # name of all of them among the audit events of the process


class Event(StrEnum):
    """Kinds of events; brackets name the value that comes with each."""

    RANKS = "ranks"  # have their processes (process ids, without the driver's)
    SFT_STEP = "sft_step"  # is done (its number, from 1 on)
    COLLECT = "collect"  # begins (iteration)
    UPDATE = "update"  # begins (iteration)
    VALIDATE = "validate"  # begins (iteration)
    TENSOR = "tensor"  # is written (name of its file)
    FILE_SENT = "file_sent"  # to a rank elsewhere (its name)
    FILE_FETCHED = "file_fetched"  # from a rank elsewhere (its name)
    CHECKPOINT = "checkpoint"  # is written, not sealed (iteration; None: before the first one)


def emit(event: Event, given: Any) -> None:
    """Have the hooks called, in this thread: `hook(EVENT, (event, given))`."""
    sys.audit(EVENT, event, given)
