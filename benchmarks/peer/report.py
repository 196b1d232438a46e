"""Medians of the rounds, the table that is printed, and the JSON that holds every single step."""

from __future__ import annotations

import os
import statistics
from dataclasses import asdict, dataclass
from importlib.metadata import version
from typing import Any

from benchmarks.peer.setting import Setting, StepReport

Found = dict[str, Any]
LIBRARIES = ("torch", "transformers", "trl", "accelerate")
HEADER = (
    "| turns | system | step, s | CPU, s | generation, s | of it pictures, s | update, s | writing, s "
    "| tokens per episode | µs per token |\n|---|---|---|---|---|---|---|---|---|---|"
)


@dataclass(frozen=True)
class Comparison:
    """Rounds of one setting, the warm-up left out: reports of both systems in the order they were done."""

    setting: Setting
    ours: list[StepReport]
    theirs: list[StepReport]


def library_versions() -> dict[str, str]:
    """Versions of what both systems are built on, and of TRL."""
    return {name: version(name) for name in LIBRARIES}


def summarize(comparisons: list[Comparison], arguments: dict[str, Any], versions: dict[str, str]) -> Found:
    """All steps, settings, ratios and versions as JSON values.

    The ratios are medians of TRL over medians of this project: seconds, CPU-seconds, and seconds if preparing pictures
    cost TRL nothing at all.
    """
    return {
        "versions": versions,
        "cores": os.cpu_count(),
        "running": comparisons[0].theirs[0].running,
        "trl_arguments": arguments,
        "comparisons": [_summarize(comparison) for comparison in comparisons],
    }


def format_table(found: Found) -> str:
    """Markdown table of medians, and the ratios below it."""
    lines = [HEADER]
    for comparison in found["comparisons"]:
        for name, key in (("this project", "ours"), ("TRL", "trl")):
            lines.append(_row(comparison["setting"], name, comparison[key]))
    lines.append("")
    for comparison in found["comparisons"]:
        lines.append(
            f"- {comparison['setting']['turns']} turns: {comparison['wall_ratio']:.1f} times faster "
            f"({comparison['cpu_ratio']:.1f} in CPU-seconds; {comparison['ratio_without_processing']:.1f} if preparing "
            "pictures cost TRL nothing)."
        )
    return "\n".join(lines)


def render_docs(found: Found) -> str:
    """The section of `docs/benchmarks.md`."""
    versions = ", ".join(f"{name} {number}" for name, number in found["versions"].items())
    threads, turns = (found["comparisons"][0]["setting"][name] for name in ("threads", "turns"))
    steps = len(found["comparisons"][0]["ours"])
    arguments = ", ".join(f"`{name}={value}`" for name, value in found["trl_arguments"].items())
    return "\n\n".join(
        [
            format_table(found),
            f"Medians of {steps} steps on {found['cores']} cores, {threads} thread{'s' * (threads > 1)} each; "
            f"{versions}. Both systems report: {found['running']}.",
            f"<details><summary>Settings of TRL's `GRPOConfig` at {turns} turns</summary>\n\n{arguments}\n\n</details>",
        ]
    )


def _summarize(comparison: Comparison) -> Found:
    ours, theirs = ([_plain(report) for report in reports] for reports in (comparison.ours, comparison.theirs))
    rest = statistics.median(report["wall"] - (report["processing"] or 0.0) for report in theirs)
    return {
        "wall_ratio": _median(theirs, "wall") / _median(ours, "wall"),
        "cpu_ratio": _median(theirs, "cpu") / _median(ours, "cpu"),
        "ratio_without_processing": rest / _median(ours, "wall"),
        "setting": asdict(comparison.setting) | {"policy": None},
        "ours": ours,
        "trl": theirs,
    }


def _median(reports: list[Found], name: str) -> float:
    return float(statistics.median(report[name] for report in reports))


def _row(setting: Found, name: str, reports: list[Found]) -> str:
    tokens, episodes = _median(reports, "tokens"), setting["groups"] * setting["group_size"]
    timed = ("wall", "cpu", "generation", "processing", "update", "writing")
    seconds = [f"{_median(reports, field):.2f}" if reports[0][field] is not None else "–" for field in timed]
    cells = [setting["turns"], name, *seconds, f"{tokens / episodes:.0f}"]
    return "| " + " | ".join(map(str, [*cells, f"{1e6 * _median(reports, 'wall') / tokens:.0f}"])) + " |"


def _plain(report: StepReport) -> Found:
    values = asdict(report)
    values["turns"] = sorted(set(values["turns"]))
    del values["fixed_ids"]
    values["notes"].pop("env_turns", None)
    return values
