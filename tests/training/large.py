"""Policies of many random weights that are never whole in the process that writes them, and peaks of memory."""

from __future__ import annotations

import gc
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from geo_sokoban_pipeline.policies.policy import Policy, empty_model, save_encoding
from geo_sokoban_pipeline.policies.tiny import build_config
from geo_sokoban_pipeline.policies.weights import WEIGHT_METADATA, published_specs, write_tensors
from task_options import TinyPolicyOptions


def write_random_policy(folder: Path, like: Policy, sizes: Mapping[str, Any]) -> None:
    """Write a policy with the tokenizer and the image processor of another one, tensor by tensor.

    Args:
        sizes: options of a tiny policy that differ from the defaults.
    """
    config = build_config(TinyPolicyOptions.model_validate(sizes), like.tokenizer)
    model = empty_model(config, "sdpa", torch.float32)
    save_encoding(Policy(model, like.tokenizer, like.image_processor), folder)
    generator = torch.Generator().manual_seed(0)
    specs = published_specs(model)

    def read(name: str) -> torch.Tensor:
        shape = specs[name].shape
        return torch.ones(shape) if len(shape) == 1 else 0.02 * torch.randn(shape, generator=generator)

    write_tensors(folder / "model.safetensors", specs, read, WEIGHT_METADATA)


def forget_peak(worker: object = None) -> int:
    """Resident bytes of this process, from which its peak is counted anew."""
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    return _status("VmRSS")


def peak(worker: object = None) -> int:
    """The most resident bytes of this process since; a rank's worker is not asked."""
    return _status("VmHWM")


def _status(entry: str) -> int:
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(f"{entry}:"))
