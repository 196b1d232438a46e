"""Slow work of environments and rewards: begun for a whole batch before anything waits for it, at its own risk."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from typing import ClassVar

import pytest

from geo_sokoban_pipeline.rollout.episode import EpisodeRequest
from geo_sokoban_pipeline.rollout.rollout import rollout
from rollout.scripted import BatchEngine, CharacterPolicy, ScriptedEngine, TalkEnv, make_settings, play_scripted

events: list[tuple[str, ...]] = []


class SlowEnv(TalkEnv):
    """Writes down what it is asked, in order."""

    def __init__(self, name: str, **settings):
        super().__init__(**settings)
        self.name = name

    def prepare(self, text):
        events.append(("prepare", self.name, text))
        self._maybe_raise("prepare")

    def step(self, text):
        events.append(("step", self.name, text))
        return super().step(text)

    def finalize(self, responses, status):
        events.append(("finalize", self.name, *responses, status))
        self._maybe_raise("finalize")

    def final_metrics(self):
        events.append(("metrics", self.name))
        return {"success": 1.0}


class SlowReward:
    """Writes down for whom it begins and whom it grades."""

    def begin(self, outcome, args):
        events.append(("begin reward", outcome.prompt["id"]))
        return lambda: self(outcome, args)

    def __call__(self, outcome, args):
        events.append(("reward", outcome.prompt["id"]))
        return {"reward": 1.0}


slow_reward = SlowReward()


def build_env(sample, args):
    return SlowEnv(sample["id"], **sample["env"])


def play(engine, *setups, factory="build_env", reward=f"{__name__}.slow_reward"):
    settings = make_settings(factory=f"{__name__}.{factory}", reward=reward)
    tasks = [EpisodeRequest(n, {"id": n, "prompt": "p", "env": env}, 0, i, i) for i, (n, env) in enumerate(setups)]
    events.clear()
    return rollout(engine, CharacterPolicy(), tasks, settings)


def play_batches(responses, *setups):
    return play(BatchEngine(dict(enumerate(responses))), *setups)


def test_a_batch_is_prepared_before_its_first_step_and_all_rewards_begun_before_one_is_taken():
    play_batches(
        [[("one", "stop"), ("two", "stop")], [("yes", "stop")]], ("a", {"ends_after": 2}), ("b", {"ends_after": 1})
    )
    assert events == [
        ("prepare", "a", "one"),
        ("prepare", "b", "yes"),
        ("step", "a", "one"),
        ("step", "b", "yes"),
        ("prepare", "a", "two"),
        ("step", "a", "two"),
        ("finalize", "a", "one", "two", "completed"),
        ("begin reward", "a"),
        ("finalize", "b", "yes", "completed"),
        ("begin reward", "b"),
        ("metrics", "a"),
        ("reward", "a"),
        ("metrics", "b"),
        ("reward", "b"),
    ]


class GatedEnv(SlowEnv):
    """Waits in its step for a future of its own, which others or a clock may set."""

    gates: ClassVar[dict[str, Future[None]]] = {}

    def prepare(self, text):
        super().prepare(text)
        if text == "clock":
            threading.Timer(0.05, self.gates[self.name].set_result, [None]).start()
        return [self.gates[self.name]] if self.name in self.gates else None

    def step(self, text):
        if self.name in self.gates:
            self.gates[self.name].result(timeout=60)
        if text == "open" and not self.gates["slow"].done():
            self.gates["slow"].set_result(None)
        return super().step(text)


def build_gated(sample, args):
    return GatedEnv(sample["id"], **sample["env"])


def play_gated(engine, *setups):
    GatedEnv.gates = {"slow": Future()}
    return play(engine, *setups, factory="build_gated", reward="rollout.scripted.one_per_response")


@pytest.mark.parametrize("engine", [ScriptedEngine, BatchEngine])
def test_an_engine_that_is_not_repeatable_goes_on_while_somebody_waits(engine):
    """The slow conversation's first response is graded only after the other one has come to its second: no deadlock."""
    made = engine({0: [("one", "stop")], 1: [("go", "stop"), ("open", "stop")]})
    made.seeded = False
    episodes = play_gated(made, ("slow", {"ends_after": 1}), ("fast", {"ends_after": 2}))
    assert [episode.status for episode in episodes] == ["completed", "completed"]
    steps = [event[1:] for event in events if event[0] == "step"]
    assert steps == [("fast", "go"), ("fast", "open"), ("slow", "one")]


@pytest.mark.parametrize("seeded", [True, False])
def test_where_nothing_else_is_to_come_the_loop_waits(seeded):
    made = BatchEngine({0: [("clock", "stop")], 1: [("go", "stop")]})
    made.seeded = seeded
    episodes = play_gated(made, ("slow", {"ends_after": 1}), ("fast", {"ends_after": 1}))
    assert [episode.status for episode in episodes] == ["completed", "completed"]
    steps = [event[1] for event in events if event[0] == "step"]
    # Without a seed the fast one need not wait; whether it did is a matter of the clock.
    assert sorted(steps) == ["fast", "slow"] and (steps[0] == "slow" or not seeded)


def test_the_end_shows_responses_that_were_never_stepped_with():
    play_batches([[("one", "stop"), ("cut", "length")]], ("a", {}))
    assert ("step", "a", "cut") not in events
    assert ("finalize", "a", "one", "cut", "truncated") in events


def test_aborted_episodes_are_concluded_but_not_rewarded():
    (episode,) = play_batches([[("one", "abort")]], ("a", {}))
    assert [event[0] for event in events] == ["prepare", "finalize", "metrics"]
    assert (episode.reward, episode.metrics["success"]) == (None, 1.0)


@pytest.mark.parametrize(("place", "sampled"), [("prepare", 3), ("finalize", 3)])
def test_what_fails_costs_its_own_episode_alone(place, sampled):
    responses = [[("one", "stop")], [("two", "stop")]]
    bad, good = play_batches(responses, ("a", {"ends_after": 1, "raises": place}), ("b", {"ends_after": 1}))
    assert bad.status == "failed"
    assert bad.error.startswith(f"RuntimeError: broken {place}, in tests/rollout/scripted.py, line ")
    assert bad.loss_mask.sum() == sampled, "what was sampled is kept"
    assert (good.status, good.reward) == ("completed", 1.0)
    assert ("step", "a", "one") not in events or place == "finalize"


def test_a_label_that_is_a_number_is_stored_as_text():
    (episode,), _ = play_scripted([("abcd", "stop")], make_settings({"ends_after": 1}), [{"answer": 5}])
    assert (episode.status, episode.label) == ("completed", "5")
