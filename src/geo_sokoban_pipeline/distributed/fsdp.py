"""Sharding of a policy's weights by FSDP2: each rank holds a part of every parameter, gradient and moment.

There are two roots: the language model with its output head, whose layers are inner units, and the whole vision tower.
Images pass the tower in batches of equal size, so its blocks are called in numbers that differ by rank and cannot be
units. Gradients are summed, not averaged: losses are divided by the counts of the whole step already.

Where products have a type of their own, the matrices of the language model are gathered in it: every pass would round
them so, and results stay the same bit for bit. Weights that no pass rounds are gathered as they are.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

from geo_sokoban_pipeline.distributed.slices import copy_weights, own_part, read_weights, split_rows, with_part
from geo_sokoban_pipeline.policies.lora import matrices_of
from geo_sokoban_pipeline.policies.policy import Policy, attach_adapter, empty_model, replace_weights, use_types
from geo_sokoban_pipeline.policies.qwen3_vl import LanguageModel, is_exact


def shard_policy(
    policy: Policy, mesh: DeviceMesh, *, is_trained: bool = True, offload: bool = False, reduce_dtype: str = "float32"
) -> Policy:
    """A policy of whose weights each rank holds a part; the given one is unchanged.

    The model is sharded before it has weights, and each rank fills in its own rows: no rank has the whole model.

    Args:
        policy: with weights, or empty (`load_empty`): then they are read from its folder.
        is_trained: otherwise the weights are stored in the types in which they are used, and have no gradients.
        offload, reduce_dtype: see `shard_modules`.
    """
    source = policy.model
    model = empty_model(source.config, source.config._attn_implementation, source.dtype, source.generation_config)
    sharded = replace(policy, model=model, planned_device=mesh.device_type)
    if policy.adapter is not None:
        attach_adapter(sharded, policy.adapter)
    for own, other in zip(model.parameters(), source.parameters(), strict=True):
        own.requires_grad_(is_trained and other.requires_grad)
    if not is_trained:
        types = use_types(sharded)
        replace_weights(model, lambda name, weight: weight.to(types[name]))
    network, products = sharded.network, gathered_type(sharded) if is_trained else None
    shard_modules(network.language, network.vision, mesh, offload=offload, products=products, reduce_dtype=reduce_dtype)
    device = "cpu" if offload else mesh.device_type
    for root in (network.language, network.vision):
        root._apply(lambda tensor: torch.empty_like(tensor, device=device) if tensor.is_meta else tensor)
    parameters = dict(model.named_parameters())
    if not policy.is_empty:
        copy_weights(parameters, dict(source.named_parameters()))
    else:
        assert policy.folder is not None  # an empty policy is that of a folder
        read_weights(parameters, policy.folder)
        if policy.adapter is not None:
            fresh = {name: policy.adapter.first_value(name, like) for name, like in matrices_of(parameters).items()}
            copy_weights(matrices_of(parameters), fresh)
    return sharded


def move_shards(policy: Policy, device: torch.device | str) -> None:
    """Move this rank's part of a sharded policy to a device; nothing is exchanged."""
    for root in (policy.network.language, policy.network.vision):
        root.to(device)


def device_of_mesh(mesh: DeviceMesh) -> torch.device:
    """The device on which this rank computes."""
    return (
        torch.device("cpu")
        if mesh.device_type == "cpu"
        else torch.device(mesh.device_type, torch.cuda.current_device())
    )


def gathered_type(policy: Policy) -> torch.dtype | None:
    """The type in which matrices of a trained policy are gathered; None: in their own.

    Those that an adapter leaves frozen have the type of products already.
    """
    return None if policy.compute is None or policy.adapter is not None else getattr(torch, policy.compute)


