"""Sharding of a policy's weights by FSDP2: each rank holds a part of every parameter, gradient and moment.

There are two roots: the language model with its output head, whose layers are inner units, and the whole vision tower.
Images pass the tower in batches of equal size, so its blocks are called in numbers that differ by rank and cannot be
units. Gradients are summed, not averaged: losses are divided by the counts of the whole step already.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor


def shard_modules(language: Any, vision: nn.Module, mesh: DeviceMesh) -> None:
    """Shard the weights of a policy in place; the parameters become DTensors.

    Args:
        language: with its layers as `layers`.
        mesh: of one dimension, or two: copies, and shards of each copy.
    """
    # Roots too give their whole weights up after each forward pass: else those of a pass without gradients would stay,
    # and the next optimizer step would not reach them.
    # Nothing is changed in place here.
    warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor", UserWarning)
    for module in (*language.layers, language, vision):
        fully_shard(module, mesh=mesh, reshard_after_forward=True)
    for root in (language, vision):
        for module in root.modules():
            if isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)  # gloo has no sum with a factor


def synchronise_next(module: nn.Module, *, is_last: bool) -> None:
    """Whether the next backward pass through a sharded module adds the gradients of all ranks, as the last one does."""
    if isinstance(module, FSDPModule):
        module.set_requires_gradient_sync(is_last)
        module.set_is_last_backward(is_last)


def gather(tensor: Tensor) -> Tensor:
    """The whole of a tensor that may be sharded; a collective where it is."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def clip_gradients(parameters: list[Tensor], largest: float) -> float:
    """Scale the gradients of all parameters to a norm over all ranks of at most `largest`; returns the norm before."""
    return float(gather(torch.nn.utils.clip_grad_norm_(parameters, largest)))
