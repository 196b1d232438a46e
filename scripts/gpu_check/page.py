"""The page: what was measured, on what, and against which peak."""

from __future__ import annotations

import statistics

import torch
import transformers
from measuring import Figures, Work

from geo_sokoban_pipeline.policies.policy import Policy

# Dense bfloat16 with float32 sums, in 10^12 operations a second, from the makers' data sheets (half of what they give
# with sparsity). By a part of the device's name; the first that fits counts.
PEAKS = {"B200": 2250.0, "H200": 989.5, "H100 PCIe": 756.5, "H100": 989.5, "A100": 312.0, "L40S": 362.0, "L4": 121.0}


def describe(name: str, policy: Policy, work: Work, figures: Figures, peak: float | None = None) -> str:
    """The page as Markdown.

    Args:
        name: of the sizes.
        peak: of the device, in 10^12 operations a second; None: from the table, where it is there.
    """
    device, peak = _device(policy), peak or peak_of(_device(policy))
    # The first step allocates and warms up; the median of the others is what a run sees.
    step = statistics.median(figures.update_seconds[1:] or figures.update_seconds)
    rate = figures.step_flops / step / 1e12
    parameters = sum(parameter.numel() for parameter in policy.model.parameters())
    rows = [
        ("device", device),
        ("versions", f"torch {torch.__version__}, transformers {transformers.__version__}"),
        ("model", f"{name}: {parameters:,} random weights in float32, matrix products in bfloat16"),
        ("rollout", f"{work.episodes} episodes, {work.turns} responses of {work.tokens} tokens, 384×384 boards"),
        ("rollout time", f"{figures.rollout_seconds:.2f} s, {figures.sampled / figures.rollout_seconds:,.0f} sampled "
         "tokens/s (transformers engine)"),
        ("an update", f"{figures.tokens:,} tokens, {figures.scored:,} of them trained, {figures.images} images"),
        ("update time", f"{step:.3f} s (median of steps 2 to {work.updates}; first {figures.update_seconds[0]:.3f} s), "
         f"{figures.tokens / step:,.0f} tokens/s"),
        ("model FLOPs of an update", f"{figures.step_flops / 1e12:.3g}·10¹², {rate:,.3g}·10¹² a second"),
        ("model FLOP utilisation", utilisation(rate, peak)),
        ("peak memory", f"{figures.peak_bytes / 1e9:.2f} GB"),
        ("gradient norm of the last update", f"{figures.gradient_norm:.3g}"),
    ]  # fmt: skip
    table = "\n".join(f"| {what} | {found} |" for what, found in rows)
    return (
        f"# Full size on a GPU\n\nMeasured by `python scripts/gpu_check{' --thin' if name == 'thin' else ''}`: one "
        f"rollout, then {work.updates} updates on its episodes.\n\n| what | found |\n|---|---|\n{table}\n\n"
        "FLOPs are those that the model needs: two per weight of every matrix and token, attention, a backward pass as "
        "two forward passes, the output layer at trained tokens only. What is computed twice counts once."
    )


def utilisation(rate: float, peak: float | None) -> str:
    """Share of the peak, both in 10^12 operations a second."""
    if peak is None:
        return "not stated: the peak of this device is not known, give --peak-tflops"
    return f"{rate / peak:.1%} of {peak:,.1f}·10¹² a second (dense bfloat16)"


def peak_of(device: str) -> float | None:
    """Peak of a device by its name; None where it is not in the table."""
    return next((peak for part, peak in PEAKS.items() if part in device), None)


def _device(policy: Policy) -> str:
    if policy.model.device.type == "cuda":
        return str(torch.cuda.get_device_name())
    return f"CPU, {torch.get_num_threads()} threads of torch"
