"""Keys and values of all conversations in one buffer per layer; a turn's batch is always the first rows of it.

Rows have their own lengths, so nothing is padded between turns. Before a pass the rows that take part are swapped to the
front, and the pass works on views: no conversation's past is copied to be attended to. The buffers are zeroed when they
grow, because a masked position still multiplies its value by zero.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

_GROWTH = 1.5


class ConversationCache:
    """Buffers of (rows, capacity, key-value heads, head dimension), one pair per layer.

    Args:
        layers: number of language layers.
        rows: conversations at most.
    """

    def __init__(self, layers: int, rows: int) -> None:
        self.rows = rows
        self.lengths = torch.zeros(rows, dtype=torch.long)
        self._layers = layers
        self._keys: list[Tensor] = []
        self._values: list[Tensor] = []
        self._count = 0
        self._feed = 0
        self._span: tuple[Tensor, Tensor] | None = None
        self._fresh: Tensor | None = None

    @property
    def capacity(self) -> int:
        """Tokens that a row can hold before the buffers grow."""
        return self._keys[0].shape[1] if self._keys else 0

    def swap(self, first: Sequence[int], second: Sequence[int]) -> None:
        """Exchange rows pairwise; the two lists share no row."""
        if not len(first):
            return
        source = torch.tensor([*second, *first])
        target = torch.tensor([*first, *second])
        used = int(self.lengths[source].max())
        self.lengths[target] = self.lengths[source]
        for buffer in (*self._keys, *self._values):
            buffer[target, :used] = buffer[source, :used]

    def begin(self, count: int, feed: int) -> Tensor | None:
        """Start a pass that appends `feed` padded tokens to each of the first `count` rows.

        Returns:
            (count, 1, feed, S) bool mask, True where attention is allowed, or None where no mask is needed.
        """
        lengths = self.lengths[:count]
        end = int(lengths.max()) + feed
        self._reserve(end)
        self._count, self._feed, self._fresh = count, feed, None
        uniform = bool((lengths == lengths[0]).all())
        columns = lengths[:, None] + torch.arange(feed)
        self._span = None if uniform else (torch.arange(count)[:, None].expand(count, feed), columns)
        if uniform and feed == 1:
            return None
        return (torch.arange(end)[None, None] <= columns[:, :, None])[:, None]

    def begin_fresh(self, targets: Tensor) -> None:
        """Start a pass over new conversations without a past.

        Args:
            targets: (rows of the pass, copies) int64; row i of the pass is written to rows `targets[i]`, -1 is ignored.
        """
        self._fresh = targets

    def advance(self, counts: Tensor) -> None:
        """End a pass over the first rows: count (N,) real tokens of each as held."""
        self.lengths[: len(counts)] += counts

    def update(self, keys: Tensor, values: Tensor, layer: int, *_: object) -> tuple[Tensor, Tensor]:
        """Called by the attention: store (B, heads, L, dim) keys and values, return all that are to be attended to."""
        if self._fresh is not None:
            return self._store_fresh(keys, values, layer)
        count, end = self._count, int(self.lengths[: self._count].max()) + self._feed
        for buffer, new in ((self._keys[layer], keys), (self._values[layer], values)):
            if self._span is None:
                buffer[:count, end - self._feed : end] = new.transpose(1, 2)
            else:
                buffer[self._span] = new.transpose(1, 2)
        held = (self._keys[layer][:count, :end], self._values[layer][:count, :end])
        return held[0].transpose(1, 2), held[1].transpose(1, 2)

    def _store_fresh(self, keys: Tensor, values: Tensor, layer: int) -> tuple[Tensor, Tensor]:
        assert self._fresh is not None
        length = keys.shape[2]
        while len(self._keys) <= layer:
            shape = (self.rows, max(length, self.capacity), keys.shape[1], keys.shape[3])
            self._keys.append(keys.new_zeros(shape))
            self._values.append(values.new_zeros(shape))
        self._reserve(length)
        source, column = (self._fresh >= 0).nonzero(as_tuple=True)
        rows = self._fresh[source, column]
        self._keys[layer][rows, :length] = keys.transpose(1, 2).index_select(0, source)
        self._values[layer][rows, :length] = values.transpose(1, 2).index_select(0, source)
        return keys, values

    def _reserve(self, length: int) -> None:
        if not self._keys or length <= self.capacity:
            return
        capacity = max(length, int(self.capacity * _GROWTH))
        for buffers in (self._keys, self._values):
            for index, old in enumerate(buffers):
                grown = old.new_zeros((self.rows, capacity, *old.shape[2:]))
                grown[:, : old.shape[1]] = old
                buffers[index] = grown
