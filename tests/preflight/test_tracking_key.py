"""WANDB_API_KEY in the pre-flight: used, not used, or its package missing."""

from __future__ import annotations

from typing import Any

import pytest

from geo_sokoban_pipeline.preflight import machine
from geo_sokoban_pipeline.preflight.machine import check_variables


@pytest.mark.parametrize(
    ("version", "mode", "tracking", "expected"),
    [
        ("0.31.0", None, {}, ("ok", "set: runs are tracked by Weights & Biases too (wandb 0.31.0, online)")),
        ("0.31.0", "offline", {}, ("ok", "set: runs are tracked by Weights & Biases too (wandb 0.31.0, offline)")),
        (
            None,
            None,
            {},
            ("warning", "set, but the package wandb is not installed: runs are tracked by MLflow alone"),
        ),
        ("0.31.0", None, {"wandb": False}, ("ok", "set but not used: tracking.wandb=false")),
        ("0.31.0", None, {"enabled": False}, ("ok", "set but not used: tracking.enabled=false")),
    ],
)
def test_the_key(make_subject: Any, monkeypatch: pytest.MonkeyPatch, version: Any, mode: Any, tracking: Any,
                 expected: Any) -> None:  # fmt: skip
    monkeypatch.setattr(machine, "installed_version", lambda name: version if name == "wandb" else None)
    environment = {"WANDB_API_KEY": "secret", **({"WANDB_MODE": mode} if mode else {})}
    (check,) = check_variables(make_subject(tracking=tracking), environment)
    assert (check.state, check.found) == expected
    assert "secret" not in check.found + check.way_out


def test_without_the_key_nothing_is_said(make_subject: Any) -> None:
    assert check_variables(make_subject(), {"WANDB_MODE": "offline"}) == []
