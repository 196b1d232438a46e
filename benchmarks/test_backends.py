"""Whether both backends learn alike: reward over iterations with `fsdp` and with Megatron-Core, at equal seeds.

Run with `make bench-backends`, twenty minutes on two busy cores. After one warm start, `kedro run
--pipelines=train_sokoban` trains with three seeds in three layouts: `fsdp` on one rank and on two, and Megatron-Core on
two ranks that split each matrix. The curves are equal until rounding makes one token another; from there on they are
different samples of the same training. The second curve of `fsdp` shows how far another order of summation alone
carries them apart. Threshold: Megatron's curves are at most twice as far from those of one rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.records import keep
from benchmarks.runs import run_training
from benchmarks.tables import curve_gap

SEEDS, ITERATIONS, GROUPS, GROUP_SIZE = (0, 1, 2), 25, 16, 8
LAYOUTS: Mapping[str, Mapping[str, Any]] = {
    "fsdp, 1 rank": {"processes": 1},
    "fsdp, 2 ranks": {"processes": 2},
    "megatron, 2 tensor-parallel ranks": {"processes": 2, "backend": "megatron", "megatron": {"tensor_parallel": 2}},
}
THRESHOLD = 2.0


def test_both_backends_learn_alike(tmp_path: Path) -> None:
    untracked = {"enabled": False}
    run_training(tmp_path, "warm", {"loop": {"iterations": 1, "eval_interval": 0}}, tracking=untracked)
    train = {
        "policy": {"source": "folder", "path": str(tmp_path / "data/06_models/train_sokoban/warm/policy")},
        "warm_start": {"steps": 0},
        "grpo": {"groups": GROUPS, "group_size": GROUP_SIZE},
        "prompts": {"order": "shuffle"},  # by solve rate, lengths that are not solved yet would keep the reward low
        "optimizer": {"warmup_iterations": 2},
        "loop": {"iterations": ITERATIONS, "eval_interval": 0},
    }
    curves: dict[str, list[list[float]]] = {name: [] for name in LAYOUTS}
    norms: dict[str, list[list[float]]] = {name: [] for name in LAYOUTS}
    for seed in SEEDS:
        for number, (name, layout) in enumerate(LAYOUTS.items()):
            run = f"seed{seed}-{number}"
            rows = run_training(tmp_path, run, {**train, **layout}, seed=seed, tracking=untracked)
            curves[name].append([row["rollout/raw_reward"] for row in rows])
            norms[name].append([row["train/grad_norm"] for row in rows])
    found = {"seeds": list(SEEDS), "episodes": GROUPS * GROUP_SIZE, "curves": curves, "norms": norms}
    keep("backends", found)
    _, other, megatron = curves
    assert curve_gap(found, megatron) <= THRESHOLD * curve_gap(found, other)
