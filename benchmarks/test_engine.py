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
from dataclasses import dataclass, field
from functools import wraps
from pathlib import Path
from typing import Any

import pytest
import yaml
from benchmarks.records import keep

from geo_sokoban_pipeline.config.grpo import TrainOptions
from geo_sokoban_pipeline.config.policy import TinyPolicyOptions
from geo_sokoban_pipeline.config.rollout import RolloutOptions
from geo_sokoban_pipeline.envs.sokoban import SokobanEnv
from geo_sokoban_pipeline.envs.sokoban import env as sokoban
from geo_sokoban_pipeline.envs.sokoban.config import SokobanDataOptions
from geo_sokoban_pipeline.envs.sokoban.data_steps import make_prompts, read_levels
from geo_sokoban_pipeline.envs.sokoban.task import SOKOBAN
from geo_sokoban_pipeline.grpo.sampler import PromptSampler
from geo_sokoban_pipeline.policies.patches import PatchReader
from geo_sokoban_pipeline.policies.policy import Policy
from geo_sokoban_pipeline.policies.tiny import build_tiny_policy
from geo_sokoban_pipeline.rollout.engines.base import RolloutEngine
from geo_sokoban_pipeline.rollout.engines.factory import build_engine
from geo_sokoban_pipeline.rollout.episode import EpisodeRequest, RolloutSettings
from geo_sokoban_pipeline.rollout.rollout import rollout
from geo_sokoban_pipeline.training.runtime import prepare_process
from geo_sokoban_pipeline.training.sft import run_sft
from geo_sokoban_pipeline.trajectories.types import Trajectory

ROOT = Path(__file__).parents[1]
EPISODES, ROUNDS, WARM_START_STEPS = 64, 3, 80
THRESHOLDS = {8: 2.0, 30: 4.0}
UNMEASURED, MEASURED = 2, 8  # iterations; the first ones import, allocate and fill caches
OBSERVING_BAR, ENVIRONMENTS_BAR = 0.05, 0.12

Rows = list[dict[str, Any]]


@pytest.fixture(scope="module")
def options() -> TrainOptions:
    """Default options, with a short SFT on random legal moves: responses are well formed, levels stay unsolved."""
    text = (ROOT / "conf/base/parameters/train_sokoban.yml").read_text(encoding="utf-8")
    defaults = SOKOBAN.train_config.model_validate(yaml.safe_load(text)["train_sokoban"])
    expert = defaults.warm_start.teacher.model_copy(update={"name": "random_legal"})
    steps = WARM_START_STEPS
    brief = {"steps": steps, "validate_every": steps, "validation_episodes": 8, "teacher": expert}
    return defaults.model_copy(update={"processes": 1, "warm_start": defaults.warm_start.model_copy(update=brief)})


@pytest.fixture(scope="module")
def rows() -> Rows:
    text = (ROOT / "conf/base/parameters/sokoban.yml").read_text(encoding="utf-8")
    data = SokobanDataOptions.model_validate(yaml.safe_load(text)["sokoban"])
    frame = make_prompts(read_levels(data)[0], data)[0]
    return [row for row in frame.to_dict("records") if row["split"] == "train"]


@pytest.fixture(scope="module")
def policy(options: TrainOptions, rows: Rows) -> Policy:
    prepare_process(1)
    made = build_tiny_policy(TinyPolicyOptions(texts="sokoban"), seed=0)
    run_sft(made, rows, rows[:8], options, seed=0)
    return made


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


@dataclass
class Sums:
    """CPU-seconds of several rollouts, and of a part of them."""

    whole: float = 0.0
    part: float = 0.0

    def add(self, whole: float, part: float) -> None:
        self.whole, self.part = self.whole + whole, self.part + part

    @property
    def share(self) -> float:
        return self.part / self.whole


@dataclass
class Novelty:
    """Shares of the iterations' prompts and boards that no earlier iteration had."""

    seen: set[Any] = field(default_factory=set)
    new: int = 0
    all: int = 0

    def add(self, things: set[Any]) -> None:
        self.new, self.all = self.new + len(things - self.seen), self.all + len(things)
        self.seen |= things

    @property
    def share(self) -> float:
        return self.new / self.all


def test_share_of_environments(
    policy: Policy, options: TrainOptions, rows: Rows, found: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    groups, size = options.grpo.groups, options.grpo.group_size
    settings, engine = make_settings(options, options.rollout), build_engine(policy, options.rollout)
    sampler = PromptSampler([row["solution_length"] for row in rows], options.prompts, 42)
    prompts, boards = Novelty(), Novelty()
    observing: dict[str, Sums] = defaultdict(Sums)
    environments: dict[str, Sums] = defaultdict(Sums)
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
                observing[kind].add(seconds, clock.result())
            elif iteration >= UNMEASURED:
                environments[kind].add(seconds, sum(episode.timings["env"] for episode in episodes))
        solved = [episode.metrics["success"] for episode in episodes]
        sampler.update(drawn, [sum(solved[at : at + size]) / size for at in range(0, len(solved), size)])
        if iteration == UNMEASURED:
            prompts.new = prompts.all = boards.new = boards.all = 0
        prompts.add(set(drawn))
        boards.add({image for episode in episodes for image in episode.images})
    shares = {
        "observing": {kind: sums.share for kind, sums in observing.items()},
        "environments": {kind: sums.share for kind, sums in environments.items()},
        "new": {"prompts": prompts.share, "boards": boards.share},
    }
    print(f"\n{MEASURED} iterations of {len(tasks)} episodes: {shares}")
    found |= {"episodes": len(tasks), **shares}
    assert shares["observing"]["fresh"] < OBSERVING_BAR
    assert shares["environments"]["fresh"] < ENVIRONMENTS_BAR
