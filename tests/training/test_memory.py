"""A long run takes no more memory than a short one: the resident memory after 200 iterations is that after 20."""

from __future__ import annotations

from pathlib import Path

import pytest

from runs import finish, kedro_command

pytestmark = pytest.mark.slow

ITERATIONS, EARLY, ALLOWED = 200, 20, 1.05
# Every part of an iteration takes part, validation and saving too; the levels are many, so that caches go on filling.
PARAMETERS = (
    "train_sokoban.loop.iterations=200,train_sokoban.loop.keep_last=2,train_sokoban.loop.save_interval=10,"
    "train_sokoban.loop.eval_interval=20,train_sokoban.loop.eval_prompts=4,train_sokoban.warm_start.steps=12,"
    "train_sokoban.optimizer.schedule_iterations=200,train_sokoban.grpo.groups=2,train_sokoban.grpo.group_size=2,train_sokoban.rollout.max_turns=3"
)


def test_memory_stays_flat(tmp_path: Path) -> None:
    file = tmp_path / "memory.txt"
    words = ("--pipeline=train_sokoban", "--to-nodes=train_sokoban.train_grpo", f"--params={PARAMETERS}")
    hook = {"GEO_SOKOBAN_EXTRA_HOOKS": "memory_hook:MemoryHook", "GEO_SOKOBAN_MEMORY_FILE": str(file)}
    finish(kedro_command(*words, data_root=tmp_path / "data", **hook), timeout=600)
    resident = {int(k): int(size) for k, size in (line.split() for line in file.read_text().splitlines())}
    assert len(resident) == ITERATIONS
    # The mean of a few: what an iteration needs for itself comes and goes.
    early = sum(resident[k] for k in range(EARLY - 5, EARLY)) / 5
    late = sum(resident[k] for k in range(ITERATIONS - 5, ITERATIONS)) / 5
    assert late <= ALLOWED * early, f"{early / 1e6:.0f} MB after {EARLY} iterations, {late / 1e6:.0f} MB at the end"
