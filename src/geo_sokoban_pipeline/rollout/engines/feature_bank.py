"""Vision features of every picture seen under the current weights; a picture is looked up by content, never encoded
twice.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from geo_sokoban_pipeline.policies.vision import ImageFeatures


class FeatureBank:
    """Growing tables of feature rows."""

    def __init__(self) -> None:
        self._tables: list[Tensor] = []
        self._rows: dict[str, np.ndarray] = {}
        self._used = 0

    def __contains__(self, key: str) -> bool:
        return key in self._rows

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def embeddings(self) -> Tensor:
        """(rows, hidden) features that replace image-pad embeddings."""
        return self._tables[0]

    @property
    def deepstack(self) -> list[Tensor]:
        """(rows, hidden) features of each early language layer."""
        return self._tables[1:]

    def add(self, features: ImageFeatures) -> None:
        """Append the features of new pictures."""
        new = [features.embeddings, *features.deepstack]
        count = len(features.embeddings)
        if not self._tables:
            self._tables = [torch.empty((0, table.shape[1]), dtype=table.dtype, device=table.device) for table in new]
        self._reserve(self._used + count)
        for table, rows in zip(self._tables, new, strict=True):
            table[self._used : self._used + count] = rows
        for key, offset in features.offsets.items():
            self._rows[key] = np.arange(offset, offset + features.counts[key]) + self._used
        self._used += count

    def rows(self, keys: Sequence[str]) -> np.ndarray:
        """(M,) int64 rows of pictures, one after the other."""
        return np.concatenate([self._rows[key] for key in keys]) if len(keys) else np.empty(0, np.int64)

    def _reserve(self, rows: int) -> None:
        held = len(self._tables[0])
        if rows <= held:
            return
        size = max(rows, 2 * held)
        for index, table in enumerate(self._tables):
            grown = table.new_empty((size, table.shape[1]))
            grown[: self._used] = table[: self._used]
            self._tables[index] = grown
