"""Collecting: which groups are drawn and when it is enough, on scripted rollouts; metrics counted by hand."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from builders import make_trajectories
from coins import rows_of
from geo_sokoban_pipeline.config.grpo import PromptOptions
from geo_sokoban_pipeline.grpo.sampler import PromptSampler
from geo_sokoban_pipeline.rollout.episode import EpisodeRequest
from geo_sokoban_pipeline.training.collecting import Collector, describe_rollout
from geo_sokoban_pipeline.trajectories.types import Trajectory
from task_options import TrainOptions


@pytest.fixture
def episodes() -> list[Trajectory]:
    """Solved, not solved, truncated, failed; of 4, 8, 4 and 4 sampled tokens with log-probs −1, −2, −3 and −4."""
    made = [*make_trajectories(4, turns=1, response_tokens=4)]
    made[1] = make_trajectories(1, turns=2, response_tokens=4)[0]
    for number, episode in enumerate(made):
        episode.reward, episode.advantage, episode.trained = float(number), number / 2, number < 2
        episode.rollout_log_probs = np.where(episode.loss_mask == 1, -1.0 - number, 0.0).astype(np.float32)
        episode.metrics = {"success": float(number == 0), "turns": number + 1.0}
        episode.timings = {"engine": 1.0 + number, "env": 10.0 * number}
        episode.response = "a b c"
    made[1].metrics["tool_calls"] = 3.0
    made[2].status = "truncated"
    failed = made[3]
    failed.status, failed.reward, failed.advantage, failed.metrics = "failed", None, None, {}
    return made


def test_metrics_of_a_rollout(episodes: list[Trajectory]) -> None:
    metrics = describe_rollout(episodes, 2.0, [("tool_calls", "tool_calls/mean")], processes=2)
    tokens = sum(len(episode.token_ids) for episode in episodes)
    assert metrics == pytest.approx(
        {
            "rollout/episodes": 4.0,
            "rollout/raw_reward": 1.0,  # of 0, 1 and 2
            "rollout/returns": 1.0,
            "rollout/advantages": 0.5,  # of 0, 1/2 and 1
            "rollout/rollout_log_probs": -(4 * 1 + 8 * 2 + 4 * 3 + 4 * 4) / 20,
            "rollout/success_rate": 1 / 3,
            "rollout/response_len/mean": 5.0,
            "rollout/response_len/median": 4.0,
            "rollout/response_len/max": 8.0,
            "rollout/response_len/min": 4.0,
            "rollout/truncated_ratio": 0.25,
            "rollout/repetition_frac": 0.0,
            "rollout/turns/mean": (1 + 2 + 3 + 0) / 4,
            "rollout/tool_calls/mean": 3.0,
            "rollout/failed_ratio": 0.25,
            "rollout/trained_ratio": 0.5,
            "perf/rollout_time": 2.0,
            "perf/engine_time": (1 + 2 + 3 + 4) / 2,
            "perf/env_time": (0 + 10 + 20 + 30) / 2,
            "perf/tokens_per_second": tokens / 2.0,
        }
    )


def test_what_no_episode_can_tell_is_none() -> None:
    metrics = describe_rollout([], 0.0)
    assert metrics["rollout/episodes"] == metrics["perf/tokens_per_second"] == 0.0
    assert {metrics[f"rollout/{name}"] for name in ("raw_reward", "success_rate", "rollout_log_probs")} == {None}


SHUFFLED = [1] * 40, PromptOptions(order="shuffle"), 42


@dataclass
class CountingSampler(PromptSampler):
    """Keeps how many prompts were asked for, by iteration and attempt."""

    asked: list[tuple[int, int, int]] = field(default_factory=list)

    def draw(self, iteration: int, count: int, attempt: int = 0) -> list[int]:
        self.asked.append((iteration, attempt, count))
        return super().draw(iteration, count, attempt)


def roll_out(requests: Sequence[EpisodeRequest], says: str, abort_after: int | None = None) -> list[Trajectory]:
    """Groups of two episodes.

    Args:
        says: a letter per group of the iteration: `s` one of two is solved; `w` a weak signal, rewards differ but none
            is solved; `n` no signal.
        abort_after: groups that are complete when the others are aborted.
    """
    episodes = make_trajectories(len(requests), turns=1, group_size=2)
    groups = sorted({request.group_index for request in requests})
    for episode, request in zip(episodes, requests, strict=True):
        episode.trajectory_id, episode.seed = request.trajectory_id, request.seed
        episode.group_index, episode.sample_index = request.group_index, request.sample_index
        letter = says[request.group_index]
        episode.reward = float(letter != "n" and request.sample_index)
        episode.metrics = {"success": float(letter == "s" and request.sample_index), "turns": 1.0}
        episode.advantage, episode.trained, episode.drop_reason = None, False, None
        if abort_after is not None and groups.index(request.group_index) >= abort_after:
            episode.status, episode.reward, episode.drop_reason = "aborted", None, "aborted"
    return episodes


def collector_of(options: TrainOptions, play: Callable[..., list[Trajectory]], **changes: Any) -> Collector:
    values = options.model_dump()
    values["grpo"] |= {
        "groups": 3,
        "group_size": 2,
        "filter": "mixed_success",
        "advantage": "dr_grpo",
        "advantage_args": {},
        "min_groups": 2,
    }
    values["rollout"] |= {"max_turns": 1}
    for name, value in changes.items():
        values["rollout" if name in ("over_sampling", "partial") else "grpo"][name] = value
    engine: Any = SimpleNamespace(version=0)
    return Collector("train_x", 0, TrainOptions.model_validate(values), rows_of(40), None, engine, play)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("says", "refill", "counts"),
    [
        ("sss", 4.0, [3]),  # enough at once
        ("ssns", 4.0, [3, 1]),  # one is missing, one is fetched
        ("nnnsss", 4.0, [3, 3]),
        ("nnssnns", 4.0, [3, 2, 1, 1]),  # what is still missing, each time
        ("wwwsss", 4.0, [3, 3]),  # that `min_groups` would keep weak groups hides no scarcity on the way
        ("wwsns", 1.5, [3, 2]),
        ("wwwnwnwwwnsn", 4.0, [3, 3, 3, 3]),  # the limit, then the weak ones are kept
        ("nnwnn", 1.5, [3, 2]),  # ⌈1.5 · 3⌉ = 5 groups at most
        ("nnn", 1.0, [3]),
    ],
)
def test_groups_are_drawn_until_enough_carry_a_signal(
    train_options: TrainOptions, says: str, refill: float, counts: list[int]
) -> None:
    played: list[EpisodeRequest] = []

    def play(engine: Any, policy: Any, requests: Sequence[EpisodeRequest], settings: Any) -> list[Trajectory]:
        played.extend(requests)
        return roll_out(requests, says)

    sampler = CountingSampler(*SHUFFLED)
    collector = collector_of(train_options, play, max_refill=refill)
    episodes, metrics = collector.collect(7, sampler)
    assert sampler.asked == [(7, attempt, count) for attempt, count in enumerate(counts)]
    # Prompts in the order of the sampler, groups and ids numbered through, whatever call has played them.
    order = PromptSampler(*SHUFFLED).draw(7, len(says))
    names = [(group, sample) for group in range(len(says)) for sample in range(2)]
    assert [(request.group_index, request.sample_index) for request in played] == names
    assert [request.prompt["id"] for request in played] == [f"row{order[group]}" for group, _ in names]
    assert [e.trajectory_id for e in episodes] == [
        f"train_x/i00007/g{group:03d}/s{sample:02d}" for group, sample in names
    ]
    assert len({request.seed for request in played}) == len(names)
    assert metrics["rollout/groups"] == len(says)
    # In the end `min_groups=2` counts: with fewer groups the weak ones are trained, too.
    kept = "s" if says.count("s") >= 2 else "sw"
    assert {e.group_index for e in episodes if e.trained} == {n for n, letter in enumerate(says) if letter in kept}


def test_refilled_groups_are_enough_once_the_missing_ones_are_there(train_options: TrainOptions) -> None:
    """Two groups of the first four carry a signal, so one of the second call's is enough."""
    answers: list[list[bool]] = []

    def play(
        engine: Any, policy: Any, requests: Sequence[EpisodeRequest], settings: Any, enough: Any
    ) -> list[Trajectory]:
        episodes = roll_out(requests, "ssnnns")
        answers.append([enough(episodes[:count]) for count in range(2, len(episodes) + 1, 2)])
        return episodes

    sampler = CountingSampler(*SHUFFLED)
    collector_of(train_options, play, over_sampling=1.2, max_refill=2.0).collect(0, sampler)
    assert sampler.asked == [(0, 0, 4), (0, 1, 1), (0, 2, 1)]
    assert answers == [[False] * 4, [False], [True]]


