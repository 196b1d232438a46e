"""What a second rollout worker gains: episodes per second of two over those of one, where responses cost nothing.

Run with `pytest benchmarks/test_rollout_workers.py -s` on an idle machine with two cores or more. Sokoban boards of
384 px, ten turns an episode, and an engine that answers at once: what is left are environments, images and tokens in
the workers, and the driver that collects. One and two workers roll out the same episodes in turn, in one run; the most
episodes per second of three rounds each after one that fills caches. Threshold: two workers, 1.7 times as many.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from contextlib import closing
from typing import Any

import numpy as np
from benchmarks.records import keep
from benchmarks.setup import default_options, make_rows
from benchmarks.tables import worker_ratio

from geo_sokoban_pipeline.config.grpo import TrainOptions
from geo_sokoban_pipeline.config.policy import TinyPolicyOptions
from geo_sokoban_pipeline.policies.policy import Policy
from geo_sokoban_pipeline.policies.tiny import build_tiny_policy
from geo_sokoban_pipeline.rollout.engines.base import Request, Result
from geo_sokoban_pipeline.rollout.episode import EpisodeRequest, RolloutSettings
from geo_sokoban_pipeline.rollout.rollout import rollout
from geo_sokoban_pipeline.seeding import derive_seed
from geo_sokoban_pipeline.training.rollout_workers import RolloutWorkers
from geo_sokoban_pipeline.training.runtime import prepare_process
from geo_sokoban_pipeline.trajectories.types import Trajectory

LEVELS, SIZE, TURNS, ROUNDS, THRESHOLD = 64, 4, 10, 3, 1.7
CELL = 64  # pixels; a board has 6 × 6 cells
MOVES = ("Up", "Down", "Left", "Right")


class InstantEngine:
    """Answers every request at once with a move that its seed and the number of the turn decide."""

    name, software_version, seeded, version = "instant", "1", True, 0

    def __init__(self, policy: Policy) -> None:
        end = policy.end_ids[0]
        texts = [f"<answer>{move}</answer>" for move in MOVES]
        self._responses = [np.append(policy.codec.encode_text(text), end).astype(np.int32) for text in texts]
        self._queue: list[Request] = []

    def submit(self, requests: Sequence[Request]) -> None:
        """Queue requests."""
        self._queue += requests

    def poll(self) -> list[Result]:
        """All of them."""
        queue, self._queue = self._queue, []
        return [self._answer(request) for request in queue]

    def abort(self, ids: Iterable[int]) -> None:
        """Nothing is in flight."""

    def release(self, ids: Iterable[int]) -> None:
        """Nothing is held."""

    def _answer(self, request: Request) -> Result:
        ids = self._responses[derive_seed(request.seed, request.sampled) % len(MOVES)]
        return Result(request.id, ids, np.full(len(ids), -0.5, np.float32), "stop", self.version)


def rollout_at_once(
    engine: Any, policy: Policy, requests: Sequence[EpisodeRequest], settings: RolloutSettings, *watching: Any
) -> list[Trajectory]:
    """`rollout` without waiting for responses."""
    return rollout(InstantEngine(policy), policy, requests, settings, *watching)  # type: ignore[arg-type]


def options_of(workers: int) -> TrainOptions:
    own = {"workers": workers, "function": "benchmarks.test_rollout_workers.rollout_at_once", "max_turns": TURNS}
    rollout_options = {**own, "max_tokens_per_turn": None}
    env = {"args": {"cell_px": CELL}}
    return default_options({"env": env, "rollout": rollout_options, "threads": 1, "processes": 1})


def tasks_of(turn: int) -> list[EpisodeRequest]:
    """Episodes of boards that no other round has."""
    rows = make_rows(LEVELS, cell_px=CELL, seed=turn)
    return [
        EpisodeRequest(f"r{turn}/g{group}/s{sample}", row, group, sample, derive_seed(turn, group, sample))
        for group, row in enumerate(rows)
        for sample in range(SIZE)
    ]


def test_two_workers_roll_out_nearly_twice_as_much() -> None:
    prepare_process(1)
    policy = build_tiny_policy(TinyPolicyOptions(texts="sokoban"), seed=0)
    found: dict[str, Any] = {"episodes": LEVELS * SIZE, "turns": TURNS, "rates": {"1": [], "2": []}, "idle": []}
    with closing(RolloutWorkers(policy, options_of(1))) as one, closing(RolloutWorkers(policy, options_of(2))) as two:
        pairs = (("1", one, options_of(1)), ("2", two, options_of(2)))
        for _, workers, _ in pairs:
            workers.update_weights(None, 0)
        for turn in range(ROUNDS + 1):
            tasks = tasks_of(turn)
            collected = []
            for name, workers, options in pairs:
                settings = RolloutSettings(
                    options.env, options.reward, options.rollout, options.rollout.sampling, 0, options.task
                )
                began = time.perf_counter()
                collected.append(workers.rollout(None, policy, tasks, settings))
                rate = len(tasks) / (time.perf_counter() - began)
                shares = list(workers.take_metrics().values())
                if turn:
                    found["rates"][name].append(rate)
                    found["idle"] += [shares] if name == "2" else []
            assert [e.token_ids.tolist() for e in collected[0]] == [e.token_ids.tolist() for e in collected[1]]
    keep("workers", found)
    assert worker_ratio(found) >= THRESHOLD
