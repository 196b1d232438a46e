"""A mixture of experts: its forward pass in mixed precision, and its weights in the layout of published checkpoints.

Checkpoints of Qwen3-VL-MoE hold the experts of a layer as one tensor, input dimension before output dimension:
`mlp.experts.gate_up_proj` (experts, hidden, 2 · inner) and `mlp.experts.down_proj` (experts, inner, hidden). In memory
transformers holds the transposed tensors: it transposes them at loading, but not back at saving. SGLang expects the
published layout. So all weights that leave a process go through this module.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

EXPERT_WEIGHTS = (".mlp.experts.gate_up_proj", ".mlp.experts.down_proj")


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
    output: Tensor = mixed.view_as(hidden)
    return output


def transpose_experts(name: str, tensor: Any) -> Any:
    """Convert a weight of experts between the two layouts; any other weight is returned unchanged."""
    return tensor.detach().transpose(1, 2).contiguous() if name.endswith(EXPERT_WEIGHTS) else tensor


def check_orientation(config: Any) -> None:
    """Check that shapes identify the layout of a mixture of experts, because transformers goes by shapes alone.

    Args:
        config: of the model; one without experts always passes.

    Raises:
        ValueError: a weight of the experts is square.
    """
    text = config.text_config
    inner, hidden = getattr(text, "moe_intermediate_size", None), text.hidden_size
    if inner is not None and hidden in (inner, 2 * inner):
        raise ValueError(
            f"hidden_size={hidden} with moe_intermediate_size={inner}: weights of the experts are square, so their "
            "shapes do not show the layout of a checkpoint. Take a model with other sizes."
        )
