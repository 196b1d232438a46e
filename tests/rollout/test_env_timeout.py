"""Time limits: of an environment's calls, and of a rollout worker, in which a slow reward does not count."""

from __future__ import annotations

import threading
import time
from itertools import product
from typing import Any

import pytest

from geo_sokoban_pipeline.progress import Clock
from geo_sokoban_pipeline.rollout.functions import STUCK, EnvCalls, EnvTimeoutError
from geo_sokoban_pipeline.training.worker import Worker
from rollout.scripted import (
    OWN_LOOP,
    CharacterPolicy,
    ScriptedEngine,
    TalkEnv,
    made,
    make_settings,
    play_scripted,
    requests_of,
)

LIMIT = 0.3
BUILT_IN = "geo_sokoban_pipeline.rollout.rollout.rollout"
FIVE = ("abcde", "stop")
waiting = threading.Event()  # set at the end of a test, so that no thread is left


class HangingEnv(TalkEnv):
    """Waits in the method that it is given; knows in which threads its methods have run."""

    def __init__(self, hangs: str) -> None:
        super().__init__(ends_after=2)
        self.hangs, self.threads = hangs, {threading.current_thread()}

    def _maybe_raise(self, place: str) -> None:
        self.threads.add(threading.current_thread())
        if self.hangs == place:
            waiting.wait(60)

    def prepare(self, text: str) -> None:
        self._maybe_raise("prepare")

    def finalize(self, responses: Any, status: str) -> None:
        self._maybe_raise("finalize")

    def metadata(self) -> dict[str, Any]:
        self._maybe_raise("metadata")
        return {}

    def final_metrics(self) -> dict[str, float]:
        self._maybe_raise("final_metrics")
        return {"success": 1.0}


def build_env(sample: dict[str, Any], args: dict[str, Any]) -> HangingEnv:
    if sample["hangs"] == "build_env":
        waiting.wait(60)
    made.append(HangingEnv(sample["hangs"]))  # type: ignore[arg-type]
    return made[-1]  # type: ignore[return-value]


@pytest.fixture(autouse=True)
def _ended() -> Any:
    waiting.clear()
    yield
    waiting.set()


def play(hangs: str, limit: float | None = LIMIT, function: str = BUILT_IN) -> Any:
    """Two episodes, of which the first hangs."""
    settings = make_settings(max_turns=3, env_timeout=limit, factory=f"{__name__}.build_env", function=function)
    episodes, _ = play_scripted({0: [FIVE] * 3, 1: [FIVE] * 3}, settings, [{"hangs": hangs}, {"hangs": ""}])
    return episodes


@pytest.mark.parametrize(
    ("place", "function"),
    [
        *((place, BUILT_IN) for place in ("prepare", "finalize", "metadata", "final_metrics")),
        *product(("build_env", "reset", "step", "format_observation"), (BUILT_IN, OWN_LOOP)),
    ],
)
def test_a_call_that_is_too_late_fails_its_episode_alone(place: str, function: str) -> None:
    hung, other = play(place, function=function)
    name = {"final_metrics": "measure_episode"}.get(place, place)
    wanted = f"EnvTimeoutError: {name} of the environment took longer than rollout.env_timeout={LIMIT:g} s"
    assert (hung.status, hung.error.partition(", in ")[0], hung.reward) == ("failed", wanted, None)
    assert (other.status, other.reward, other.metrics["success"]) == ("completed", 2.0, 1.0)
    stuck = [thread for thread in threading.enumerate() if thread.name == STUCK]
    assert [thread.daemon for thread in stuck] == [True], "the command ends without it"


@pytest.mark.parametrize("function", [BUILT_IN, OWN_LOOP])
def test_closing_may_hang_without_harm(function: str) -> None:
    hung, _ = play("close", function=function)
    assert (hung.status, hung.reward) == ("completed", 2.0)


@pytest.mark.parametrize(
    ("limit", "function", "is_own"), [(None, BUILT_IN, False), (LIMIT, BUILT_IN, True), (None, OWN_LOOP, True)]
)
def test_a_limit_or_an_own_loop_takes_a_thread_that_ends_with_its_episode(
    limit: float | None, function: str, is_own: bool
) -> None:
    play("", limit, function)
    threads = [thread for env in made for thread in env.threads]  # type: ignore[attr-defined]
    assert len(threads) == 2, "one for each environment"
    for thread in set(threads):
        assert (thread is not threading.main_thread()) == is_own
        if is_own:
            thread.join(10)
            assert not thread.is_alive()


def test_an_environment_is_not_called_again() -> None:
    calls = EnvCalls(LIMIT)
    assert calls(sum, [1, 2]) == 3
    with pytest.raises(ZeroDivisionError):
        calls(lambda: 1 / 0)
    with pytest.raises(TimeoutError, match="its own"):
        calls(_time_out)
    with pytest.raises(EnvTimeoutError, match="wait of the environment took longer"):
        calls(waiting.wait, 60)
    with pytest.raises(EnvTimeoutError, match="an earlier call"):
        calls(sum, [1])


def _time_out() -> None:
    raise TimeoutError("its own")


def slow_reward(outcome: Any, args: dict[str, Any]) -> float:
    """Takes longer than a rollout worker may stand still."""
    time.sleep(3 * LIMIT)
    return 1.0


class HangingEngine(ScriptedEngine):
    """An engine of this process that never answers."""

    def poll(self) -> Any:
        if self._queue:
            waiting.wait(3 * LIMIT)
        return super().poll()


@pytest.mark.parametrize(("engine", "is_hanging"), [(ScriptedEngine, False), (HangingEngine, True)])
def test_a_slow_reward_is_no_standstill_and_a_hanging_engine_is(engine: Any, is_hanging: bool) -> None:
    sent: list[Any] = []
    worker = Worker(CharacterPolicy(), None)  # type: ignore[arg-type]
    worker.engine = engine([FIVE])
    settings = make_settings(reward=f"{__name__}.slow_reward", max_turns=1)
    clock, longest = Clock(), 0.0

    def roll_out() -> None:
        with clock.working():
            worker.rollout_groups(sent.append, 1, requests_of([{}]), settings, is_all=True, is_streamed=False)

    thread = threading.Thread(target=roll_out)
    thread.start()
    while thread.is_alive():
        longest = max(longest, clock.standstill)
        time.sleep(0.01)
    assert (longest > 2 * LIMIT) == is_hanging
    assert [episode.reward for group in sent for episode in group] == [1.0]
