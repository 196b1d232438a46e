"""Calls of environments within a time limit, and what environments and rewards give back, checked.

Both may be a user's code. Every number that is stored is finite.
"""

from __future__ import annotations

import logging
import math
import queue
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from typing import Any, TypeVar

from geo_sokoban_pipeline.formats import type_name

logger = logging.getLogger(__name__)

_ENV_METHODS = ("reset", "step", "format_observation", "close")
_STEP_VALUES = 3  # observation, done, info
STUCK = "stuck environment"  # name of the thread of a call that is too late
Result = TypeVar("Result")


class EnvTimeoutError(RuntimeError):
    """An environment took longer than `rollout.env_timeout`."""


class EnvCalls:
    """Calls of one episode's environment. With a limit all of them run in one thread of its own.

    A call that is too late is left alone, since nothing ends a thread: the environment is not called again, not even to
    close it.

    Args:
        seconds: that a call may take; None: unlimited.

    Attributes:
        is_stuck: whether a call came too late.
    """

    def __init__(self, seconds: float | None) -> None:
        self._seconds = seconds
        self._calls: queue.SimpleQueue[tuple[Future[Any], Callable[..., Any], tuple[Any, ...]] | None] | None = None
        self.is_stuck = False

    def __call__(self, function: Callable[..., Result], *arguments: Any) -> Result:
        """Call a function.

        Raises:
            EnvTimeoutError: it takes longer than the limit; or an earlier call did.
        """
        if self._seconds is None:
            return function(*arguments)
        if self.is_stuck:
            raise EnvTimeoutError("an earlier call of the environment has not ended")
        if self._calls is None:
            self._calls = queue.SimpleQueue()
            self._thread = threading.Thread(target=_serve_calls, args=(self._calls,), name="environment", daemon=True)
            self._thread.start()
        future: Future[Result] = Future()
        self._calls.put((future, function, arguments))
        if wait([future], self._seconds).done:
            return future.result()
        self.is_stuck = True
        self._thread.name = STUCK
        self.end()
        name = getattr(function, "__name__", type(function).__name__)
        raise EnvTimeoutError(f"{name} of the environment took longer than rollout.env_timeout={self._seconds:g} s")

    def end(self) -> None:
        """End the thread, as soon as it is free."""
        if self._calls is not None:
            self._calls.put(None)
            self._calls = None


def _serve_calls(calls: queue.SimpleQueue[tuple[Future[Any], Callable[..., Any], tuple[Any, ...]] | None]) -> None:
    while (call := calls.get()) is not None:
        future, function, arguments = call
        try:
            future.set_result(function(*arguments))
        except BaseException as error:  # raised where the result is taken
            future.set_exception(error)


def check_environment(env: Any, name: str) -> None:
    """Check that a factory's result is an environment.

    Args:
        name: the value of `env.factory`.

    Raises:
        ValueError: a method is missing; the message names it.
    """
    missing = [method for method in _ENV_METHODS if not callable(getattr(env, method, None))]
    if missing:
        raise ValueError(
            f"env.factory={name}: must return an environment with {', '.join(_ENV_METHODS)}; it returned "
            f"{type_name(env)} without {', '.join(missing)}"
        )


def check_step(given: Any, name: str) -> tuple[Any, bool, dict[str, Any]]:
    """Check the return value of an environment's `step`: (observation, done, info).

    Raises:
        ValueError: it is anything else.
    """
    if not isinstance(given, tuple) or len(given) != _STEP_VALUES or not isinstance(given[2], dict):
        found = type_name(given)
        if isinstance(given, tuple):
            has_info = len(given) == _STEP_VALUES
            found = f"{type_name(given[2])} as info" if has_info else f"a tuple of {len(given)}"
        raise ValueError(
            f"env.factory={name}: step must return (observation, done, info), info being a dict; it returned {found}"
        )
    return given[0], bool(given[1]), given[2]


def measure_episode(env: Any) -> dict[str, float]:
    """`env.final_metrics()`; `{}` if the environment has none.

    Raises:
        ValueError: one is not finite; the message names it.
    """
    return _finite("final_metrics of the environment", env.final_metrics()) if hasattr(env, "final_metrics") else {}


def check_reward(given: Any, name: str) -> dict[str, float]:
    """Parts of an episode's reward, `reward` among them.

    Args:
        given: return value of the reward function: the parts, or the reward as a number.
        name: the value of `reward.function`.

    Raises:
        ValueError: it is neither, one is no finite number, or `reward` is missing; the message names it.
    """
    source = f"reward.function={name}"
    if not isinstance(given, Mapping) and _number(given) is not None:
        given = {"reward": given}
    if not isinstance(given, Mapping):
        raise ValueError(
            f"{source}: must return a dict with the key 'reward' (float), or a float; it returned {type_name(given)}"
        )
    parts = _finite(source, given)
    if "reward" not in parts:
        keys = ", ".join(map(repr, sorted(parts))) or "no key"
        raise ValueError(f"{source}: must return a dict with the key 'reward' (float), or a float; its dict has {keys}")
    return parts


def close_environment(env: Any, episode: str, calls: EnvCalls | None = None) -> None:
    """Close an episode's environment, if it has one and is not stuck; an error is only logged.

    Args:
        calls: of the environment, which end here; None: without a limit.
    """
    calls = calls or EnvCalls(None)
    try:
        if env is not None and not calls.is_stuck:
            calls(env.close)
    except Exception:  # a finished episode stays valid
        logger.warning("closing the environment of %s failed", episode, exc_info=True)
    calls.end()


def _finite(source: str, values: Mapping[str, Any]) -> dict[str, float]:
    numbers = {}
    for name, value in values.items():
        number = _number(value)
        if number is None:
            raise ValueError(f"{source}: {name!r} must be a number; it is {type_name(value)}")
        if not math.isfinite(number):
            raise ValueError(f"{source} gave {name}={number}; numbers must be finite.")
        numbers[name] = number
    return numbers


def _number(value: Any) -> float | None:
    """A number of any library as a float; None for anything else, numeric texts included."""
    try:
        return None if isinstance(value, str | bytes) else float(value)
    except (TypeError, ValueError):
        return None
