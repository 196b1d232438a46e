"""What environments say of turns, held once where they say the same.

A run has thousands of turns and few different infos. One dict for all equal ones makes episodes smaller in memory and
between processes, and quicker to store; what is stored stays the same.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import orjson

from geo_sokoban_pipeline.trajectories import Turn

_PLAIN = orjson.OPT_PASSTHROUGH_DATACLASS | orjson.OPT_PASSTHROUGH_DATETIME | orjson.OPT_PASSTHROUGH_SUBCLASS


def share_infos(turns: Iterable[Turn]) -> None:
    """Give turns with equal `info` one and the same dict, which nobody may change from then on.

    An info that is empty, holds None, or holds anything but plain JSON stays as it is.
    """
    first: dict[bytes, dict[str, Any]] = {}
    for turn in turns:
        if turn.info:
            try:
                text = orjson.dumps(turn.info, option=_PLAIN)
            except TypeError:
                continue
            # NaN reads as null too, and must not become None, or None NaN.
            if b"null" not in text:
                turn.info = first.setdefault(text, turn.info)
