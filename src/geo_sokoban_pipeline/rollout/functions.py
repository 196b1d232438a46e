"""Runs of a function of one episode, `async def generate(session, request)`: in place, and on an event loop.

The built-in function awaits its session only; it runs in the caller's thread. A user's may await anything: it runs on
the event loop of this process. An episode is touched by one thread at a time: by that of the loop while its function is
at work, by the caller's while it waits for a response. Calls of its environment come one after the other (`EnvCalls`).
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Coroutine, Generator
from concurrent.futures import Future, wait
from contextlib import suppress
from types import coroutine
from typing import Any, TypeVar

from geo_sokoban_pipeline.background import BackgroundLoop, CallThread, shared_loop

STUCK = "stuck environment"  # name of the thread of a call that is too late
Value = TypeVar("Value")


def is_async(function: Any) -> bool:
    """Whether it is an `async def`, or an object whose call is one."""
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


def own_loop() -> BackgroundLoop:
    """The event loop of a user's `async def`."""
    return shared_loop("own code")


class EnvTimeoutError(RuntimeError):
    """An environment took longer than `rollout.env_timeout`."""


class EnvCalls:
    """Calls of one episode's environment. With a limit all of them run in one thread of its own.

    A call that is too late is left alone, since nothing ends a thread: the environment is not called again, not even to
    close it.

    Attributes:
        seconds: that a call may take; None: unlimited.
        is_stuck: whether a call came too late.
    """

    def __init__(self, seconds: float | None) -> None:
        self.seconds = seconds
        self._thread: CallThread | None = None
        self.is_stuck = False

    def __call__(self, function: Callable[..., Value], *arguments: Any) -> Value:
        """Call a function.

        Raises:
            EnvTimeoutError: it takes longer than the limit; or an earlier call did.
        """
        if self.seconds is None and self._thread is None:
            return function(*arguments)
        future = self.begin(function, *arguments)
        if wait([future], self.seconds).done:
            return future.result()
        raise self.give_up(function)

    def begin(self, function: Callable[..., Value], *arguments: Any) -> Future[Value]:
        """Begin a call in the environment's thread, in which all further calls are made.

        Raises:
            EnvTimeoutError: an earlier call has not ended in time.
        """
        if self.is_stuck:
            raise EnvTimeoutError("an earlier call of the environment has not ended")
        if self._thread is None:
            self._thread = CallThread("environment")
        return self._thread.submit(function, *arguments)

    def give_up(self, function: Callable[..., Any]) -> EnvTimeoutError:
        """Leave a call alone that is too late; returns the error."""
        self.is_stuck = True
        if self._thread is not None:
            self._thread.name = STUCK
        self.end()
        name = getattr(function, "__name__", type(function).__name__)
        return EnvTimeoutError(f"{name} of the environment took longer than rollout.env_timeout={self.seconds:g} s")

    def end(self) -> None:
        """End the thread, as soon as it is free."""
        if self._thread is not None:
            self._thread.end()
            self._thread = None


class InlineRun:
    """A function that awaits its session only, run in the caller's thread.

    It pauses where the session waits for a response.

    Args:
        work: the function.
        moved: called when it pauses and when it ends.
    """

    def __init__(self, work: Coroutine[Any, Any, None], moved: Callable[[], None]) -> None:
        self._work, self._moved = work, moved

    def go_on(self) -> None:
        """Run it to its next pause, or to its end."""
        with suppress(StopIteration):
            self._work.send(None)
        self._moved()

    async def pause(self) -> None:
        """Wait until the caller has taken a response; called by the session."""
        await _suspend()

    async def call(self, calls: EnvCalls, function: Callable[..., Value], *arguments: Any) -> Value:
        """Call a method of the environment; called by the session."""
        return calls(function, *arguments)

    def cancel(self) -> None:
        """End it where it pauses."""
        self._work.close()


@coroutine
def _suspend() -> Generator[None, None, None]:
    yield


class LoopRun:
    """A function on the event loop of this process; see `InlineRun`.

    Whatever it raises fails its episode alone: even an exit must not end the loop, which others use.

    Args:
        work: the function.
        moved: called when it pauses and when it ends, in the loop's thread.
        failed: called with what it has raised, in the loop's thread.
        limit: seconds that it may take between two pauses, calls of the environment left out; None: unlimited.
        late: the error of a function that takes longer.
    """

    def __init__(
        self,
        work: Coroutine[Any, Any, None],
        moved: Callable[[], None],
        failed: Callable[[BaseException], None],
        limit: float | None,
        late: Exception,
    ) -> None:
        self._work, self._moved, self._failed, self._limit, self._late = work, moved, failed, limit, late
        self._clock = asyncio.Timeout(None)
        self._task: Future[None] | None = None
        self._paused: Future[None] = Future()
        self._is_cancelled = False

    def go_on(self) -> None:
        """See `InlineRun`; returns at once."""
        if self._task is None:
            self._task = own_loop().start(self._run())
        else:
            self._paused.set_result(None)

    async def _run(self) -> None:
        try:
            async with self._clock:
                self._limit_from_now()
                await self._work
        except TimeoutError:
            self._failed(self._late)
        except BaseException as error:
            if self._is_cancelled:
                raise
            self._failed(error)
        finally:
            self._moved()

    def _limit_from_now(self) -> None:
        self._clock.reschedule(None if self._limit is None else asyncio.get_running_loop().time() + self._limit)

    async def pause(self) -> None:
        """See `InlineRun`. A user's time-out does not interrupt it: a response that is asked for will come."""
        self._clock.reschedule(None)
        self._paused = Future()
        resumed = asyncio.wrap_future(self._paused)
        self._moved()
        while not resumed.done():
            try:
                await asyncio.wait([resumed])
            except asyncio.CancelledError:
                if self._is_cancelled:
                    raise
        self._limit_from_now()

    async def call(self, calls: EnvCalls, function: Callable[..., Value], *arguments: Any) -> Value:
        """See `InlineRun`: in a thread of the environment, within a limit of its own."""
        self._clock.reschedule(None)
        try:
            begun = asyncio.wrap_future(calls.begin(function, *arguments))
            await asyncio.wait([begun], timeout=calls.seconds)
            if not begun.done():
                raise calls.give_up(function)
            return begun.result()
        finally:
            self._limit_from_now()

    def cancel(self) -> None:
        """See `InlineRun`."""
        self._is_cancelled = True
        if self._task is not None:
            self._task.cancel()
