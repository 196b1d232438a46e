"""One GRPO step of this project against one of TRL's `GRPOTrainer`, like for like, in one run.

Both systems load the same briefly trained weights and do their steps in turns, each in a process of its own, so that a
slow moment of the machine hits both. What is compared, and what is not: docs/benchmarks.md. Run with `make bench-peer`.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.peer.setting import Setting

if TYPE_CHECKING:
    from benchmarks.peer.report import Comparison

BARS = {8: 3.0, 30: 5.0}
WARM_START_STEPS = 80


def main() -> int:
    """Run the comparison, print it, write it; 1 if a bar is missed."""
    options = _parse()
    # The workers inherit these before they import torch.
    quiet = {"HF_HUB_OFFLINE": "1", "PYTHONWARNINGS": "ignore", "TRANSFORMERS_VERBOSITY": "error"}
    os.environ.update(quiet | {"OMP_NUM_THREADS": str(options.threads)})
    from benchmarks.peer.report import format_table, library_versions, summarize
    from benchmarks.records import keep, write_json

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
    print("\nBoth systems:", found["running"])
    print("GRPOConfig of TRL:", ", ".join(f"{name}={value}" for name, value in found["trl_arguments"].items()), "\n")
    print(format_table(found))
    write_json(options.out, found)
    keep("peer", found)
    print(f"\nEvery step: {options.out}")
    slowest = {c["setting"]["turns"]: min(c["wall_ratio"], c["cpu_ratio"]) for c in found["comparisons"]}
    missed = [turns for turns, ratio in slowest.items() if ratio < BARS.get(turns, 0.0)]
    for turns in missed:
        print(f"Below the bar of {BARS[turns]} at {turns} turns.", file=sys.stderr)
    return 1 if missed else 0


def _parse() -> argparse.Namespace:
    root = Path(os.environ.get("GEO_SOKOBAN_DATA_ROOT", "data"))
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peer", description=__doc__.splitlines()[0])
    parser.add_argument("--turns", type=int, nargs="+", default=list(BARS), help="replies of an episode")
    parser.add_argument("--rounds", type=int, default=5, help="steps of each system after the warm-up")
    parser.add_argument("--groups", type=int, default=4, help="prompts of a step")
    parser.add_argument("--group-size", type=int, default=8, help="episodes of a prompt")
    parser.add_argument("--threads", type=int, default=1, help="threads of torch and OpenMP, the same for both")
    parser.add_argument("--out", type=Path, default=root / "08_reporting" / "bench_peer.json", help="JSON of all steps")
    return parser.parse_args()


def prepare_policy(folder: Path, threads: int) -> None:
    """Save the default tiny policy after a short imitation of random legal moves: replies are well formed."""
    import torch
    from benchmarks.peer.world import CELL_PX, make_rows

    from geo_sokoban_pipeline.options.policy import TinyPolicyOptions
    from geo_sokoban_pipeline.options.training import TrainOptions
    from geo_sokoban_pipeline.policies.policy import save_policy
    from geo_sokoban_pipeline.policies.tiny import build_tiny_policy
    from geo_sokoban_pipeline.training.warm_start import imitate_teacher

    torch.set_num_threads(threads)
    policy = build_tiny_policy(TinyPolicyOptions(), seed=0)
    steps = {"steps": WARM_START_STEPS, "validate_every": WARM_START_STEPS, "validation_episodes": 8}
    env = {"max_actions_per_turn": 1, "cell_px": CELL_PX, "observation_style": "brief"}
    options = TrainOptions.model_validate(
        {"warm_start": {**steps, "teacher": {"name": "random_legal"}}, "env": {"args": env}}
    )
    rows = make_rows(512)
    imitate_teacher(policy, rows, rows[:8], options, seed=0)
    folder.mkdir()
    save_policy(policy, folder)


def _compare(setting: Setting) -> Comparison:
    from benchmarks.peer.checks import check_pair, check_step
    from benchmarks.peer.report import Comparison
    from benchmarks.peer.worker import Worker
    from benchmarks.peer.world import make_rows

    rows = make_rows(setting.groups * setting.steps)
    rounds = []
    with Worker("ours", setting, rows) as ours, Worker("TRL", setting, rows) as theirs:
        for number in range(setting.steps):
            pair = ours.step(), theirs.step()
            check_step("this project", pair[0], setting)
            check_step("TRL", pair[1], setting)
            check_pair(*pair)
            name = f"round {number}" if number else "warm-up"
            print(f"{setting.turns} turns, {name}: ours {pair[0].wall:.2f} s, TRL {pair[1].wall:.2f} s", flush=True)
            rounds.append(pair)
    return Comparison(setting, [pair[0] for pair in rounds[1:]], [pair[1] for pair in rounds[1:]])


def _arguments(setting: Setting) -> dict[str, object]:
    from benchmarks.peer.theirs import make_arguments

    return make_arguments(setting)


if __name__ == "__main__":
    sys.exit(main())
