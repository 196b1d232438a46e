"""What a check finds: a record with a state, the facts, and the way out.

A check never raises for what it looks at: `guard` turns an error into a failure, so one bad setting does not hide the
others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Literal

from geo_sokoban_pipeline.own_code import where

State = Literal["ok", "warning", "failure", "skipped"]


@dataclass(frozen=True)
class Check:
    """One finding.

    Attributes:
        group: what it belongs to: `parameters`, `data`, `model`, …
        name: what was looked at.
        state: `failure` is what would end a run later; a `warning` does not.
        found: the facts, with their units.
        way_out: what to do; empty where nothing is to be done.
    """

    group: str
    name: str
    state: State
    found: str
    way_out: str = ""

    def to_json(self) -> dict[str, str]:
        """The record as JSON values."""
        return asdict(self)


def guard(group: str, name: str, check: Callable[[], Sequence[Check]]) -> list[Check]:
    """Findings of a check; an error that it raises is a failure under `name`, with the error's text."""
    try:
        return list(check())
    except Exception as error:  # what is looked at may be anybody's code or files; the other checks still count
        return [failure_of(group, name, error)]


def failure_of(group: str, name: str, error: Exception) -> Check:
    """A failure that says what an error says, and where in own code; its class stands before texts of others."""
    text = (" ".join(str(error).split()) or "no message") + where(error)
    own = type(error).__module__.startswith("geo_sokoban_pipeline") or isinstance(error, FileNotFoundError | ValueError)
    return Check(group, name, "failure", text if own else f"{type(error).__name__}: {text}")
