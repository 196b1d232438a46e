"""Weights of a mixture of experts, in the layout of the published checkpoints.

Checkpoints of Qwen3-VL-MoE hold the experts of a layer as one tensor, input dimension before output dimension:
`mlp.experts.gate_up_proj` (experts, hidden, 2 · inner) and `mlp.experts.down_proj` (experts, inner, hidden). In memory
transformers holds the transposed tensors: it transposes them at loading, but not back at saving. SGLang expects the
published layout. So all weights that leave a process go through this module.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

EXPERT_WEIGHTS = (".mlp.experts.gate_up_proj", ".mlp.experts.down_proj")


def is_mixture(model: Any) -> bool:
    """Whether a model has layers of experts."""
    return any(name.endswith(EXPERT_WEIGHTS) for name, _ in model.named_parameters())


def published_weights(model: Any) -> Iterator[tuple[str, Any]]:
    """Every parameter by its Hugging Face name, one at a time; those of experts are transposed copies."""
    for name, parameter in model.named_parameters():
        yield name, transpose_experts(name, parameter)


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
