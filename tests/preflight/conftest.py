"""A subject to look at, and a policy folder on disk."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from geo_sokoban_pipeline.options.project import ProjectParameters
from geo_sokoban_pipeline.policies.policy import Policy, save_policy
from geo_sokoban_pipeline.preflight.subject import Subject

BASE = Path(__file__).parents[2] / "conf/base/parameters"


def merge(base: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    result = dict(base)
    for name, value in changes.items():
        both = isinstance(value, dict) and isinstance(result.get(name), dict)
        result[name] = merge(result[name], value) if both else value
    return result


@pytest.fixture
def make_subject(tmp_path: Path) -> Callable[..., Subject]:
    """`make_subject(sokoban={…}, train_sokoban={…})`: the default parameters with changes, on an empty data root."""
    base: dict[str, Any] = {}
    for name in ("sokoban", "train_sokoban", "check_sokoban"):
        base |= yaml.safe_load((BASE / f"{name}.yml").read_text(encoding="utf-8"))

    def make(**changes: Any) -> Subject:
        return Subject("sokoban", ProjectParameters.model_validate(merge(base, changes)), tmp_path / "data")

    return make


@pytest.fixture
def policy_folder(tiny_policy: Policy, tmp_path: Path) -> Path:
    """The tiny policy as a folder, to be spoilt."""
    folder = tmp_path / "policy"
    save_policy(tiny_policy, folder)
    return folder


def states(checks: list[Any]) -> dict[str, str]:
    """State by name; the worst where a name occurs twice."""
    order = ("ok", "skipped", "warning", "failure")
    found: dict[str, str] = {}
    for check in checks:
        found[check.name] = max(found.get(check.name, "ok"), check.state, key=order.index)
    return found
