"""What the benchmarks of Sokoban share: the default run's options, its kind of prompts, and a tiny policy."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from geo_sokoban_pipeline.config.grpo import TrainOptions
from geo_sokoban_pipeline.config.policy import TinyPolicyOptions
from geo_sokoban_pipeline.envs.sokoban.config import SokobanDataOptions
from geo_sokoban_pipeline.envs.sokoban.data_steps import make_prompts, read_levels
from geo_sokoban_pipeline.envs.sokoban.task import SOKOBAN
from geo_sokoban_pipeline.policies.policy import Policy
from geo_sokoban_pipeline.policies.tiny import build_tiny_policy
from geo_sokoban_pipeline.studies.plan import merge
from geo_sokoban_pipeline.training.runtime import prepare_process
from geo_sokoban_pipeline.training.sft import run_sft

PARAMETERS = Path(__file__).parents[1] / "conf" / "base" / "parameters"
Rows = list[dict[str, Any]]


def default_options(changes: Mapping[str, Any]) -> TrainOptions:
    """Options of the default run with some changes."""
    values = yaml.safe_load((PARAMETERS / "train_sokoban.yml").read_text(encoding="utf-8"))["train_sokoban"]
    return SOKOBAN.train_config.model_validate(merge(values, changes))


def default_rows() -> Rows:
    """Training prompts of the default run."""
    return _train_rows(yaml.safe_load((PARAMETERS / "sokoban.yml").read_text(encoding="utf-8"))["sokoban"])


def make_rows(count: int, **changes: Any) -> Rows:
    """So many training prompts as of the default run: 6×6 boards, one box, images of 96×96 pixels."""
    counts = {"train": count, "validation": 8, "eval": 8}
    base = {"cell_px": 16, "instruction": "brief", "inner_walls": [1, 4], "max_solution": 8, "counts": counts}
    return _train_rows(base | changes)


def warmed_policy(options: TrainOptions, rows: Rows, threads: int = 1) -> Policy:
    """The tiny policy after its warm start, in this process with so many threads."""
    prepare_process(threads)
    policy = build_tiny_policy(TinyPolicyOptions(texts="sokoban"), seed=0)
    run_sft(policy, rows, rows[:8], options, seed=0)
    return policy


def _train_rows(values: Mapping[str, Any]) -> Rows:
    data = SokobanDataOptions.model_validate(values)
    rows = make_prompts(read_levels(data)[0], data)[0].to_dict("records")
    return [row for row in rows if row["split"] == "train"]
