"""Arguments of the environment: what is refused, and how it is named."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import fields
from typing import Any

from geo_sokoban_pipeline.envs.sokoban.board import MoveRewards
from geo_sokoban_pipeline.options.base import checked_arguments


def check_least(name: str, number: int, least: int) -> None:
    """See that a number is large enough.

    Raises:
        ValueError: it is not.
    """
    if number < least:
        raise ValueError(f"{name}={number}: must be at least {least}")


def check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    """See that a word is one of those that are known.

    Raises:
        ValueError: it is not.
    """
    if value not in choices:
        raise ValueError(f"{name}={value!r}: must be one of {', '.join(choices)}")


def read_arguments(given: Mapping[str, Any], known: Collection[str]) -> dict[str, Any]:
    """`env.args` as keyword arguments, the mapping `rewards` as `MoveRewards`.

    Raises:
        ValueError: a name is unknown; the message names the nearest known one.
    """
    options = checked_arguments("env.args", given, known)
    if isinstance(options.get("rewards"), Mapping):
        names = {field.name for field in fields(MoveRewards)}
        options["rewards"] = MoveRewards(**checked_arguments("env.args.rewards", options["rewards"], names))
    return options
