"""Comparison of several training runs: one HTML page with overlaid curves, differences of settings, evaluations, and
paired tests over the shared evaluation prompts.

The other runs are compared with the first one. The paired test over the shared prompts decides whether two runs differ,
never the rates alone.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from geo_sokoban_pipeline.envs.base import Task
from geo_sokoban_pipeline.evaluation.metrics import PairedTest
from geo_sokoban_pipeline.formats import DASH, describe_policy, joined, points
from geo_sokoban_pipeline.reporting.charts import Chart, Series, Shape, make_chart
from geo_sokoban_pipeline.reporting.curves import COLOURS, WINDOW, small_chart, smoothed_points, validation_series
from geo_sokoban_pipeline.reporting.facts import StoredRun, compare_policies, name_shared
from geo_sokoban_pipeline.reporting.pages import render_page
from geo_sokoban_pipeline.reporting.report_tables import evaluation_rows, powers_of
from geo_sokoban_pipeline.tasks import task_or_plain

# Metric, title, note, whether its values are shares. Validations have lines of their own.
_CURVES = (
    ("rollout/raw_reward", "Training reward", "Mean per episode.", False),
    ("train/entropy_loss", "Entropy", "Nats per token.", False),
    ("train/ppo_kl", "KL to the rollout policy", "Mean |log-ratio| per token, in the update.", False),
    ("train/kl_loss", "KL to the reference policy", "Nats per token.", False),
    ("train/reverse_kl", "KL to the teacher", "Nats per token.", False),
    ("train/lr-pg_0", "Learning rate", "As scheduled.", False),
    ("train/grad_norm", "Gradient norm", "Before clipping.", False),
    ("rollout/response_len/mean", "Response tokens", "Mean per episode.", False),
    ("rollout/trained_ratio", "Kept by the group filter", "Share of the episodes.", True),
)


@dataclass(frozen=True, kw_only=True)
class ComparedRun(StoredRun):
    """Stored values of one run; `settings`: fingerprint of its newest checkpoint, flat."""

    settings: dict[str, Any]


@dataclass(frozen=True)
class RunLine:
    """One run on the page: its name and colour, and its final policy against that of the first run.

    Attributes:
        test: None: it is the first run, or they share no evaluation prompt.
        verdict: in words.
    """

    run: ComparedRun
    name: str
    colour: str
    test: PairedTest | None
    verdict: str


def build_comparison(runs: Sequence[ComparedRun]) -> str:
    """The page, HTML5 as text, to be stored as UTF-8; it is self-contained.

    Args:
        runs: two or more; the others are compared with the first one.
    """
    several = (
        len({run.run for run in runs}) > 1
    )  # names are run ids, with the pipeline before them if there are several
    names = [f"{run.run}/{run.run_id}" if several else run.run_id for run in runs]
    tests = [None, *(compare_policies(runs[0], run) for run in runs[1:])]
    verdicts = map(_judge, tests)
    lines = [RunLine(*facts) for facts in zip(runs, names, COLOURS * len(runs), tests, verdicts, strict=False)]
    task = task_or_plain(runs[0].summary.get("task") or runs[0].run.removeprefix("train_"))
    # Rows of the runs' policies under their names and in their colours.
    rows = [
        {**row, "label": f"{line.name}: {row['label']}", "colour": line.colour}
        for line in lines
        for row in evaluation_rows(line.run.summary)
        if row["is_policy"]
    ]
    stale = [f"The evaluation of {line.name} is of {line.run.stale}." for line in lines if line.run.stale]
    small = [small_chart(title, _curves(lines, metric), note, shares) for metric, title, note, shares in _CURVES]
    return render_page(
        "comparison.html.j2",
        lines=lines,
        words=task.words,
        headline=" ".join([write_verdict(lines, task), *stale]),
        charts=_charts(lines, task),
        small=[chart for chart in small if chart is not None],
        differences=list_differences(runs),
        rows=sorted(rows, key=lambda row: "after GRPO" not in row["label"]),
        ks=powers_of(rows),
    )


def list_differences(runs: Sequence[ComparedRun]) -> list[tuple[str, list[str]]]:
    """(setting, value in each run) of the settings that differ, sorted by name."""
    tables = [_settings(run) for run in runs]
    names = sorted({name for table in tables for name in table})
    written = [(name, [_write(table[name]) if name in table else DASH for table in tables]) for name in names]
    return [(name, values) for name, values in written if len(set(values)) > 1]


def write_verdict(lines: Sequence[RunLine], task: Task) -> str:
    """One sentence with the result of the paired tests."""
    first, *others = lines
    found: dict[str, list[str]] = {}
    for line in others:
        found.setdefault(line.verdict, []).append(line.name)
    if len(others) > 1:
        parts = [f"{joined(group)} {'is' if len(group) == 1 else 'are'} {text}" for text, group in found.items()]
        return f"Compared with {first.name}, {'; '.join(parts)}."
    name = others[0].name
    if (test := others[0].test) is None:
        return f"{name} and {first.name} have no evaluation on the same {task.words.units}."
    verdict = f"{others[0].verdict} than {first.name}".replace("different than", "different from")
    difference = points(test.difference, test.low, test.high)
    return f"On the same {name_shared(test, task)}, {name} is {verdict}: {difference}."


def _judge(test: PairedTest | None) -> str:
    if test is None:
        return "not comparable"
    if not test.is_change:
        return "not significantly different"
    return "better" if test.difference > 0 else "worse"


def _settings(run: ComparedRun) -> dict[str, Any]:
    """Stored settings, and length, evaluation prompts and commit of the run."""
    further = {
        "data": run.summary.get("data_id"),
        "evaluation prompts": run.summary.get("prompts"),
        "evaluation prompts, content hash": run.summary.get("prompts_hash"),
        "evaluated policy": describe_policy(run.summary, run.policies[-1]) if run.policies else None,
        "commit": run.time and (run.time.last.get("commit") or None),
    }
    known = {name: value for name, value in further.items() if value is not None}
    return {**run.settings, "iterations stored": len(run.metrics), **known}


def _write(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 80 else f"{text[:79]}…"


def _curves(lines: Sequence[RunLine], metric: str) -> list[Series]:
    return [Series(line.name, line.colour, smoothed_points(line.run.metrics, metric)) for line in lines]


def _charts(lines: Sequence[RunLine], task: Task) -> list[Chart]:
    rate, shape = task.words.rate, Shape("iterations trained", y_range=(0.0, 1.0), shares=True)
    validation = [
        replace(validation_series(line.run.metrics, "sampled", line.name, line.colour), spread=()) for line in lines
    ]
    training, note = _curves(lines, "rollout/success_rate"), f"Means of {WINDOW} iterations where there are many."
    drawn = (
        make_chart(f"{rate.capitalize()} on validation {task.words.units}, sampled", validation, shape),
        make_chart(f"Training {rate}", training, shape, note),
    )
    return [chart for chart in drawn if chart is not None]
