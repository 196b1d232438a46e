"""The return of an episode: what its environment gave for the steps, for environments with rewards of their own."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any


def episode_return(result: Any, args: Mapping[str, Any]) -> dict[str, float]:
    """Reward function: the sum of the turns' rewards, undiscounted.

    Args:
        result: finished episode, whose infos hold `turn_reward`.
        args: none are known.

    Raises:
        ValueError: arguments were given.
    """
    if args:
        raise ValueError(f"reward.args={dict(args)}: episode_return takes none; remove them.")
    return {"reward": math.fsum(info["turn_reward"] for info in result.infos)}
