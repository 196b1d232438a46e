"""One GRPO step of this project against one of TRL's `GRPOTrainer`, like for like, in one run.

Both systems load the same briefly trained weights and do their steps in turns, each in a process of its own, so that a
slow moment of the machine hits both. A third process is this project with its cache across turns off: the difference
that remains has other causes. docs/benchmarks.md says what is compared. Run with `make bench-peer`.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.peer.setting import NAMES, Setting, StepReport, System

if TYPE_CHECKING:
    from benchmarks.peer.report import Comparison

THRESHOLDS = {8: 3.0, 30: 5.0}
CLOCKS = ("wall", "whole")  # ratios of seconds and of CPU-seconds; the lower one counts
WARM_START_STEPS = 80


def main() -> int:
    """Run the comparison, print it, write it; 1 if a threshold is missed."""
    options = _parse()
    # The workers inherit these before they import torch.
    quiet = {"HF_HUB_OFFLINE": "1", "PYTHONWARNINGS": "ignore", "TRANSFORMERS_VERBOSITY": "error"}
    os.environ.update(quiet | {"OMP_NUM_THREADS": str(options.threads)})
    from benchmarks.peer.report import library_versions, summarize
    from benchmarks.records import ROOT, add_maker, keep, write_json

    comparisons: list[Comparison] = []
    with tempfile.TemporaryDirectory() as folder:
        policy = Path(folder) / "policy"
        prepare_policy(policy, options.threads)
        for turns in options.turns:
            setting = Setting(
                policy, turns, options.groups, options.group_size, options.threads, steps=options.rounds + 1
            )
            comparisons.append(_compare(setting))
        found = summarize(comparisons, _arguments(comparisons[0].setting), library_versions())
    keep("peer", found)
    write_json(options.out, add_maker(found, ROOT))
    print(f"\nEvery step: {options.out}")
    slowest = {c["setting"]["turns"]: min(c["ratios"][name]["median"] for name in CLOCKS) for c in found["comparisons"]}
    missed = [turns for turns, ratio in slowest.items() if ratio < THRESHOLDS.get(turns, 0.0)]
    for turns in missed:
        print(f"Below the threshold of {THRESHOLDS[turns]} at {turns} turns.", file=sys.stderr)
    return 1 if missed else 0


def _parse() -> argparse.Namespace:
    root = Path(os.environ.get("GEO_SOKOBAN_DATA_ROOT", "data"))
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peer", description=__doc__.splitlines()[0])
    parser.add_argument("--turns", type=int, nargs="+", default=list(THRESHOLDS), help="responses of an episode")
    parser.add_argument("--rounds", type=int, default=5, help="steps of each system after the warm-up")
    parser.add_argument("--groups", type=int, default=4, help="prompts of a step")
    parser.add_argument("--group-size", type=int, default=8, help="episodes of a prompt")
    parser.add_argument("--threads", type=int, default=1, help="threads of torch and OpenMP, the same for both")
    parser.add_argument("--out", type=Path, default=root / "08_reporting" / "bench_peer.json", help="JSON of all steps")
    return parser.parse_args()


def prepare_policy(folder: Path, threads: int) -> None:
    """Save the default tiny policy after a short SFT on random legal moves: responses are well formed."""
    from benchmarks.peer.env import CELL_PX
    from benchmarks.setup import make_rows, warmed_policy

    from geo_sokoban_pipeline.envs.sokoban.task import SOKOBAN
    from geo_sokoban_pipeline.policies.policy import save_policy

    steps = {"steps": WARM_START_STEPS, "validate_every": WARM_START_STEPS, "validation_episodes": 8}
    env = {"max_actions_per_turn": 1, "cell_px": CELL_PX, "observation_style": "brief"}
    options = SOKOBAN.train_config.model_validate(
        {"warm_start": {**steps, "teacher": {"name": "random_legal"}}, "env": {"args": env}}
    )
    folder.mkdir()
    save_policy(warmed_policy(options, make_rows(512), threads), folder)


def _compare(setting: Setting) -> Comparison:
    from benchmarks.peer.checks import check_pair, check_step
    from benchmarks.peer.ours import draw_all
    from benchmarks.peer.report import Comparison
    from benchmarks.peer.worker import Worker
    from benchmarks.setup import make_rows

    rows = make_rows(setting.groups * setting.steps)
    steps: dict[System, list[StepReport]] = {system: [] for system in NAMES}
    with ExitStack() as stack:
        # This project draws its prompts in an order of its own; TRL takes the same ones as they come.
        workers = {
            system: stack.enter_context(Worker(system, setting, draw_all(setting, rows) if system == "TRL" else rows))
            for system in NAMES
        }
        for number in range(setting.steps):
            reports = {system: worker.step() for system, worker in workers.items()}
            for system, report in reports.items():
                check_step(NAMES[system], report, setting)
                check_pair(reports["ours"], report, NAMES[system])
                steps[system] += [report] if number else []
            told = ", ".join(f"{NAMES[system]} {report.cpu:.2f}" for system, report in reports.items())
            print(f"{setting.turns} turns, {f'step {number}' if number else 'warm-up'}, CPU-s: {told}", flush=True)
    return Comparison(setting, steps)


def _arguments(setting: Setting) -> dict[str, object]:
    from benchmarks.peer.theirs import make_arguments

    return make_arguments(setting)


if __name__ == "__main__":
    sys.exit(main())
