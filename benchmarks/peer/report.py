"""Ratios over the rounds, the tables that are printed, and the JSON that holds every single step."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from typing import Any

from benchmarks.peer.setting import NAMES, Setting, StepReport, System

Found = dict[str, Any]
LIBRARIES = ("torch", "transformers", "trl", "accelerate")
HEADER = (
    "| turns | system | step, s | step, CPU-s | generation | of it images | update | writing "
    "| tokens per episode | µs per token |\n|---|---|---|---|---|---|---|---|---|---|"
)
STEPS_HEADER = (
    f"| turns | step | {' | '.join(f'{name}: s | CPU-s' for name in NAMES.values())} | CPU-s of TRL / this project |\n"
    f"|---|---|{'---|' * (2 * len(NAMES) + 1)}"
)


@dataclass(frozen=True)
class Comparison:
    """Steps of one setting by system, in the order in which they were done; the warm-up is left out."""

    setting: Setting
    steps: dict[System, list[StepReport]]


def library_versions() -> dict[str, str]:
    """Versions of what both systems are built on, and of TRL."""
    return {name: version(name) for name in LIBRARIES}


def summarize(comparisons: list[Comparison], arguments: dict[str, Any], versions: dict[str, str]) -> Found:
    """All steps, settings, ratios and versions as JSON values.

    A ratio is TRL's step over the step of the same round here; `median`, `low` and `high` are over the rounds. `wall`
    is of seconds, all others of CPU-seconds: `whole`; `without_images`, if preparing images cost TRL nothing at all;
    `cache_off`, to this project without its cache across turns; `cache_off_without_images`, both.
    """
    return {
        "versions": versions,
        "running": comparisons[0].steps["TRL"][0].running,
        "trl_arguments": arguments,
        "comparisons": [_summarize(comparison) for comparison in comparisons],
    }


def format_table(found: Found) -> str:
    """Markdown: medians, the ratios, and every step."""
    lines = [HEADER]
    for comparison in found["comparisons"]:
        lines += [_row(comparison["setting"], NAMES[system], steps) for system, steps in comparison["steps"].items()]
    lines.append("")
    for comparison in found["comparisons"]:
        ratios = comparison["ratios"]
        lines.append(
            f"- {comparison['setting']['turns']} turns: TRL takes {describe_ratio(ratios['whole'])} times the "
            f"CPU-seconds of this project ({describe_ratio(ratios['wall'])} times its seconds). It takes "
            f"{describe_ratio(ratios['without_images'])} times without its preparation of images, "
            f"{describe_ratio(ratios['cache_off'])} times against this project with its cache off, and "
            f"{describe_ratio(ratios['cache_off_without_images'])} times with both changes."
        )
    lines += ["", "Every step:", "", STEPS_HEADER]
    for comparison in found["comparisons"]:
        lines += _step_rows(comparison)
    return "\n".join(lines)


def describe_ratio(ratio: Found) -> str:
    """Median with the range over the rounds."""
    return f"{ratio['median']:.1f} ({ratio['low']:.1f}–{ratio['high']:.1f})"


def render_docs(found: Found) -> str:
    """The section of `docs/benchmarks.md`."""
    versions = ", ".join(f"{name} {found['versions'][name]}" for name in ("trl", "accelerate"))
    setting, steps = found["comparisons"][0]["setting"], found["comparisons"][0]["steps"]
    arguments = ", ".join(f"`{name}={value}`" for name, value in found["trl_arguments"].items())
    return "\n\n".join(
        [
            format_table(found),
            f"The first table has medians of {len(steps['TRL'])} steps, the parts of a step in CPU-seconds. A ratio is "
            "the median over pairs of steps, with the lowest and the highest. Seconds above CPU-seconds mean that the "
            "machine did something else as well. All three processes report: "
            f"{found['running']}. {versions}.",
            f"<details><summary>Settings of TRL's `GRPOConfig` at {setting['turns']} turns</summary>\n\n{arguments}\n\n"
            "</details>",
        ]
    )


def _summarize(comparison: Comparison) -> Found:
    steps = {system: [_plain(report) for report in reports] for system, reports in comparison.steps.items()}

    def over(system: System, cost: Callable[[Found], float], base: str = "cpu") -> Found:
        pairs = zip(steps["TRL"], steps[system], strict=True)
        ratios = [cost(theirs) / own[base] for theirs, own in pairs]
        return {"median": statistics.median(ratios), "low": min(ratios), "high": max(ratios)}

    def whole(step: Found) -> float:
        return float(step["cpu"])

    def without_images(step: Found) -> float:
        return float(step["cpu"] - step["processing"])

    return {
        "ratios": {
            "whole": over("ours", whole),
            "wall": over("ours", lambda step: float(step["wall"]), "wall"),
            "without_images": over("ours", without_images),
            "cache_off": over("cache off", whole),
            "cache_off_without_images": over("cache off", without_images),
        },
        "setting": asdict(comparison.setting) | {"policy": None},
        "steps": steps,
    }


def _median(reports: Sequence[Found], name: str) -> float:
    return float(statistics.median(report[name] for report in reports))


def _row(setting: Found, name: str, reports: list[Found]) -> str:
    tokens, episodes = _median(reports, "tokens"), setting["groups"] * setting["group_size"]
    timed = ("wall", "cpu", "generation", "processing", "update", "writing")
    seconds = [f"{_median(reports, field):.2f}" if reports[0][field] is not None else "–" for field in timed]
    cells = [setting["turns"], name, *seconds, f"{tokens / episodes:.0f}"]
    return "| " + " | ".join(map(str, [*cells, f"{1e6 * _median(reports, 'cpu') / tokens:.0f}"])) + " |"


def _step_rows(comparison: Found) -> list[str]:
    steps: dict[str, list[Found]] = comparison["steps"]
    rows = []
    for number, by_system in enumerate(zip(*(steps[system] for system in NAMES), strict=True), start=1):
        times = " | ".join(f"{step['wall']:.2f} | {step['cpu']:.2f}" for step in by_system)
        ratio = steps["TRL"][number - 1]["cpu"] / steps["ours"][number - 1]["cpu"]
        rows.append(f"| {comparison['setting']['turns']} | {number} | {times} | {ratio:.1f} |")
    return rows


def _plain(report: StepReport) -> Found:
    values = asdict(report)
    values["turns"] = sorted(set(values["turns"]))
    del values["fixed_ids"], values["levels"]
    values["notes"].pop("env_turns", None)
    return values
