"""Weights of a mixture of experts, in the layout of the published checkpoints.

Checkpoints of Qwen3-VL-MoE hold the experts of a layer as one tensor, input dimension before output dimension:
`mlp.experts.gate_up_proj` (experts, hidden, 2 · inner) and `mlp.experts.down_proj` (experts, inner, hidden). In memory
transformers holds them the other way round; it turns them at loading and does not turn them back at saving. SGLang
expects the published layout. All weights that leave a process are therefore those of this module.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

EXPERT_WEIGHTS = (".mlp.experts.gate_up_proj", ".mlp.experts.down_proj")


def is_mixture(model: Any) -> bool:
    """Whether a model has layers of experts."""
    return any(name.endswith(EXPERT_WEIGHTS) for name, _ in model.named_parameters())


def published_weights(model: Any) -> Iterator[tuple[str, Any]]:
    """Every parameter by its Hugging Face name, one at a time; those of experts are turned copies."""
    for name, parameter in model.named_parameters():
        yield name, turn_experts(name, parameter)


def turn_experts(name: str, tensor: Any) -> Any:
    """A weight from one layout to the other; what is no weight of experts comes back as it is."""
    return tensor.detach().transpose(1, 2).contiguous() if name.endswith(EXPERT_WEIGHTS) else tensor


def check_orientation(config: Any) -> None:
    """See that the layout of a mixture of experts can be told from its shapes, which is all that transformers looks at.

    Args:
        config: of the model; nothing is checked where it has no experts.

    Raises:
        ValueError: a weight of its experts is square.
    """
    text = config.text_config
    inner, hidden = getattr(text, "moe_intermediate_size", None), text.hidden_size
    if inner is not None and hidden in (inner, 2 * inner):
        raise ValueError(
            f"hidden_size={hidden} with moe_intermediate_size={inner}: weights of the experts are square, so a "
            "checkpoint does not show in which layout it holds them. Take a model with other sizes."
        )
