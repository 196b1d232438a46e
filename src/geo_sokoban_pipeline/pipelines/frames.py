"""Frames of rows, with object columns: a missing number stays None and never becomes NaN."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pandas as pd


def as_frame(rows: Sequence[Mapping[str, Any]], names: Sequence[str]) -> pd.DataFrame:
    """Frame with object columns: the pinned ones first, then whatever else a row has."""
    import pandas as pd

    further = dict.fromkeys(name for row in rows for name in row if name not in names)
    return pd.DataFrame({name: pd.Series([row.get(name) for row in rows], dtype=object) for name in [*names, *further]})
