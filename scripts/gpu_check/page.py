"""The page: what was measured, on what, against which peak, and against which plan."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from measuring import Case, Figures, Played, Work

# Dense bfloat16 with float32 sums, in 10^12 operations a second, from the makers' data sheets (half of what they give
# with sparsity). By a part of the device's name; the first that fits counts.
PEAKS = {"B200": 2250.0, "H200": 989.5, "H100 PCIe": 756.5, "H100": 989.5, "A100": 312.0, "L40S": 362.0, "L4": 121.0}


_ROWS = (
    "model", "backend", "checkpointing", "offload", "seconds of an update", "tokens per second",
    "model FLOPs of an update", "model FLOP utilisation", "peak memory, measured", "peak memory, planned",
    "memory of the allocator", "memory of the host", "attention",
    "log-probs' mean gap to products in float32", "last gradient norm",
)  # fmt: skip


@dataclass(frozen=True)
class Row:
    """A case of the page.

    Attributes:
        parameters: of the model.
        planned: bytes of the plan's peak.
        figures: None: nothing was measured.
        problem: why not.
        host_peak: bytes of the process's memory; 0: not measured.
    """

    case: Case
    parameters: int
    planned: int
    figures: Figures | None
    problem: str | None = None
    host_peak: int = 0


def describe_records(records: Sequence[Mapping[str, Any]], peak: float | None) -> str:
    """The page of what `measure` has found; of a case that ran more than once the last one counts.

    Args:
        peak: see `describe`.
    """
    cases = {record["case"]: record for record in records}
    known = next((record for record in cases.values() if "work" in record), None)
    if known is None:
        return "\n".join(f"{name}: {record['error']}" for name, record in cases.items())
    played = cases.get("rollout", {}).get("played")
    rows = [
        Row(
            Case(**record.get("options", {"name": name, "gradient_checkpointing": True})),
            record.get("parameters", 0),
            record.get("planned", 0),
            Figures(**record["figures"]) if "figures" in record else None,
            record.get("error"),
            record.get("host_peak", 0),
        )
        for name, record in cases.items()
        if name != "rollout"
    ]
    return describe(known["device"], Work(**known["work"]), Played(**played) if played else None, rows, peak)


def describe(device: str, work: Work, played: Played | None, rows: Sequence[Row], peak: float | None = None) -> str:
    """The page as Markdown.

    Args:
        device: its name.
        played: by the 2B or the thin model; None: it is left out.
        peak: of the device, in 10^12 operations a second; None: from the table, where it is there.
    """
    peak = peak or peak_of(device)
    thin = " --thin" if all(row.case.name == "thin" for row in rows) else ""
    about = [
        ("device", device),
        ("versions", f"torch {torch.__version__}, transformers {transformers.__version__}"),
        ("rollout", "–" if played is None else
         f"{work.episodes} episodes, {work.turns} responses of {work.tokens} tokens, "
         f"384×384 boards: {played.seconds:.2f} s, {played.sampled / played.seconds:,.0f} sampled tokens/s "
         f"(transformers engine), after {played.warm_up:.2f} s of a small one; attention: {_list(played.attention)}"),
        ("an update", f"{work.sequences} sequences of {work.length:,} tokens with an image each, the second half "
         f"trained; micro-batches of {work.batch_tokens:,} tokens"),
    ]  # fmt: skip
    table = "\n".join(f"| {what} | {found} |" for what, found in about)
    measured = [_measured(row, peak) for row in rows]
    lines = ["| |" + " |" * len(rows), "|---|" + "---|" * len(rows)]
    lines += [f"| {what} | " + " | ".join(found.get(what, "–") for found in measured) + " |" for what in _ROWS]
    heading = (
        f"Measured by `python scripts/gpu_check{thin}`: one rollout, then {work.updates} updates of each case, with"
    )
    return "\n".join(
        ["# Full size on a GPU", "", f"{heading} random weights.", "", "| what | found |", "|---|---|"]
        + [table, "", *lines, "", _NOTES]
    )


_NOTES = (
    "Weights and moments are float32, matrix products bfloat16. FLOPs are those that the model needs: two per weight "
    "of every matrix and token, attention, a backward pass as two forward passes, the output layer at trained tokens "
    "only. A value that is computed twice counts once. Planned memory is the count of the pre-flight "
    "(`preflight/memory.py`); a case whose plan is larger than the device, or "
    "than four fifths of the host, was not run."
)


def _measured(row: Row, peak: float | None) -> dict[str, str]:
    """Cells of a case; those that need its updates are missing where these were not run."""
    found = {
        "model": f"{row.case.name}, {row.parameters:,} weights",
        "backend": row.case.backend,
        "checkpointing": "on" if row.case.gradient_checkpointing else "off",
        "offload": "on" if row.case.offload else "off",
        "seconds of an update": row.problem or "not run",
        "peak memory, planned": _gb(row.planned),
        **({"memory of the host": _gb(row.host_peak)} if row.host_peak else {}),
    }
    figures = row.figures
    if figures is None:
        return found
    # The first step allocates and warms up, the median of the others is what a run sees.
    seconds = statistics.median(figures.seconds[1:] or figures.seconds)
    return found | {
        "seconds of an update": f"{seconds:.3f} (first {figures.seconds[0]:.3f})",
        "tokens per second": f"{figures.tokens / seconds:,.0f}",
        "model FLOPs of an update": f"{figures.step_flops / 1e12:.3g}·10¹²",
        "model FLOP utilisation": utilisation(figures.step_flops / seconds / 1e12, peak),
        "peak memory, measured": _gb(figures.peak_bytes),
        "memory of the allocator": _gb(figures.reserved_bytes) if figures.reserved_bytes else "–",
        "attention": _list(figures.attention),
        "log-probs' mean gap to products in float32": f"{figures.log_prob_gap:.2e}",
        "last gradient norm": f"{figures.gradient_norm:.3g}",
    }


def _list(names: Sequence[str]) -> str:
    return ", ".join(f"`{name}`" for name in names) or "–"


def _gb(count: int) -> str:
    return f"{count / 1e9:.2f} GB"


def utilisation(rate: float, peak: float | None) -> str:
    """Share of the peak, both in 10^12 operations a second."""
    if peak is None:
        return "not stated: the peak of this device is not known, give --peak-tflops"
    return f"{rate / peak:.1%} of {peak:,.1f}·10¹² a second (dense bfloat16)"


def peak_of(device: str) -> float | None:
    """Peak of a device by its name; None where it is not in the table."""
    return next((peak for part, peak in PEAKS.items() if part in device), None)