def shard_modules(
    language: Any,
    vision: nn.Module,
    mesh: DeviceMesh,
    *,
    offload: bool = False,
    products: torch.dtype | None = None,
    reduce_dtype: str = "float32",
) -> None:
    """Shard the weights of a policy in place; the parameters become DTensors.

    Args:
        language: with its layers as `layers`.
        mesh: of one dimension, or two: copies, and shards of each copy.
        offload: keep shards and gradients in the memory of the CPU; a unit's weights are on the device of the mesh
            while it computes.
        products: type in which the matrices of `LanguageModel` are gathered; None: all weights in their own.
        reduce_dtype: in which gradients of these matrices are added over the ranks.
    """
    offloads = CPUOffloadPolicy(pin_memory=mesh.device_type != "cpu") if offload else OffloadPolicy()
    # Roots too give their whole weights up after each forward pass: else those of a pass without gradients would stay,
    # and the next optimizer step would not reach them.
    shard = partial(fully_shard, mesh=mesh, reshard_after_forward=True, offload_policy=offloads)
    # Nothing is changed in place here.
    warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor", UserWarning)
    if products is None:
        for layer in language.layers:
            shard(layer)
    else:
        _shard_in_types(language, shard, MixedPrecisionPolicy(products, getattr(torch, reduce_dtype), None, False))
    for root in (language, vision):
        shard(root)
        for module in root.modules():
            if isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)  # gloo has no sum with a factor


def _shard_in_types(language: LanguageModel, shard: Callable[..., Any], mixed: MixedPrecisionPolicy) -> None:
    """Shard layers and output head as units of one type each; weights that no pass rounds are left to the root.

    Norms and routers are gathered with the root at the beginning of a pass, as they are. So are embeddings that are
    the output head as well; others are a unit that no backward pass gathers, as it needs the ids alone.
    """
    exact = [module for layer in language.layers for module in layer.modules() if is_exact(module)]
    language.exact = nn.ModuleList(exact)  # a path on which the root finds them
    ignored = {parameter for module in exact for parameter in module.parameters(recurse=False)}
    for layer in language.layers:
        shard(layer, mp_policy=mixed, ignored_params=ignored)
    if language.head.linear.weight is not language.embed_tokens.weight:
        shard(language.head, mp_policy=mixed)
        shard(language.embed_tokens)
        language.embed_tokens.set_unshard_in_backward(False)


def synchronise_next(module: nn.Module, *, is_last: bool) -> None:
    """Whether the next backward pass through a sharded module adds the gradients of all ranks, as the last one does."""
    if isinstance(module, FSDPModule):
        module.set_requires_gradient_sync(is_last)
        module.set_is_last_backward(is_last)


def gather(tensor: Tensor) -> Tensor:
    """The whole of a tensor that may be sharded, on the device that computes; a collective where it is sharded."""
    if not isinstance(tensor, DTensor):
        return tensor
    return tensor.to(tensor.device_mesh.device_type).full_tensor()


def clip_gradients(parameters: list[Tensor], largest: float) -> float:
    """Scale the gradients of all parameters to a norm over all ranks of at most `largest`; returns the norm before."""
    return float(gather(torch.nn.utils.clip_grad_norm_(parameters, largest)))


@torch.no_grad()
def map_matrices(function: Callable[[Tensor], Tensor], matrices: Sequence[DTensor]) -> Iterator[tuple[int, Tensor]]:
    """Results of a function of whole matrices that are sharded by rows; a collective.

    The ranks of a copy share the work: each receives the rows of one matrix at a time, and sends the rows of its result
    back. Matrices of similar size are computed side by side.

    Args:
        function: its result has the shape of the matrix.

    Yields:
        Index of a matrix, and its result in float32, sharded as the matrix is.
    """
    mesh = matrices[0].device_mesh
    group, size, place = mesh.get_group(mesh.ndim - 1), mesh.size(-1), mesh.get_local_rank(mesh.ndim - 1)
    order = sorted(range(len(matrices)), key=lambda index: (-matrices[index].numel(), index))
    for first in range(0, len(order), size):
        chosen = [matrices[index] for index in order[first : first + size]]
        parts = [own_part(matrix).to(mesh.device_type, torch.float32) for matrix in chosen]
        sent = [*(part.numel() for part in parts), *[0] * (size - len(chosen))]
        received = [0] * size
        if place < len(chosen):
            rows, columns = chosen[place].shape
            received = [columns * len(part) for part in split_rows(rows, size)]
        given = torch.cat([part.flatten() for part in parts])
        whole = given.new_empty(sum(received))
        dist.all_to_all_single(whole, given, received, sent, group=group)
        if place < len(chosen):
            whole = function(whole.view(chosen[place].shape)).flatten()
        dist.all_to_all_single(given, whole, sent, received, group=group)
        for index, part, own in zip(order[first:], parts, given.split(sent), strict=False):
            yield index, with_part(own.view_as(part).to(matrices[index].device), matrices[index])
