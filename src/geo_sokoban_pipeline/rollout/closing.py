"""Closing an episode: its numbers, its reward, and how its tokens were sampled. Every number that is kept is finite."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from geo_sokoban_pipeline.rollout.engines.base import RolloutEngine
from geo_sokoban_pipeline.rollout.outcome import Outcome

if TYPE_CHECKING:
    from geo_sokoban_pipeline.rollout.episode import PlaySettings

logger = logging.getLogger(__name__)


def conclude_episode(env: Any, outcome: Outcome) -> Outcome:
    """Tell an environment that its episode is over (`InteractionEnv.conclude`), and take its state into the outcome."""
    if hasattr(env, "conclude"):
        env.conclude(outcome.replies, outcome.status)
    return replace(outcome, env=env.metadata()) if hasattr(env, "metadata") else outcome


def measure_episode(env: Any) -> dict[str, float]:
    """An environment's own numbers; `{}` where it has none.

    Raises:
        ValueError: one is not finite; the message names it.
    """
    return _finite("final_metrics of the environment", env.final_metrics()) if hasattr(env, "final_metrics") else {}


def begin_reward(
    reward: Callable[..., Mapping[str, float]], outcome: Outcome, args: Mapping[str, Any]
) -> Callable[[], Mapping[str, float]]:
    """What gives the parts of an episode's reward.

    A reward whose work is slow may have a method `begin` that takes the same arguments, sets the work going without
    waiting for it, and returns a function without arguments that gives the parts.
    """
    return reward.begin(outcome, args) if hasattr(reward, "begin") else partial(reward, outcome, args)


def check_reward(given: Mapping[str, float]) -> dict[str, float]:
    """Parts of an episode's reward, `reward` among them.

    Raises:
        ValueError: one is not finite, or `reward` is missing; the message names it.
    """
    parts = _finite("reward.function", given)
    if "reward" not in parts:
        raise ValueError(f"reward.function gave {sorted(parts)}, but no `reward`.")
    return parts


def close_environment(env: Any, episode: str) -> None:
    """Close an episode's environment, if it has one; an error in it is logged and costs nothing."""
    try:
        if env is not None:
            env.close()
    except Exception:  # closing must not cost a finished episode (seed section 3.1)
        logger.warning("closing the environment of %s failed", episode, exc_info=True)


def describe_sampling(engine: RolloutEngine, settings: PlaySettings) -> str:
    """How an episode's tokens were sampled, as JSON."""
    rollout = settings.rollout
    values = {
        "engine": engine.name,
        "engine_version": engine.software_version,
        "seeded": engine.seeded,
        **settings.sampling.model_dump(),
        "max_turns": rollout.max_turns,
        "max_tokens_per_turn": rollout.max_tokens_per_turn,
        "max_response_tokens": rollout.max_response_tokens,
        "max_context_tokens": rollout.max_context_tokens,
    }
    return json.dumps(values)


def _finite(source: str, values: Mapping[str, float]) -> dict[str, float]:
    numbers = {name: float(value) for name, value in values.items()}
    for name, number in numbers.items():
        if not math.isfinite(number):
            raise ValueError(f"{source} gave {name}={number}; numbers must be finite.")
    return numbers
