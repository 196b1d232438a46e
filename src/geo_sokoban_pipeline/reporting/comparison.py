"""Comparison of several training runs: one HTML page with overlaid curves, differences of settings, evaluations, and
paired tests over the shared evaluation prompts.

The other runs are compared with the first one. The paired test over the shared prompts decides whether two runs differ,
never the rates alone.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from geo_sokoban_pipeline.envs.base import Task
from geo_sokoban_pipeline.formats import (
    DASH,
    count,
    describe_policy,
    duration,
    find_row,
    find_stale,
    joined,
    p_value,
    points,
    write_rate,
)
from geo_sokoban_pipeline.reporting import curves
from geo_sokoban_pipeline.reporting.charts import Chart, Series, Shape, draw_chart
from geo_sokoban_pipeline.reporting.report import compare_policies, name_shared, render_page
from geo_sokoban_pipeline.reporting.report_tables import EvaluationRow, evaluation_rows
from geo_sokoban_pipeline.runs.provenance import RunTime
from geo_sokoban_pipeline.tasks import task_or_plain

if TYPE_CHECKING:
    import pyarrow as pa

    from geo_sokoban_pipeline.evaluation.metrics import PairedTest

COLOURS = ("final", "warm", "greedy", "legal", "solver", "random")
# Metric, title, note, whether its values are shares. Validations have lines of their own.
_CURVES = (
    ("rollout/raw_reward", "Training reward", "Mean per episode.", False),
    ("train/entropy_loss", "Entropy", "Nats per token.", False),
    ("train/ppo_kl", "KL to the rollout policy", "Mean |log-ratio| per token, in the update.", False),
    ("train/kl_loss", "KL to the reference policy", "Nats per token.", False),
    ("train/lr-pg_0", "Learning rate", "As scheduled.", False),
    ("train/grad_norm", "Gradient norm", "Before clipping.", False),
    ("rollout/response_len/mean", "Response tokens", "Mean per episode.", False),
    ("rollout/trained_ratio", "Kept by the group filter", "Share of the episodes.", True),
)
_SMOOTHED = 9


@dataclass(frozen=True)
class ComparedRun:
    """Stored values of one run.

    Attributes:
        run, run_id: its namespace and run id.
        metrics: one row per iteration.
        summary: of its evaluation; empty where it has none.
        settings: fingerprint of its newest checkpoint, flat.
        time: of its commands; None if they were not recorded.
        held_out: episodes of its evaluation, partition `iter=<number of the policy>/part-…`.
    """

    run: str
    run_id: str
    metrics: list[dict[str, Any]]
    summary: dict[str, Any]
    settings: dict[str, Any]
    time: RunTime | None
    held_out: Mapping[str, Callable[..., pa.Table]]

    @property
    def stale(self) -> str | None:
        """Which checkpoint the evaluation is of, where the newest one is another."""
        return find_stale(self.summary, max((row.get("iteration", -1) for row in self.metrics), default=-1) + 1)

    @property
    def policies(self) -> list[str]:
        """Names of the evaluated policies, in the order of the parts of `held_out`."""
        return [str(name) for name in self.summary.get("policies") or []]


def build_comparison(runs: Sequence[ComparedRun]) -> str:
    """The page, HTML5 as text, to be stored as UTF-8; it is self-contained.

    Args:
        runs: two or more; the others are compared with the first one.
    """
    names = name_runs(runs)
    task = task_or_plain(runs[0].summary.get("task") or runs[0].run.removeprefix("train_"))
    words = task.words
    tests = [compare_final(runs[0], run) for run in runs[1:]]
    rows, ks = _evaluation(runs, names)
    context = {
        "runs": list(zip(names, COLOURS * len(runs), runs, strict=False)),
        "words": words,
        "headline": " ".join([write_verdict(runs, names, tests, task), *_say_stale(runs, names)]),
        "about": _about(runs, names),
        "charts": _charts(runs, names, words.rate, words.units),
        "small": _small_charts(runs, names),
        "differences": list_differences(runs),
        "rows": rows,
        "ks": ks,
        "tests": [
            _test_line(runs[0], run, name, test) for run, name, test in zip(runs[1:], names[1:], tests, strict=True)
        ],
        "reference": names[0],
    }
    return render_page("comparison.html.j2", context)


def name_runs(runs: Sequence[ComparedRun]) -> list[str]:
    """Names of the runs on the page: their run ids, with the pipeline before them if there are several pipelines."""
    several = len({run.run for run in runs}) > 1
    return [f"{run.run}/{run.run_id}" if several else run.run_id for run in runs]


def compare_final(first: ComparedRun, second: ComparedRun) -> PairedTest | None:
    """Paired test of the final policies; None where they share no evaluation prompt."""
    if not first.policies or not second.policies:
        return None
    clusters = {name: one for run in (first, second) for name, one in (run.summary.get("cluster_of") or {}).items()}
    last, other = len(first.policies) - 1, len(second.policies) - 1
    return compare_policies(first.held_out, last, second.held_out, other, clusters)


def list_differences(runs: Sequence[ComparedRun]) -> list[tuple[str, list[str]]]:
    """(setting, value in each run) of the settings that differ, sorted by name."""
    tables = [_settings(run) for run in runs]
    names = sorted({name for table in tables for name in table})
    written = [(name, [_write(table[name]) if name in table else DASH for table in tables]) for name in names]
    return [(name, values) for name, values in written if len(set(values)) > 1]


def write_verdict(
    runs: Sequence[ComparedRun], names: Sequence[str], tests: Sequence[PairedTest | None], task: Task
) -> str:
    """One sentence with the result of the paired tests."""
    words = task.words
    found: dict[str, list[str]] = {}
    for name, test in zip(names[1:], tests, strict=True):
        found.setdefault(_judge(test), []).append(name)
    if len(runs) > 2:
        parts = [f"{joined(group)} {'is' if len(group) == 1 else 'are'} {text}" for text, group in found.items()]
        return f"Compared with {names[0]}, {'; '.join(parts)}."
    (test,), (verdict,) = tests, found
    if test is None:
        return f"{names[1]} and {names[0]} have no evaluation on the same {words.units}."
    difference = points(test.difference, test.low, test.high)
    return f"On the same {name_shared(test, task)}, {names[1]} is {verdict} than {names[0]}: {difference}.".replace(
        "different than", "different from"
    )


def _say_stale(runs: Sequence[ComparedRun], names: Sequence[str]) -> list[str]:
    """A sentence for each run whose evaluation is not of its newest checkpoint."""
    return [f"The evaluation of {name} is of {run.stale}." for run, name in zip(runs, names, strict=True) if run.stale]


def _judge(test: PairedTest | None) -> str:
    if test is None:
        return "not comparable"
    if not test.is_change:
        return "not significantly different"
    return "better" if test.difference > 0 else "worse"


def _settings(run: ComparedRun) -> dict[str, Any]:
    """Stored settings, and length, evaluation prompts and commit of the run."""
    shown = dict(run.settings)
    shown["iterations stored"] = len(run.metrics)
    kept = (
        ("data", "data_id"),
        ("evaluation prompts", "prompts"),
        ("evaluation prompts, content hash", "prompts_hash"),
    )
    for name, key in kept:
        if run.summary.get(key) is not None:
            shown[name] = run.summary[key]
    if run.policies:
        shown["evaluated policy"] = describe_policy(run.summary, run.policies[-1])
    if run.time is not None and run.time.last.get("commit"):
        shown["commit"] = run.time.last["commit"]
    return shown


def _write(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 80 else f"{text[:79]}…"


def _about(runs: Sequence[ComparedRun], names: Sequence[str]) -> list[list[str]]:
    """Per run: name, iterations, date, total time, machine, command."""
    lines = []
    for run, name in zip(runs, names, strict=True):
        last = run.time.last if run.time else {}
        lines.append(
            [
                name,
                count(len(run.metrics)),
                f"{run.time.started:%Y-%m-%d %H:%M}" if run.time else DASH,
                duration(run.time.seconds) if run.time else DASH,
                str(last.get("processor") or last.get("machine") or DASH),
                str(last.get("command") or DASH),
            ]
        )
    return lines


def _lines(runs: Sequence[ComparedRun], names: Sequence[str], metric: str) -> list[Series]:
    series = []
    for run, name, colour in zip(runs, names, COLOURS * len(runs), strict=False):
        line = curves.points_of(run.metrics, metric)
        long = len(line) >= curves.SMOOTHED_FROM and metric != "train/lr-pg_0"
        series.append(Series(name, colour, curves.smooth(line, _SMOOTHED) if long else line))
    return series


def _charts(runs: Sequence[ComparedRun], names: Sequence[str], rate: str, units: str) -> list[Chart]:
    shape = Shape("iterations trained", y_range=(0.0, 1.0), shares=True)
    validation = [
        replace(curves.validation_series(run.metrics, "sampled", name, colour), spread=())
        for run, name, colour in zip(runs, names, COLOURS * len(runs), strict=False)
    ]
    training = _lines(runs, names, "rollout/success_rate")
    drawn = (
        draw_chart(f"{rate.capitalize()} on validation {units}, sampled", validation, shape),
        draw_chart(f"Training {rate}", training, shape, f"Means of {_SMOOTHED} iterations where there are many."),
    )
    return [chart for chart in drawn if chart is not None]


def _small_charts(runs: Sequence[ComparedRun], names: Sequence[str]) -> list[Chart]:
    charts = []
    for metric, title, note, shares in _CURVES:
        series = _lines(runs, names, metric)
        if any(y for line in series for _, y in line.points):
            charts.append(draw_chart(title, series, curves.small_shape(shares), note))
    return [chart for chart in charts if chart is not None]


def _evaluation(runs: Sequence[ComparedRun], names: Sequence[str]) -> tuple[list[EvaluationRow], list[str]]:
    """Lines of all runs' policies, the final ones first, and the values of k for which a line has pass@k."""
    tables = [evaluation_rows(run.summary) for run in runs]
    ks = sorted({k for _, found in tables for k in found}, key=int)
    lines: list[EvaluationRow] = []
    for (rows, found), name, colour in zip(tables, names, COLOURS * len(runs), strict=False):
        for row in rows:
            if row.is_policy:
                passes = dict(zip(found, row.pass_at_k, strict=True))
                own = {"label": f"{name}: {row.label}", "colour": colour, "further": []}
                lines.append(replace(row, **own, pass_at_k=[passes.get(k, DASH) for k in ks]))  # type: ignore[arg-type]
    return sorted(lines, key=lambda row: "after GRPO" not in row.label), ks


def _test_line(first: ComparedRun, run: ComparedRun, name: str, test: PairedTest | None) -> dict[str, Any]:
    """One line of the table of tests."""
    rows = [find_row(one.summary, one.policies[-1], "sampled") if one.policies else None for one in (first, run)]
    rates = [write_rate(row) if row else DASH for row in rows]
    if test is None:
        reason = "no evaluation is stored" if None in rows else "not evaluated on the same prompts"
        return {"name": name, "rates": rates, "verdict": reason, "cells": [DASH] * 5}
    largest = max(int(one.summary.get("prompts") or 0) for one in (first, run))
    shared = count(test.prompts) if test.prompts >= largest else f"{count(test.prompts)} of {count(largest)}"
    cells = [
        shared,
        count(test.clusters),
        points(test.difference, test.low, test.high),
        f"{count(test.gained)} / {count(test.lost)}",
        p_value(test.p_value),
    ]
    return {"name": name, "rates": rates, "verdict": _judge(test), "cells": cells}
