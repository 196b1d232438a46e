"""Facts that several pages state about a run: its evaluation in sentences, its paired tests, when and how it was made.

A paired test over the same prompts decides whether a gain is real; without their episodes the intervals decide. Both
are over clusters of prompts (`Task.cluster_of`). The difference of two rates alone never decides.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from geo_sokoban_pipeline.envs.base import Task
from geo_sokoban_pipeline.evaluation.metrics import PairedTest, paired_test
from geo_sokoban_pipeline.formats import (
    START,
    Row,
    count,
    describe_policy,
    duration,
    find_baseline,
    find_row,
    find_stale,
    p_value,
    percent,
    plural,
    points,
    write_rate,
)
from geo_sokoban_pipeline.reporting.training_episodes import Parts, read_successes
from geo_sokoban_pipeline.runs.provenance import RunTime
from geo_sokoban_pipeline.tasks import task_or_plain


@dataclass(frozen=True, kw_only=True)
class StoredRun:
    """Stored values of one run; lists and mappings may be empty.

    Attributes:
        run: namespace, such as `train_sokoban`.
        run_id: folder of the run.
        metrics: one row per iteration.
        summary: of its evaluation; `policies` names them in the order of the parts of `held_out`.
        held_out: episodes of its evaluation, partition `iter=<number of the policy>/part-…`.
        time: of its commands; None: they were not recorded.
    """

    run: str
    run_id: str
    metrics: list[dict[str, Any]]
    summary: dict[str, Any]
    held_out: Parts
    time: RunTime | None = None

    @property
    def stale(self) -> str | None:
        """Which checkpoint the evaluation is of, where the newest one is another."""
        return find_stale(self.summary, max((row.get("iteration", -1) for row in self.metrics), default=-1) + 1)

    @property
    def policies(self) -> list[str]:
        """Names of the evaluated policies; the final one is the last."""
        return [str(name) for name in self.summary.get("policies") or []]

    @property
    def final(self) -> Row | None:
        """Row of the final policy, sampled; None: it was not evaluated."""
        return find_row(self.summary, self.policies[-1], "sampled") if self.policies else None


def compare_policies(first: StoredRun, second: StoredRun, number: int | None = None) -> PairedTest | None:
    """Paired test over the prompts of which two policies have sampled episodes; None if they share none.

    Args:
        second: its final policy is compared with one of `first`.
        number: of the policy of `first`; None: its final one.
    """
    before, after = len(first.policies) - 1 if number is None else number, len(second.policies) - 1
    if before < 0 or after < 0:
        return None
    clusters = {name: one for run in (first, second) for name, one in (run.summary.get("cluster_of") or {}).items()}
    return paired_test(read_successes(first.held_out, before), read_successes(second.held_out, after), clusters)


def name_shared(change: PairedTest, task: Task) -> str:
    """The prompts of a paired test, such as `640 levels of 57 wall layouts`."""
    prompts = plural(change.prompts, task.words.unit, task.words.units)
    clustered = change.clusters < change.prompts
    return task.report.name_clusters(prompts, change.prompts, change.clusters) if clustered else prompts


@dataclass(frozen=True)
class Headline:
    """Main sentence, further sentences, and tiles: rows of the summary with `label` and `colour`."""

    main: str
    further: list[str]
    tiles: list[dict[str, Any]]


def write_headline(summary: Mapping[str, Any], change: PairedTest | None = None, stale: str | None = None) -> Headline:
    """Headline of an evaluation summary, in which policies, baselines or everything may be missing.

    Args:
        change: paired test of the last policy against the first one; None: only their intervals are known.
        stale: which checkpoint the evaluation is of, where the run's newest one is another.
    """
    task = task_or_plain(summary.get("task"))
    words, report = task.words, task.report
    names = [str(name) for name in summary.get("policies") or []]
    last = find_row(summary, names[-1], "sampled") if names else None
    if last is None:
        return Headline("No evaluation is stored for this run.", [], [])
    first = find_row(summary, names[0], "sampled") if len(names) > 1 else None
    where = report.evaluated_on(summary)
    where = f"On {where}{',' if ',' in where else ''}"
    if first is None:
        main = f"{where} {report.label(names[-1])} {report.solves} {write_rate(last)}."
    else:
        before = f"{write_rate(first)} {'before GRPO' if names[0] == START else 'after the warm start'}"
        verb = "raised" if last["solve_rate"] > first["solve_rate"] else "lowered"
        main = f"{where} GRPO made no significant change to the {words.rate}: {before}, {write_rate(last)} after GRPO."
        if change.is_change if change is not None else _are_apart(first, last):
            main = f"{where} GRPO {verb} the {words.rate} from {before} to {write_rate(last)}."
    if stale:
        main += f" The evaluation is of {stale}."
    greedy = [find_row(summary, name, "greedy") for name in dict.fromkeys((names[0], names[-1]))]
    rates = [percent(row["solve_rate"]) for row in greedy if row]
    was = f" (was {rates[0]})" if len(rates) > 1 else ""
    further = [
        *([_judge(first, last, change, task)] if first else []),
        *([f"Greedy decoding: {rates[-1]}{was}."] if rates else []),
        *report.compare(summary, names),
        *([str(summary["better"])] if summary.get("better") else []),
    ]
    tiles = [
        {**row, "label": report.row_label(row["policy"], row["mode"]), "colour": report.colour(row["policy"])}
        for row in (first, last, *(find_baseline(summary, name) for name in report.tiles))
        if row
    ]
    return Headline(main, list(filter(None, further)), tiles)


def _judge(first: Row, last: Row, change: PairedTest | None, task: Task) -> str:
    """The result of the paired test of two policies, else of their intervals; empty where they have none."""
    if change is not None:
        test = f"{points(change.difference, change.low, change.high)}: {count(change.gained)} gained"
        over = " over clusters" if change.clusters < change.prompts else ""
        counts = f"{count(change.lost)} lost (McNemar's test{over}, {p_value(change.p_value)})"
        return f"Over the same {name_shared(change, task)}, the difference is {test}, {counts}."
    if first.get("high") is None or last.get("low") is None:
        return ""
    if _are_apart(first, last):
        return "The two intervals (95 %) do not overlap, so chance in these episodes is no explanation."
    return "The two intervals (95 %) overlap, so this evaluation does not prove a change."


def _are_apart(first: Row, last: Row) -> bool:
    low, high = last.get("low"), last.get("high")
    above = low is not None and low > first.get("high", 1.0)
    return bool(above or (high is not None and high < first.get("low", 0.0)))


def write_progress(done: int, total: int | None) -> Headline:
    """Headline of a training that goes on.

    Args:
        done: committed iterations.
        total: iterations of the whole training; None: not known.
    """
    shown = plural(done, "iteration") if total is None else f"{count(done)} of {plural(total, 'iteration')}"
    main = f"The training goes on: {shown} {'is' if done == 1 else 'are'} stored."
    return Headline(main, ["The policies are evaluated at its end; this page shows what is stored until now."], [])


def describe_evaluated(summary: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Evaluated data, held-out prompts and policies as (name, value); unknown ones are left out."""
    task, prompts = task_or_plain(summary.get("task")), summary.get("prompts_hash")
    policies = [(task.report.label(name), describe_policy(summary, name)) for name in summary.get("checkpoints") or ()]
    data = [("data", summary.get("data_id")), (f"held-out {task.words.units}", prompts and f"content {prompts[:12]}")]
    return [(name, value) for name, value in (*data, *policies) if value]


def describe_making(time: RunTime | None) -> list[tuple[str, str]]:
    """Date, time, commit, machine and command of a run as (name, value); unknown ones are left out."""
    if time is None:
        return []
    last = time.last
    cores = plural(last["cores"], "core") if last.get("cores") else ""
    commands = f" in {plural(time.commands, 'command')}" if time.commands > 1 else ""
    found = {
        "date": f"{time.started:%Y-%m-%d %H:%M}",
        "total time": f"{duration(time.seconds)}{commands}",
        "commit": last.get("commit"),
        "machine": ", ".join(str(part) for part in (last.get("processor") or last.get("machine"), cores) if part),
        "command": last.get("command"),
    }
    return [(name, str(value)) for name, value in found.items() if value]
