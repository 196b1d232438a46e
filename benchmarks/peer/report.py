"""Medians of the rounds, the table that is printed, and the JSON that holds every single step."""

from __future__ import annotations

import json
import os
import statistics
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks.peer.setting import Setting, StepReport

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

    @property
    def wall_ratio(self) -> float:
        """Median step of TRL over median step of ours, seconds."""
        return median(self.theirs, "wall") / median(self.ours, "wall")

    @property
    def cpu_ratio(self) -> float:
        """The same in CPU-seconds."""
        return median(self.theirs, "cpu") / median(self.ours, "cpu")

    @property
    def ratio_without_processing(self) -> float:
        """Ratio of seconds if preparing pictures cost TRL nothing at all."""
        rest = [report.wall - (report.processing or 0.0) for report in self.theirs]
        return statistics.median(rest) / median(self.ours, "wall")


def median(reports: list[StepReport], name: str) -> float:
    """Median of a field over steps."""
    return float(statistics.median(getattr(report, name) for report in reports))


def format_table(comparisons: list[Comparison]) -> str:
    """Markdown table of medians, and the ratios below it."""
    lines = [HEADER]
    for comparison in comparisons:
        for name, reports in (("this project", comparison.ours), ("TRL", comparison.theirs)):
            lines.append(_row(comparison.setting, name, reports))
    lines.append("")
    for comparison in comparisons:
        lines.append(
            f"{comparison.setting.turns} turns: {comparison.wall_ratio:.1f} times faster ({comparison.cpu_ratio:.1f} "
            f"in CPU-seconds; {comparison.ratio_without_processing:.1f} if preparing pictures cost TRL nothing)."
        )
    return "\n".join(lines)


def write_json(path: Path, comparisons: list[Comparison], arguments: dict[str, Any]) -> None:
    """Write all steps, settings and versions."""
    value = {
        "versions": {name: version(name) for name in LIBRARIES},
        "cores": os.cpu_count(),
        "trl_arguments": arguments,
        "comparisons": [
            {
                "wall_ratio": comparison.wall_ratio,
                "cpu_ratio": comparison.cpu_ratio,
                "ratio_without_processing": comparison.ratio_without_processing,
                "setting": asdict(comparison.setting) | {"policy": None},
                "ours": [_plain(report) for report in comparison.ours],
                "trl": [_plain(report) for report in comparison.theirs],
            }
            for comparison in comparisons
        ],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def _row(setting: Setting, name: str, reports: list[StepReport]) -> str:
    tokens = median(reports, "tokens")
    timed = ("wall", "cpu", "generation", "processing", "update", "writing")
    apart = [field for field in timed if getattr(reports[0], field) is not None]
    seconds = [f"{median(reports, field):.2f}" if field in apart else "–" for field in timed]
    cells = [setting.turns, name, *seconds, f"{tokens / setting.episodes:.0f}"]
    return "| " + " | ".join(map(str, [*cells, f"{1e6 * median(reports, 'wall') / tokens:.0f}"])) + " |"


def _plain(report: StepReport) -> dict[str, Any]:
    values = asdict(report)
    values["turns"] = sorted(set(values["turns"]))
    del values["fixed_ids"]
    values["notes"].pop("env_turns", None)
    return values
