"""How often the graders are right, by kind of answer, beside math-verify alone: writes the tables of `docs/graders.md`.

`python -m benchmarks.graders [--pairs FILE] [--check]`. Every pair is graded anew; nothing is taken from a record.
Pairs that are marked ambiguous are left out.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import signal
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

import psutil

from geo_sokoban_pipeline.reporting.study_docs import read_section, replace_section
from geo_sokoban_pipeline.rewards.math_answer import Grader, GradingPool
from geo_sokoban_pipeline.rewards.math_answer.verdict import GraderName

ROOT = Path(__file__).parents[1]
DOCUMENT = ROOT / "docs" / "graders.md"
PAIRS = ROOT / os.environ.get("GEO_SOKOBAN_SHARED_DATA", "../shared/data") / "math_pairs.jsonl"
MathVerify = Literal["math-verify alone"]
GRADERS: tuple[GraderName | MathVerify, ...] = ("default", "math-verify alone", "slime_exact")

Pair = dict[str, Any]
Verdict = Callable[[str, str], bool]
Clock = Callable[[], float]

_SECONDS = 5.0


class OverdueError(BaseException):
    """math-verify's time is over. No Exception, which it would take for a failed parse."""


def load_pairs(path: Path) -> list[Pair]:
    """Labelled pairs that are not ambiguous."""
    pairs = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return [pair for pair in pairs if not pair["ambiguous"]]


def verdicts(pairs: Sequence[Pair], judge: Verdict, clock: Clock) -> tuple[list[bool], list[float]]:
    """Verdict of a grader on each pair, and the milliseconds of processor time it took."""
    found, spent = [], []
    for pair in pairs:
        start = clock()
        found.append(judge(pair["response"], pair["ground_truth"]))
        spent.append(1000 * (clock() - start))
    return found, spent


def math_verify_alone(response: str, label: str) -> bool:
    """math-verify as its documentation shows it, the label as LaTeX.

    Its time limit of 5 s counts processor time here, so that a busy machine does not change its verdicts.
    """
    from math_verify import parse, verify

    signal.setitimer(signal.ITIMER_VIRTUAL, _SECONDS)
    try:
        gold, answer = (parse(text, parsing_timeout=None) for text in (f"${label}$", response))
        return verify(gold, answer, timeout_seconds=None)
    except OverdueError:
        return False
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)


def _raise_overdue(*_: object) -> None:
    raise OverdueError


def _processor_time(pool: GradingPool) -> float:
    """Seconds of this process and of the workers."""
    workers = (psutil.Process(pid).cpu_times() for pid in pool.worker_pids)
    return time.process_time() + sum(times.user + times.system for times in workers)


def accuracy_table(pairs: Sequence[Pair], found: dict[str, list[bool]]) -> str:
    """One row per kind: pairs, and how many each grader judges as expected."""
    kinds = sorted({pair["kind"] for pair in pairs}, key=lambda kind: (kind.startswith("adv_"), kind))
    lines = [f"| kind | pairs | {' | '.join(found)} |", f"|---|---|{'---|' * len(found)}"]
    for kind in kinds:
        chosen = [i for i, pair in enumerate(pairs) if pair["kind"] == kind]
        right = [sum(verdict[i] == pairs[i]["expected"] for i in chosen) for verdict in found.values()]
        lines.append(f"| {kind} | {len(chosen)} | {' | '.join(map(str, right))} |")
    return "\n".join(lines)


def summary_table(pairs: Sequence[Pair], found: dict[str, list[bool]]) -> str:
    """One row per grader: share of right verdicts, wrong ones of both kinds, what is granted to adversaries."""
    plain = [i for i, pair in enumerate(pairs) if not pair["kind"].startswith("adv_")]
    hostile = [i for i, pair in enumerate(pairs) if pair["kind"].startswith("adv_") and not pair["expected"]]
    lines = [
        f"| grader | right, of {len(plain)} | share | wrongly granted | of it `hack_*` | wrongly refused "
        f"| wrong adversarial granted, of {len(hostile)} |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, verdict in found.items():
        granted = [i for i in plain if verdict[i] and not pairs[i]["expected"]]
        refused = sum(not verdict[i] and pairs[i]["expected"] for i in plain)
        right = len(plain) - len(granted) - refused
        hacks = sum(pairs[i]["kind"].startswith("hack_") for i in granted)
        lines.append(
            f"| {name} | {right} | {100 * right / len(plain):.1f} % | {len(granted)} | {hacks} | {refused} "
            f"| {sum(verdict[i] for i in hostile)} |"
        )
    return "\n".join(lines)


def time_table(spent: dict[str, list[float]]) -> str:
    """One row per grader: median, 95th percentile and longest processor time of a pair."""
    lines = ["| grader | median ms | 95th percentile | longest |", "|---|---|---|---|"]
    for name, times in spent.items():
        tail = statistics.quantiles(times, n=20)[-1]
        lines.append(f"| {name} | {statistics.median(times):.2f} | {tail:.0f} | {max(times):.0f} |")
    return "\n".join(lines)


def _judge(grader: Grader, response: str, label: str) -> bool:
    return grader.grade(response, label, patience=600).correct


def judge_pairs(
    pairs: Sequence[Pair], names: Sequence[GraderName | MathVerify] = GRADERS
) -> tuple[dict[str, list[bool]], dict[str, list[float]]]:
    """Verdicts and milliseconds by grader, for each pair."""
    found: dict[str, list[bool]] = {}
    spent: dict[str, list[float]] = {}
    signal.signal(signal.SIGVTALRM, _raise_overdue)
    with GradingPool(workers=1, time_limit=120) as pool:
        for name in names:
            judge: Verdict = math_verify_alone
            if name != "math-verify alone":
                grader = Grader(name, pool=pool)
                judge = partial(_judge, grader)
            for answer in ("x + 1 + y", "2x < y", "\\sin(x)"):  # starts the worker, loads the library
                judge(f"\\boxed{{{answer}}}", "x + y")
            found[name], spent[name] = verdicts(pairs, judge, partial(_processor_time, pool))
    return found, spent


def main(words: Sequence[str] | None = None) -> int:
    """Measure, and write the tables into the document or, with `--check`, compare them with it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=Path, default=PAIRS, help="JSON lines: kind, response, ground_truth, expected")
    parser.add_argument("--check", action="store_true", help="write nothing; exit code 1 where a table has changed")
    given = parser.parse_args(words)
    logging.disable(logging.CRITICAL)
    pairs = load_pairs(given.pairs)
    found, spent = judge_pairs(pairs)
    tables = {
        "summary": summary_table(pairs, found),
        "accuracy": accuracy_table(pairs, found),
        "times": time_table(spent),
    }
    text = DOCUMENT.read_text(encoding="utf-8")
    changed = []
    for name, table in tables.items():
        print(f"{table}\n")
        if name != "times" and read_section(text, f"graders:{name}", DOCUMENT) != table:
            changed.append(name)
        text = replace_section(text, f"graders:{name}", table, DOCUMENT)
    if given.check:
        print(f"changed: {', '.join(changed) or 'nothing'}")
        return int(bool(changed))
    DOCUMENT.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
