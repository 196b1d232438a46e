"""Weights that a test makes, as a source."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence

import torch
from torch import Tensor

from geo_sokoban_pipeline.policies.weights import SharedBytes, TensorSpec, WeightSource, cut, empty_bucket


def source_of(tensors: Mapping[str, Tensor], state: Callable[[], Hashable] = lambda: 0) -> WeightSource:
    """A source of these tensors."""
    specs = {name: TensorSpec.of(tensor) for name, tensor in tensors.items()}

    def collect(wanted: Mapping[str, TensorSpec], memory: SharedBytes | None) -> Tensor:
        flat = empty_bucket(wanted, memory)
        for name, place in cut(flat, wanted):
            place.copy_(tensors[name])
        return flat

    return WeightSource(specs, collect, state)


def named_tensors(sizes: Sequence[int]) -> dict[str, Tensor]:
    """Vectors of these sizes, named by their numbers."""
    return {str(index): torch.arange(size, dtype=torch.float32) for index, size in enumerate(sizes)}