def test_solve_rates_are_of_whole_groups(train_options: TrainOptions) -> None:
    """An aborted episode has no end, so it is not unsolved: neither in the metrics nor in the sampler's rates."""

    def play(
        engine: Any, policy: Any, requests: Sequence[EpisodeRequest], settings: Any, enough: Any
    ) -> list[Trajectory]:
        episodes = roll_out(requests, "ssssss")
        for episode in episodes:
            episode.metrics["success"] = 1.0
        # Group 4: one episode is complete, the other one is aborted; group 5: both are.
        for episode in episodes[9:]:
            episode.status, episode.reward, episode.drop_reason = "aborted", None, "aborted"
            episode.metrics["success"] = 0.0
        return episodes

    observed: list[tuple[list[int], list[float]]] = []

    class WatchedSampler(PromptSampler):
        def update(self, indices: Sequence[int], solve_rates: Sequence[float]) -> None:
            observed.append((list(indices), list(solve_rates)))

    changes = {"over_sampling": 2.0, "max_refill": 1.0, "partial": True, "mixed_versions": "mask"}
    collector = collector_of(train_options, play, **changes)
    _, metrics = collector.collect(0, WatchedSampler(*SHUFFLED))
    assert metrics["rollout/success_rate"] == 1.0
    assert observed == [(PromptSampler(*SHUFFLED).draw(0, 6)[:4], [1.0] * 4)]


