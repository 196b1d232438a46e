"""Arguments of the environment: what is refused, and how it is named."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import fields
from typing import Any

from geo_sokoban_pipeline.envs.sokoban.board import MoveRewards
from geo_sokoban_pipeline.envs.sokoban.render import MIN_CELL_PX
from geo_sokoban_pipeline.options.base import MOST, REWARD_BOUNDS, Bounds, check_number, checked_arguments

# Of every number among the arguments, the same as of the data's options where these have it too.
BOUNDS: Mapping[str, Bounds] = {
    "max_actions_per_turn": Bounds(1, MOST),
    "max_steps": Bounds(1, MOST),
    "cell_px": Bounds(MIN_CELL_PX, 512),
    "optimal_steps": Bounds(0, MOST),
    **{f"rewards.{field.name}": REWARD_BOUNDS for field in fields(MoveRewards)},
}


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
        ValueError: a name is unknown, and the message names the nearest known one; or a number is out of its bounds.
    """
    options = checked_arguments("env.args", given, known)
    for name, value in options.items():
        # The optimum of a level may be unknown.
        if name in BOUNDS and not (name == "optimal_steps" and value is None):
            check_number(f"env.args.{name}", value, BOUNDS[name])
    if "rewards" in options:
        options["rewards"] = _read_rewards(options["rewards"])
    return options


def _read_rewards(given: Any) -> MoveRewards:
    names = [field.name for field in fields(MoveRewards)]
    if not isinstance(given, Mapping):
        raise ValueError(f"env.args.rewards={given!r}: must be a mapping of {', '.join(names)}")
    rewards = checked_arguments("env.args.rewards", given, names)
    for name, value in rewards.items():
        check_number(f"env.args.rewards.{name}", value, BOUNDS[f"rewards.{name}"])
    return MoveRewards(**rewards)
