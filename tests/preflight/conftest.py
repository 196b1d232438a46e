"""A subject to look at, and a policy folder on disk."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from geo_sokoban_pipeline.parameters import ProjectParameters
from geo_sokoban_pipeline.policies.policy import Policy, save_policy
from geo_sokoban_pipeline.preflight.checks import Subject
from geo_sokoban_pipeline.preflight.model import ModelShape, inspect_model
from geo_sokoban_pipeline.studies.plan import merge
from task_options import PolicyOptions

# Every number that a test here expects; neither the recipe of conf/ nor a default of the options may change one.
BASE: dict[str, Any] = {
    "sokoban": {
        "height": 6,
        "width": 6,
        "boxes": 1,
        "inner_walls": [1, 4],
        "min_solution": 1,
        "max_solution": 8,
        "counts": {"train": 6144, "validation": 256, "eval": 640},
        "shares": {"train": 0.67, "validation": 0.11, "eval": 0.22},
        "cell_px": 16,
        "instruction": "brief",
    },
    "train_sokoban": {
        "policy": {"source": "tiny", "dtype": "float32", "attention": "sdpa"},
        "warm_start": {
            "steps": 1000,
            "max_tokens": 8192,
            "play_every": 250,
            "teacher": {"name": "direct", "patience": 1},
        },
        "env": {"args": {"max_actions_per_turn": 1, "cell_px": 16, "observation_style": "brief"}},
        "reward": {"args": {"aggregate": "sum", "distance_weight": 0.1}},
        "rollout": {"max_turns": 10, "max_tokens_per_turn": 8, "max_conversations": 512},
        "grpo": {
            "groups": 32,
            "group_size": 8,
            "advantage_args": {"gamma": 0.95},
            "groups_per_step": 5,
            "filter": "mixed_success",
            "kl_coefficient": 0.0,
        },
        "optimizer": {
            "warmup_iterations": 6,
            "schedule_iterations": 140,
            "decay_fraction": 0.3,
            "max_tokens": 8192,
        },
        "loop": {
            "iterations": 140,
            "save_interval": 1,
            "eval_interval": 20,
            "eval_prompts": 160,
            "keep_last": 3,
            "keep_best": True,
        },
        "evaluation": {"samples": 1, "greedy": True, "blank_images": True},
        "threads": 1,
    },
}


@pytest.fixture
def make_subject(tmp_path: Path) -> Callable[..., Subject]:
    """`make_subject(sokoban={…}, train_sokoban={…})`: the parameters of `BASE` with changes, on an empty data root."""

    def make(**changes: Any) -> Subject:
        return Subject("sokoban", ProjectParameters.model_validate(merge(BASE, changes)), tmp_path / "data")

    return make


# Sizes with 482,432 weights.
TINY = {
    "vocabulary": 384,
    "hidden": 64,
    "layers": 2,
    "heads": 2,
    "kv_heads": 2,
    "head_dim": 32,
    "mlp": 192,
    "vision_hidden": 64,
    "vision_layers": 2,
    "vision_heads": 2,
    "vision_mlp": 128,
    "vision_grid": 16,
    "deepstack": (0,),
}


@pytest.fixture(scope="session")
def tiny_weights(tiny_policy: Policy) -> int:
    """Number of the tiny policy's weights."""
    return sum(parameter.numel() for parameter in tiny_policy.model.parameters())


@pytest.fixture(scope="session")
def model() -> ModelShape:
    """Shape of a tiny policy with the sizes of `TINY`."""
    shape = inspect_model(PolicyOptions.model_validate({"tiny": TINY}))[1]
    assert shape is not None
    return shape


@pytest.fixture
def policy_folder(tiny_policy: Policy, tmp_path: Path) -> Path:
    """The tiny policy as a folder, to be spoilt."""
    folder = tmp_path / "policy"
    save_policy(tiny_policy, folder)
    return folder


def says(checks: Sequence[Any], state: str, *texts: str) -> Any:
    """The only one of some checks, which is in this state and says these texts."""
    (check,) = checks
    assert check.state == state, check
    assert all(text in check.found for text in texts), check
    return check
