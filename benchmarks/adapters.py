"""`python -m benchmarks.adapters FOLDER`: what adapters learn beside full training, at equal CPU-seconds.

All arms of a seed start GRPO from one policy after full SFT, and get the CPU-seconds that full training takes for
`--iterations` iterations: rollouts, updates and writing, no validations. Learning rates are chosen with a seed of their
own, on validation prompts, at a third of these seconds. A command that is ended goes on where it was, because each of
its runs does. The table is in FOLDER/adapters.md, its figures in FOLDER/adapters.json.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from statistics import mean
from typing import Any

from benchmarks.records import write_json
from benchmarks.runs import run_training

from geo_sokoban_pipeline.runs.storage import read_json
from geo_sokoban_pipeline.studies.plan import merge
from geo_sokoban_pipeline.training.sft import grpo_cpu_seconds

RANKS: dict[str, int | None] = {"full training": None, "rank 4": 4, "rank 16": 16, "rank 64": 64}
RATES = {"full training": (5e-4, 1e-3, 2e-3), "adapter": (1e-3, 3e-3, 1e-2)}
CHOSEN_ON = 3  # seed with which rates are chosen
_PROBE = 4  # iterations from which the cost of one is taken
_VALIDATED = "eval/validation/sampled_solve_rate"
_ALONE = {"processes": 1, "threads": 1}


def main(words: Sequence[str] | None = None) -> None:
    """Run what is missing, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--iterations", type=int, default=150, help="of full training, whose CPU-seconds all get")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    given = parser.parse_args(words)
    folder, iterations = given.folder.resolve(), given.iterations
    starts = {seed: _start(folder, seed) for seed in (CHOSEN_ON, *given.seeds)}
    third = max(_PROBE, iterations // 3)
    budget = grpo_cpu_seconds(_run(folder, "cost", starts[CHOSEN_ON], CHOSEN_ON, {}, third))
    rates = {arm: _choose_rate(folder, arm, starts[CHOSEN_ON], budget, third) for arm in RANKS}
    found: list[dict[str, Any]] = []
    for seed in given.seeds:
        spent = 0.0
        for arm, rank in RANKS.items():  # full training first: the others get its CPU-seconds
            train, place = _options(arm, rates[arm]), (folder, f"{_word(arm)}-seed{seed}", starts[seed], seed)
            count = iterations if rank is None else _fitting(*place, train, spent)
            rows = _run(*place, train, count, whole=True)
            cost = grpo_cpu_seconds(rows)
            spent = cost if rank is None else spent
            line = {"arm": arm, "seed": seed, "rate": rates[arm], "iterations": count, "cpu_seconds": cost}
            found.append(line | _solved(*place[:2]))
    write_json(folder / "adapters.json", {"iterations": iterations, "rows": found})
    table = render(found)
    (folder / "adapters.md").write_text(table + "\n", encoding="utf-8")
    print(table)


def render(rows: Sequence[Mapping[str, Any]]) -> str:
    """Table of the arms: means over the seeds, and the rate of each seed."""
    lines = [
        "| | learning rate | iterations | CPU-seconds | solved before | solved after, sampled | by seed |",
        "|---|---|---|---|---|---|---|",
    ]
    for arm in RANKS:
        own = [row for row in rows if row["arm"] == arm]
        means = {name: mean(row[name] for row in own) for name in ("iterations", "cpu_seconds", "before", "after")}
        seeds = ", ".join(f"{100 * row['after']:.1f}" for row in own)
        lines.append(
            f"| {arm} | {own[0]['rate']:g} | {means['iterations']:.0f} | {means['cpu_seconds']:.0f} | "
            f"{100 * means['before']:.1f} % | {100 * means['after']:.1f} % | {seeds} |"
        )
    return "\n".join(lines)


def _start(folder: Path, seed: int) -> Path:
    """The policy after SFT with a seed, whose loop is one iteration long."""
    name = f"start-seed{seed}"
    policy = folder / "data" / "06_models" / "train_sokoban" / name / "policy"
    if not policy.is_dir():
        run_training(folder, name, merge(_ALONE, {"loop": {"iterations": 1, "eval_interval": 0}}), seed=seed)
    return policy


def _word(arm: str) -> str:
    """Part of a run id."""
    return arm.replace(" ", "-")


def _options(arm: str, rate: float) -> dict[str, Any]:
    rank = RANKS[arm]
    policy = {} if rank is None else {"policy": {"adapter": {"rank": rank, "alpha": 2.0 * rank}}}
    return {"optimizer": {"learning_rate": rate}, **policy}


def _run(
    folder: Path, name: str, start: Path, seed: int, train: Mapping[str, Any], iterations: int, *, whole: bool = False
) -> list[dict[str, Any]]:
    """Rows of metrics of a run; one that is stored goes on, or is read."""
    data = folder / "data"
    stored = sorted((data / "07_model_output" / "train_sokoban" / name / "metrics").glob("iter=*.json"))
    is_evaluated = (data / "08_reporting" / "train_sokoban" / name / "eval_summary.json").is_file()
    if len(stored) >= iterations and (is_evaluated or not whole):
        return [read_json(path) for path in stored[:iterations]]
    common = {"policy": {"source": "folder", "path": str(start)}, "warm_start": {"steps": 0}}
    options = merge(_ALONE, common, train, {"loop": {"iterations": iterations}})
    return run_training(folder, name, options, whole, seed=seed)[:iterations]


def _fitting(folder: Path, name: str, start: Path, seed: int, train: Mapping[str, Any], seconds: float) -> int:
    """Iterations that take so many CPU-seconds: estimated from the first ones, then counted."""
    count, done = _PROBE, 0
    while count > done:
        rows, done = _run(folder, name, start, seed, train, count), count
        within = [spent for spent in accumulate(grpo_cpu_seconds([row]) for row in rows) if spent <= seconds]
        if len(within) < len(rows):
            return max(1, len(within))
        count = max(done, int(seconds * len(rows) / within[-1]))
    return count


def _choose_rate(folder: Path, arm: str, start: Path, seconds: float, iterations: int) -> float:
    """The rate with which most validation prompts are solved after so many CPU-seconds."""
    solved: dict[float, float] = {}
    for rate in RATES["full training" if RANKS[arm] is None else "adapter"]:
        train = merge(_options(arm, rate), {"loop": {"eval_interval": max(1, iterations // 3)}})
        place = folder, f"rate-{_word(arm)}-{rate:g}", start, CHOSEN_ON
        rows = _run(*place, train, _fitting(*place, train, seconds))
        solved[rate] = [row[_VALIDATED] for row in rows if row.get(_VALIDATED) is not None][-1]
    return max(solved, key=lambda rate: solved[rate])


def _solved(folder: Path, name: str) -> dict[str, float]:
    """Rates of solved evaluation prompts before and after GRPO, sampled."""
    summary = read_json(folder / "data" / "08_reporting" / "train_sokoban" / name / "eval_summary.json")
    rows = {row["policy"]: row for row in summary["rows"] if row["mode"] == "sampled"}
    before = next(row for policy, row in rows.items() if policy in ("start", "warm_start"))
    return {"before": before["solve_rate"], "after": rows["final"]["solve_rate"]}


if __name__ == "__main__":
    main()
