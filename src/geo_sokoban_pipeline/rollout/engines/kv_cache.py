"""Keys and values of all conversations in one buffer per layer; a turn's batch is always the first rows of it.

Rows have their own lengths, so nothing is padded between turns. Before a pass the rows that take part are swapped to
the front, and the pass works on views: no conversation's past is copied to be attended to. What the buffers hold is
always finite, because a masked position still multiplies its value by zero.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

_GROWTH = 1.5


class SlotKvCache:
    """Buffers of (rows, key-value heads, capacity, head dimension), one pair per layer.

    They grow with the rows and the tokens in use. A head's tokens lie side by side in memory: attention of one new
    token reads them in half the time that it takes when they alternate between heads.

    Args:
        rows: conversations at most.

    Attributes:
        lengths: (rows,) int64 tokens held by each row.
    """

    def __init__(self, rows: int) -> None:
        self.rows = rows
        self.lengths = np.zeros(rows, np.int64)
        self._keys: list[Tensor] = []
        self._values: list[Tensor] = []
        self._first = self._count = self._feed = self._end = 0
        self._span: tuple[Tensor, Tensor] | None = None
        self._fresh: tuple[Tensor, Tensor] | None = None

    @property
    def capacity(self) -> int:
        """Tokens that a row can hold before the buffers grow."""
        return self._keys[0].shape[2] if self._keys else 0

    @property
    def allocated_rows(self) -> int:
        """Rows that the buffers hold so far."""
        return self._keys[0].shape[0] if self._keys else 0

    def swap(self, first: Sequence[int], second: Sequence[int]) -> None:
        """Exchange rows pairwise; the two lists share no row."""
        if not len(first):
            return
        source, target = [*second, *first], [*first, *second]
        used = int(self.lengths[source].max())
        self.lengths[target] = self.lengths[source]
        if not used:
            return
        self._reserve(max(target) + 1, used)
        to, come_from = torch.tensor(target), torch.tensor(source)
        for buffer in (*self._keys, *self._values):
            buffer[to, :, :used] = buffer[come_from, :, :used]

    def begin(self, count: int, feed: int, first: int = 0) -> Tensor | None:
        """Start a pass that appends `feed` padded tokens to each of `count` rows, from row `first` on.

        Returns:
            (count or 1, 1, feed, S) bool mask, True where attention is allowed, or None where no mask is needed.
        """
        lengths = self.lengths[first : first + count]
        longest = int(lengths.max())
        self._first, self._count, self._feed, self._end, self._fresh = first, count, feed, longest + feed, None
        self._reserve(first + count, self._end)
        uniform = longest == int(lengths.min())
        if uniform and feed == 1:
            self._span = None
            return None
        columns = torch.from_numpy((lengths[:1] if uniform else lengths)[:, None] + np.arange(feed))
        self._span = None if uniform else (torch.arange(count)[:, None], columns)
        return (torch.arange(self._end)[None, None] <= columns[:, :, None])[:, None]

    def begin_fresh(self, targets: Tensor) -> None:
        """Start a pass over new conversations without a past.

        Args:
            targets: (rows of the pass, copies) int64; row i of the pass is written to rows `targets[i]`, -1 is ignored.
        """
        source, column = (targets >= 0).nonzero(as_tuple=True)
        self._fresh = (source, targets[source, column])

    def update(self, keys: Tensor, values: Tensor, layer: int, *_: object) -> tuple[Tensor, Tensor]:
        """Called by the attention: store (B, heads, L, dim) keys and values, return all that are to be attended to."""
        if self._fresh is not None:
            return self._store_fresh(keys, values, layer)
        here, end = slice(self._first, self._first + self._count), self._end
        for buffer, new in ((self._keys[layer][here], keys), (self._values[layer][here], values)):
            if self._span is None:
                buffer[:, :, end - self._feed : end] = new
            else:
                rows, columns = self._span
                buffer[rows, :, columns] = new.transpose(1, 2)
        return self._keys[layer][here, :, :end], self._values[layer][here, :, :end]

    def _store_fresh(self, keys: Tensor, values: Tensor, layer: int) -> tuple[Tensor, Tensor]:
        assert self._fresh is not None
        source, rows = (index.to(keys.device) for index in self._fresh)
        length = keys.shape[2]
        while len(self._keys) <= layer:
            shape = (self.allocated_rows, keys.shape[1], self.capacity, keys.shape[3])
            self._keys.append(keys.new_zeros(shape))
            self._values.append(values.new_zeros(shape))
        self._reserve(int(rows.max()) + 1, length)
        self._keys[layer][rows, :, :length] = keys.index_select(0, source)
        self._values[layer][rows, :, :length] = values.index_select(0, source)
        return keys, values

    def _reserve(self, rows: int, length: int) -> None:
        """Grow the buffers to at least so many rows and tokens."""
        held_rows, held = self.allocated_rows, self.capacity
        if not self._keys or (rows <= held_rows and length <= held):
            return
        rows = held_rows if rows <= held_rows else min(self.rows, max(rows, int(held_rows * _GROWTH)))
        length = held if length <= held else max(length, int(held * _GROWTH))
        for buffers in (self._keys, self._values):
            for index, old in enumerate(buffers):
                grown = old.new_empty((rows, old.shape[1], length, old.shape[3]))
                grown[:held_rows, :, :held] = old
                grown[:held_rows, :, held:] = 0
                grown[held_rows:] = 0
                buffers[index] = grown
