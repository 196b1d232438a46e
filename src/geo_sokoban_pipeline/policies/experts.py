"""A mixture of experts: its forward pass in mixed precision."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor


def mix_experts(block: Any, hidden: Tensor) -> Tensor:
    """Output of a layer's mixture of experts; without autocast it equals the library's bit for bit.

    The library's router and experts do not follow autocast well: the router's product is rounded like any other, which
    changes the choice of experts wherever two scores are close, and the experts are multiplied in the type of their
    weights. Here the router computes in the type of its weights, and the experts in that of all other products.

    Args:
        block: `Qwen3VLMoeTextSparseMoeBlock`.
        hidden: (B, L, hidden).

    Returns:
        (B, L, hidden) in the type of products.
    """
    import torch
    from torch.func import functional_call

    rows, device = hidden.flatten(0, 1), hidden.device.type
    with torch.autocast(device, enabled=False):
        _, shares, chosen = block.gate(rows.to(block.gate.weight.dtype))
    if not torch.is_autocast_enabled(device):
        mixed = block.experts(rows, chosen, shares)
    else:
        kind = torch.get_autocast_dtype(device)
        rounded = {name: weight.to(kind) for name, weight in block.experts.named_parameters()}
        mixed = functional_call(block.experts, rounded, (rows.to(kind), chosen, shares))
    return mixed.view_as(hidden)
