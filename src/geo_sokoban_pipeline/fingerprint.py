"""Fingerprints: what a stored result depends on, as a flat table that can be hashed, compared and shown.

A run continues only where its fingerprint is the stored one; otherwise it stops before any work and lists what differs.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from geo_sokoban_pipeline.seeding import content_hash

Fingerprint = dict[str, Any]
_SHOWN = 12


class FingerprintError(RuntimeError):
    """Stored results were made with other parameters or inputs."""


def flatten(values: Mapping[str, Any], prefix: str = "") -> Fingerprint:
    """Nested mappings as one flat one with dotted names; lists and scalars are leaves, as JSON values."""
    flat: Fingerprint = {}
    for name, value in values.items():
        path = f"{prefix}.{name}" if prefix else str(name)
        if isinstance(value, Mapping) and value:
            flat |= flatten(value, path)
        else:
            flat[path] = json.loads(json.dumps(value))
    return flat


def fingerprint_hash(fingerprint: Fingerprint) -> str:
    """Hash of a fingerprint, independent of the order of its names."""
    return content_hash(json.dumps(fingerprint, sort_keys=True))


def differences(stored: Fingerprint, current: Fingerprint) -> list[str]:
    """One line per name that differs, sorted; empty where both are equal."""
    lines = []
    for name in sorted({*stored, *current}):
        before, now = stored.get(name, "(absent)"), current.get(name, "(absent)")
        if before != now:
            lines.append(f"{name}: stored {_short(before)}, now {_short(now)}")
    return lines


def check_fingerprint(what: str, stored: Fingerprint, current: Fingerprint) -> None:
    """Stop unless stored results were made with the current parameters and inputs.

    Raises:
        FingerprintError: with the differences and the two ways out.
    """
    lines = differences(stored, current)
    if not lines:
        return
    shown = "\n  ".join([*lines[:_SHOWN], *([f"… and {len(lines) - _SHOWN} more"] if len(lines) > _SHOWN else [])])
    raise FingerprintError(
        f"{what} of this run id was made with other settings:\n  {shown}\n"
        "Give the new settings a run of their own with --params run_id=<new>, or start this one anew with "
        "--params fresh=true."
    )


def _short(value: Any) -> str:
    text = json.dumps(value) if not isinstance(value, str) else value
    return text if len(text) <= 60 else text[:57] + "…"
