"""How much the rollout engine gains from its cache, and what environments cost.

Run with `pytest benchmarks/test_engine.py -s`. In one run, with the default tiny policy and one thread, 64 episodes are
rolled out by the same engine with its cache on and off; one flag differs, vision features are cached in both.
Thresholds: at least 2 times the tokens per second at 8 turns and 4 times at 30.

Then iterations of 256 episodes on prompts that the default run's sampler draws from the default levels, with caches of
boards and images as in a run. Nearly all their boards are new; the threshold, observations under 5 % of a rollout, is
for them. The same iteration again shows the gain of the caches. Times are CPU-seconds.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import Any

import pytest
from benchmarks.records import keep
from benchmarks.setup import Rows, default_options, default_rows, warmed_policy

from geo_sokoban_pipeline.config.grpo import TrainOptions
from geo_sokoban_pipeline.config.rollout import RolloutOptions
from geo_sokoban_pipeline.envs.sokoban import SokobanEnv
from geo_sokoban_pipeline.envs.sokoban import env as sokoban
from geo_sokoban_pipeline.grpo.sampler import PromptSampler
from geo_sokoban_pipeline.policies.patches import PatchReader
from geo_sokoban_pipeline.policies.policy import Policy
from geo_sokoban_pipeline.rollout.engines.base import RolloutEngine
from geo_sokoban_pipeline.rollout.engines.factory import build_engine
from geo_sokoban_pipeline.rollout.episode import EpisodeRequest, RolloutSettings
from geo_sokoban_pipeline.rollout.rollout import rollout
from geo_sokoban_pipeline.trajectories.types import Trajectory

EPISODES, ROUNDS, WARM_START_STEPS = 64, 3, 80
THRESHOLDS = {8: 2.0, 30: 4.0}
UNMEASURED, MEASURED = 2, 8  # iterations; the first ones import, allocate and fill caches
OBSERVING_BAR, ENVIRONMENTS_BAR = 0.05, 0.12


@pytest.fixture(scope="module")
def options() -> TrainOptions:
    """Default options, with a short SFT on random legal moves: responses are well formed, levels stay unsolved."""
    steps = {"steps": WARM_START_STEPS, "validate_every": WARM_START_STEPS, "validation_episodes": 8}
    return default_options({"processes": 1, "warm_start": {**steps, "teacher": {"name": "random_legal"}}})


@pytest.fixture(scope="module")
def rows() -> Rows:
    return default_rows()


@pytest.fixture(scope="module")
def policy(options: TrainOptions, rows: Rows) -> Policy:
    return warmed_policy(options, rows)


def make_tasks(rows: Rows, groups: int, group_size: int) -> list[EpisodeRequest]:
    pairs = [(group, sample) for group in range(groups) for sample in range(group_size)]
    return [EpisodeRequest(f"g{g}/s{s}", rows[g], g, s, seed=1000 * g + s) for g, s in pairs]


def make_settings(options: TrainOptions, rollout: RolloutOptions, **env: Any) -> RolloutSettings:
    changed = options.env.model_copy(update={"args": options.env.args | env})
    return RolloutSettings(changed, options.reward, rollout, rollout.sampling, 0, "sokoban")


def rollout_timed(
    engine: RolloutEngine, policy: Policy, tasks: Sequence[EpisodeRequest], settings: RolloutSettings
) -> tuple[float, list[Trajectory]]:
    """CPU-seconds of a rollout, and its episodes."""
    began = time.process_time()
    episodes = rollout(engine, policy, tasks, settings)
    return time.process_time() - began, episodes


@pytest.fixture(scope="module")
def found() -> Iterator[dict[str, Any]]:
    """Results of all tests of this file; written once all are done."""
    values: dict[str, Any] = {"engine": []}
    yield values
    if len(values["engine"]) == len(THRESHOLDS) and "observing" in values:
        keep("engine", values)


@pytest.mark.parametrize(("turns", "threshold"), list(THRESHOLDS.items()))
def test_cached_against_uncached(
    policy: Policy, options: TrainOptions, rows: Rows, found: dict[str, Any], turns: int, threshold: float
) -> None:
    # Levels of six moves or more are hardly ever solved by chance, and deadlocks end no episode: episodes are long.
    hard = [row for row in rows if row["solution_length"] >= 6]
    tasks = make_tasks(hard, groups=EPISODES // 8, group_size=8)
    sampling = options.rollout.sampling.model_copy(update={"temperature": 0.5})
    base = options.rollout.model_copy(update={"max_turns": turns, "sampling": sampling})
    times: dict[bool, list[float]] = {True: [], False: []}
    rolled: dict[bool, list[Trajectory]] = {}
    engines = {cached: build_engine(policy, base.model_copy(update={"reuse_cache": cached})) for cached in times}
    # The two take turns, so that a slow moment of the machine hits both. The first round encodes the images.
    for _ in range(ROUNDS + 1):
        for cached, engine in engines.items():
            settings = make_settings(options, base, max_steps=10_000, end_when_lost=False)
            seconds, rolled[cached] = rollout_timed(engine, policy, tasks, settings)
            times[cached].append(seconds)
    best = {cached: min(seconds[1:]) for cached, seconds in times.items()}
    rates = {cached: sum(len(e.token_ids) for e in rolled[cached]) / best[cached] for cached in best}
    mean_turns = sum(e.metrics["turns"] for e in rolled[True]) / EPISODES
    ratio = rates[True] / rates[False]
    print(
        f"\n{EPISODES} episodes, {turns} turns at most (mean {mean_turns:.1f}): cached {rates[True]:,.0f} tokens/s, "
        f"uncached {rates[False]:,.0f} tokens/s, ratio {ratio:.2f} (threshold {threshold})"
    )
    found["engine"].append({"turns": turns, "cached": rates[True], "uncached": rates[False]})
    assert mean_turns > 0.9 * turns
    assert ratio >= threshold


@dataclass
class Observing:
    """CPU-seconds of making observations: text, image, message, decoding a prompt's image, PNG file and patches.

    Reading the clock takes as long as finding a known image; its time is measured and left out.
    """

    seconds: float = 0.0
    calls: int = 0
    places: Sequence[tuple[Any, str]] = (
        (sokoban, "observation_text"),
        (sokoban, "render_observation"),
        (SokobanEnv, "format_observation"),
        (PatchReader, "read"),
        (PatchReader, "read_uri"),
    )

    def watch(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for place, name in self.places:
            monkeypatch.setattr(place, name, self.timed(getattr(place, name)))

    def timed(self, work: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(work)
        def run(*args: Any, **named: Any) -> Any:
            began = time.process_time()
            try:
                return work(*args, **named)
            finally:
                self.seconds += time.process_time() - began
                self.calls += 1

        return run

    def result(self) -> float:
        empty = Observing()
        nothing = empty.timed(lambda: None)
        for _ in range(20_000):
            nothing()
        return self.seconds - self.calls * empty.seconds / empty.calls


def share(pairs: Sequence[tuple[float, float]]) -> float:
    """Of second numbers in first ones, over all pairs."""
    return sum(part for _, part in pairs) / sum(whole for whole, _ in pairs)


def share_of_new(iterations: Sequence[set[Any]]) -> float:
    """Of what the measured iterations have, the share that no earlier one had."""
    seen: set[Any] = set()
    counts = []
    for things in iterations:
        counts.append((len(things), len(things - seen)))
        seen |= things
    return share(counts[UNMEASURED:])


def test_share_of_environments(
    policy: Policy, options: TrainOptions, rows: Rows, found: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    groups, size = options.grpo.groups, options.grpo.group_size
    settings, engine = make_settings(options, options.rollout), build_engine(policy, options.rollout)
    sampler = PromptSampler([row["solution_length"] for row in rows], options.prompts, 42)
    prompts, boards = list[set[int]](), list[set[bytes]]()
    observing: dict[str, list[tuple[float, float]]] = defaultdict(list)
    environments: dict[str, list[tuple[float, float]]] = defaultdict(list)
    # The loop's clock reads CPU time here: on a busy machine the wall clock counts other people's work.
    monkeypatch.setattr(time, "perf_counter", time.process_time)
    for iteration in range(UNMEASURED + MEASURED):
        drawn = sampler.draw(iteration, groups)
        tasks = make_tasks([rows[index] for index in drawn], groups, size)
        for kind in ("fresh", "again"):
            engine.update_weights(None, engine.version + 1)  # as in training: every iteration encodes its images anew
            with monkeypatch.context() as patches:
                clock = Observing()
                if iteration % 2:  # the clock of observations has its cost, which the other share must not bear
                    clock.watch(patches)
                seconds, episodes = rollout_timed(engine, policy, tasks, settings)
            if iteration >= UNMEASURED and iteration % 2:
                observing[kind].append((seconds, clock.result()))
            elif iteration >= UNMEASURED:
                environments[kind].append((seconds, sum(episode.timings["env"] for episode in episodes)))
        solved = [episode.metrics["success"] for episode in episodes]
        sampler.update(drawn, [sum(solved[at : at + size]) / size for at in range(0, len(solved), size)])
        prompts.append(set(drawn))
        boards.append({image for episode in episodes for image in episode.images})
    shares = {
        "observing": {kind: share(pairs) for kind, pairs in observing.items()},
        "environments": {kind: share(pairs) for kind, pairs in environments.items()},
        "new": {"prompts": share_of_new(prompts), "boards": share_of_new(boards)},
    }
    print(f"\n{MEASURED} iterations of {len(tasks)} episodes: {shares}")
    found |= {"episodes": len(tasks), **shares}
    assert shares["observing"]["fresh"] < OBSERVING_BAR
    assert shares["environments"]["fresh"] < ENVIRONMENTS_BAR
