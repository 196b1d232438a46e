"""What the environments read of a prompts row."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import cache
from typing import Any

logger = logging.getLogger(__name__)


def read_ground_truth(sample: Mapping[str, Any]) -> str | None:
    """The reference of a row as text; None, with one warning per row, where it has none."""
    answer = sample.get("answer")
    if answer is None:
        _warn(str(sample.get("id")))
        return None
    return str(answer)


def read_family(sample: Mapping[str, Any]) -> str | None:
    """Name of the family of a row's problem; None where it has none."""
    family = sample.get("family")
    return family if isinstance(family, str) else None


@cache
def _warn(row: str) -> None:
    logger.warning("row %s has no answer: every reply to it is graded as wrong", row)
