"""Work beside the caller: an event loop in a thread, also inside a notebook, and a thread for blocking calls."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from functools import cache
from typing import Any, TypeVar

Answer = TypeVar("Answer")
_making = threading.Lock()


class BackgroundLoop:
    """An event loop in its own daemon thread."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()

    def start(self, work: Coroutine[Any, Any, Answer]) -> Future[Answer]:
        """Start a coroutine; returns at once."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def run(self, work: Coroutine[Any, Any, Answer]) -> Answer:
        """Run a coroutine and wait for it; an interrupt of the caller cancels it."""
        future = self.start(work)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def call(self, function: Callable[..., Answer], *arguments: Any) -> Answer:
        """Call a function in the loop's thread and wait for its result."""

        async def work() -> Answer:
            return function(*arguments)

        return self.run(work())

    def close(self) -> None:
        """Cancel all tasks and end the thread."""
        if self._loop.is_closed():
            return
        self.run(_cancel_others())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


async def _cancel_others() -> None:
    others = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)


def shared_loop(name: str) -> BackgroundLoop:
    """The loop of this name: one per process, because what a coroutine opens, such as a socket, belongs to its loop.

    Nothing closes it: what is open stays so between rollouts, and the daemon thread ends with the process.
    """
    with _making:  # threads of several environments may ask at once
        return _made(name)


@cache
def _made(name: str) -> BackgroundLoop:
    return BackgroundLoop(name)


class CallThread(threading.Thread):
    """A daemon thread that makes calls one after the other; one that never returns does not keep its process."""

    def __init__(self, name: str) -> None:
        super().__init__(name=name, daemon=True)
        self._calls: queue.SimpleQueue[tuple[Future[Any], Callable[..., Any], tuple[Any, ...]] | None] = (
            queue.SimpleQueue()
        )
        self.start()

    def submit(self, function: Callable[..., Answer], *arguments: Any) -> Future[Answer]:
        """Call a function after all earlier calls."""
        future: Future[Answer] = Future()
        self._calls.put((future, function, arguments))
        return future

    def end(self) -> None:
        """End after all earlier calls."""
        self._calls.put(None)

    def run(self) -> None:
        while (call := self._calls.get()) is not None:
            _settle(*call)
            del call  # else it would be kept until the next one


def _settle(future: Future[Any], function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    try:
        future.set_result(function(*arguments))
    except BaseException as error:  # raised where the result is taken
        future.set_exception(error)