def test_aborted_groups_come_first_and_new_prompts_fill_up(train_options: TrainOptions) -> None:
    """Partial rollouts: of 6 groups 3 suffice, the rest is gone on with, and only so many prompts are drawn as lack."""
    calls: list[list[EpisodeRequest]] = []

    def play(
        engine: Any, policy: Any, requests: Sequence[EpisodeRequest], settings: Any, enough: Any
    ) -> list[Trajectory]:
        calls.append(list(requests))
        episodes = roll_out(requests, "ssssss", abort_after=4 if len(calls) == 1 else None)
        assert enough(episodes) and not enough(episodes[:4])
        return episodes

    sampler = CountingSampler(*SHUFFLED)
    collector = collector_of(train_options, play, over_sampling=2.0, partial=True, mixed_versions="mask")
    first, _ = collector.collect(0, sampler)
    assert [group.prompt for group in collector.partial.groups] == PromptSampler(*SHUFFLED).draw(0, 6)[4:]
    assert [episode.drop_reason for episode in first[::2]] == [None] * 3 + ["surplus"] + ["aborted"] * 2
    collector.collect(1, sampler)
    assert sampler.asked == [(0, 0, 6), (1, 0, 4)]
    before, now = calls
    assert [request.prompt for request in now[:4]] == [request.prompt for request in before[8:]]
    assert [request.seed for request in now[:4]] == [request.seed for request in before[8:]]
    assert [bool(request.past) for request in now] == [True] * 4 + [False] * 8
    assert len({request.seed for request in before + now}) == 20
    assert collector.partial.groups == []
