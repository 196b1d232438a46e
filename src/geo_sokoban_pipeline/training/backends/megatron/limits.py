"""Which models Megatron-Core trains, in which layouts; it is asked before any work, and imports no library."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

from geo_sokoban_pipeline.config.grpo import MegatronOptions


def find_obstacles(text: Mapping[str, Any], options: MegatronOptions, processes: int) -> list[str]:
    """Why Megatron-Core cannot train a model in a layout, each with the numbers and what to take instead.

    Args:
        text: `text_config` of the model's `config.json`.
        processes: number of ranks.
    """
    ranks, found = options.tensor_parallel, []
    if find_spec("megatron") is None or find_spec("megatron.core") is None:
        found.append("needs Megatron-Core: pip install 'geo-sokoban-pipeline[megatron]', or set backend=fsdp")
    if experts := text.get("num_experts"):
        found.append(
            f"with a mixture of {experts} experts: Megatron-Core trains them with Transformer Engine alone; set "
            "backend=fsdp"
        )
    if processes % ranks:
        found.append(f"with megatron.tensor_parallel={ranks}: it does not divide processes={processes}")
    for key, what in (
        ("num_attention_heads", "query heads"),
        ("num_key_value_heads", "key and value heads"),
        ("vocab_size", "rows of the vocabulary"),
        ("intermediate_size", "numbers within an MLP"),
    ):
        if (count := text.get(key)) is not None and count % ranks:
            fitting = max(size for size in range(1, ranks) if count % size == 0)
            found.append(
                f"with megatron.tensor_parallel={ranks}: it does not divide the model's {count} {what}; take {fitting}"
            )
    rotary = text.get("rope_parameters") or text.get("rope_scaling") or {}
    for name, value, wanted in (
        ("attention_bias", text.get("attention_bias", False), False),
        ("hidden_act", text.get("hidden_act", "silu"), "silu"),
        ("rope_type", rotary.get("rope_type", "default"), "default"),
    ):
        if value != wanted:
            found.append(f"with {name}={value} in the model's config.json: it has {wanted} alone; set backend=fsdp")
    return [f"backend=megatron {text}" for text in found]


def check_limits(text: Mapping[str, Any], options: MegatronOptions, processes: int) -> None:
    """See that Megatron-Core can train a model in a layout; arguments are those of `find_obstacles`.

    Raises:
        ValueError: it cannot.
    """
    if obstacles := find_obstacles(text, options, processes):
        raise ValueError("\n".join(obstacles))
