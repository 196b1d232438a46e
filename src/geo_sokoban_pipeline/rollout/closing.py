"""Closing an episode: its numbers, its reward, and how its tokens were sampled. Every number that is kept is finite."""

from __future__ import annotations

import inspect
import json
import logging
import math
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from functools import cache, partial
from typing import TYPE_CHECKING, Any

from geo_sokoban_pipeline.rollout.engines.sglang.background import BackgroundLoop
from geo_sokoban_pipeline.rollout.outcome import Outcome

if TYPE_CHECKING:
    from geo_sokoban_pipeline.rollout.engines.base import RolloutEngine
    from geo_sokoban_pipeline.rollout.episode import PlaySettings

logger = logging.getLogger(__name__)

_METHODS = ("reset", "step", "format_observation", "close")
_STEP = 3  # observation, done, info


def conclude_episode(env: Any, outcome: Outcome) -> Outcome:
    """Tell an environment that its episode is over (`InteractionEnv.conclude`), and take its state into the outcome."""
    if hasattr(env, "conclude"):
        env.conclude(outcome.replies, outcome.status)
    known = env.metadata() if hasattr(env, "metadata") else {}
    return replace(outcome, env=known, measure=partial(measure_episode, env))


def measure_episode(env: Any) -> dict[str, float]:
    """An environment's own numbers; `{}` where it has none.

    Raises:
        ValueError: one is not finite; the message names it.
    """
    return _finite("final_metrics of the environment", env.final_metrics()) if hasattr(env, "final_metrics") else {}


def begin_reward(reward: Callable[..., Any], outcome: Outcome, args: Mapping[str, Any]) -> Callable[[], Any]:
    """What gives the parts of an episode's reward.

    A reward whose work is slow may have a method `begin` that takes the same arguments, sets the work going without
    waiting for it, and returns a function without arguments that gives the parts. One that is `async def` begins here,
    too, so that the rewards of all episodes wait for their servers side by side.
    """
    if hasattr(reward, "begin"):
        begun: Callable[[], Any] = reward.begin(outcome, args)
        return begun
    if inspect.iscoroutinefunction(reward) or inspect.iscoroutinefunction(type(reward).__call__):
        return _reward_loop().start(reward(outcome, args)).result
    return partial(_call_reward, reward, outcome, args)


def check_reward(given: Any, name: str) -> dict[str, float]:
    """Parts of an episode's reward, `reward` among them.

    Args:
        given: what the function returned: the parts, or the reward as a number.
        name: the value of `reward.function`.

    Raises:
        ValueError: it is neither, one is no finite number, or `reward` is missing; the message names it.
    """
    source = f"reward.function={name}"
    if not isinstance(given, Mapping) and _number(given) is not None:
        given = {"reward": given}
    if not isinstance(given, Mapping):
        raise ValueError(
            f"{source}: must return a dict with the key 'reward' (float), or a float; it returned {_type(given)}"
        )
    parts = _finite(source, given)
    if "reward" not in parts:
        keys = ", ".join(map(repr, sorted(parts))) or "no key"
        raise ValueError(f"{source}: must return a dict with the key 'reward' (float), or a float; its dict has {keys}")
    return parts


def check_environment(env: Any, name: str) -> None:
    """See that what a factory has built can be played.

    Args:
        name: the value of `env.factory`.

    Raises:
        ValueError: a method is missing; the message names it.
    """
    missing = [method for method in _METHODS if not callable(getattr(env, method, None))]
    if missing:
        raise ValueError(
            f"env.factory={name}: must return an environment with {', '.join(_METHODS)}; it returned {_type(env)} "
            f"without {', '.join(missing)}"
        )


def check_step(given: Any, name: str) -> tuple[Any, bool, dict[str, Any]]:
    """What an environment's `step` returned: observation, done, info.

    Raises:
        ValueError: it is something else.
    """
    if not isinstance(given, tuple) or len(given) != _STEP or not isinstance(given[2], dict):
        found = f"a tuple of {len(given)}" if isinstance(given, tuple) and len(given) != _STEP else _type(given)
        if found == "a tuple":
            found = f"{_type(given[2])} as info"
        raise ValueError(
            f"env.factory={name}: step must return (observation, done, info), info being a dict; it returned {found}"
        )
    return given[0], bool(given[1]), given[2]


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


def _call_reward(reward: Callable[..., Any], outcome: Outcome, args: Mapping[str, Any]) -> Any:
    given = reward(outcome, args)
    return _reward_loop().run(_await(given)) if inspect.isawaitable(given) else given


async def _await(work: Awaitable[Any]) -> Any:
    return await work


@cache
def _reward_loop() -> BackgroundLoop:
    """Where rewards that are `async def` run, all of a process in one, so that they can share their connections."""
    return BackgroundLoop("rewards")


def _finite(source: str, values: Mapping[str, Any]) -> dict[str, float]:
    numbers = {}
    for name, value in values.items():
        number = _number(value)
        if number is None:
            raise ValueError(f"{source}: {name!r} must be a number; it is {_type(value)}")
        if not math.isfinite(number):
            raise ValueError(f"{source} gave {name}={number}; numbers must be finite.")
        numbers[name] = number
    return numbers


def _number(value: Any) -> float | None:
    """A number as a float, from whatever library; None: it is none, and a text is none either."""
    try:
        return None if isinstance(value, str | bytes) else float(value)
    except (TypeError, ValueError):
        return None


def _type(value: Any) -> str:
    """The type of a value in words."""
    if value is None:
        return "None"
    name = type(value).__name__
    return f"an {name}" if name[0].lower() in "aeiou" else f"a {name}"
