"""How much the rollout engine gains from its cache, and what environments cost.

Run with `pytest benchmarks/test_engine.py -s`. In one run, with the default tiny policy and one thread, 64 episodes are
played by the same engine with its cache on and off; one flag differs, vision features are kept in both. Bars: at least
2 times the tokens per second at 8 turns and 4 times at 30; observations under 5 % of a rollout of 256 episodes. Times
are CPU-seconds.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from benchmarks.records import keep

from geo_sokoban_pipeline.envs.sokoban import Board, build_env
from geo_sokoban_pipeline.envs.sokoban.render import render_observation
from geo_sokoban_pipeline.options.policy import TinyPolicyOptions
from geo_sokoban_pipeline.options.rollout import EnvOptions, RolloutOptions
from geo_sokoban_pipeline.options.sokoban import SokobanDataOptions
from geo_sokoban_pipeline.options.training import TrainOptions
from geo_sokoban_pipeline.pipelines.data_sokoban.nodes import make_prompts, read_levels
from geo_sokoban_pipeline.policies.policy import Policy
from geo_sokoban_pipeline.policies.tiny import build_tiny_policy
from geo_sokoban_pipeline.rollout.conversation import EpisodeTask
from geo_sokoban_pipeline.rollout.engines.base import RolloutEngine
from geo_sokoban_pipeline.rollout.engines.factory import build_engine
from geo_sokoban_pipeline.rollout.episode import PlaySettings, play_episodes
from geo_sokoban_pipeline.seeding import python_generator
from geo_sokoban_pipeline.training.process import prepare_process
from geo_sokoban_pipeline.training.warm_start import imitate_teacher
from geo_sokoban_pipeline.trajectories import Trajectory

ROOT = Path(__file__).parents[1]
EPISODES, ROUNDS, WARM_START_STEPS = 64, 3, 80
BARS = {8: 2.0, 30: 4.0}
BOARD = Board.from_text("######\n#@   #\n# $ .#\n#    #\n#    #\n######")

Rows = list[dict[str, Any]]


@pytest.fixture(scope="module")
def options() -> TrainOptions:
    """Default options, with a short imitation of random legal moves: replies are well formed, levels stay unsolved."""
    text = (ROOT / "conf/base/parameters/train_sokoban.yml").read_text(encoding="utf-8")
    defaults = TrainOptions.model_validate(yaml.safe_load(text)["train_sokoban"])
    teacher = defaults.warm_start.teacher.model_copy(update={"name": "random_legal"})
    steps = WARM_START_STEPS
    brief = {"steps": steps, "validate_every": steps, "validation_episodes": 8, "teacher": teacher}
    return defaults.model_copy(update={"processes": 1, "warm_start": defaults.warm_start.model_copy(update=brief)})


@pytest.fixture(scope="module")
def rows() -> Rows:
    base = {"cell_px": 16, "instruction": "brief", "inner_walls": [1, 4], "max_solution": 8}
    data = SokobanDataOptions.model_validate(base | {"counts": {"train": 512, "validation": 8, "eval": 8}})
    frame = make_prompts(read_levels(data)[0], data)[0]
    return [row for row in frame.to_dict("records") if row["split"] == "train"]


@pytest.fixture(scope="module")
def policy(options: TrainOptions, rows: Rows) -> Policy:
    prepare_process(1)
    made = build_tiny_policy(TinyPolicyOptions(), seed=0)
    imitate_teacher(made, rows, rows[:8], options, seed=0)
    return made


def make_tasks(rows: Rows, groups: int, group_size: int) -> list[EpisodeTask]:
    pairs = [(group, sample) for group in range(groups) for sample in range(group_size)]
    return [EpisodeTask(f"g{g}/s{s}", rows[g], g, s, seed=1000 * g + s) for g, s in pairs]


def make_settings(options: TrainOptions, rollout: RolloutOptions, **env: Any) -> PlaySettings:
    env_options = EnvOptions(args=options.env.args | env)
    return PlaySettings(env_options, options.reward, rollout, rollout.sampling, 0, "sokoban")


def play_timed(
    engine: RolloutEngine, policy: Policy, tasks: Sequence[EpisodeTask], settings: PlaySettings
) -> tuple[float, list[Trajectory]]:
    """CPU-seconds of a rollout, and its episodes."""
    began = time.process_time()
    episodes = play_episodes(engine, policy, tasks, settings)
    return time.process_time() - began, episodes


@pytest.fixture(scope="module")
def found():
    """What all tests of this file found; written once all are done."""
    values: dict[str, Any] = {"engine": []}
    yield values
    if len(values["engine"]) == len(BARS) and "observing" in values:
        keep("engine", values)


@pytest.mark.parametrize(("turns", "bar"), list(BARS.items()))
def test_cached_against_uncached(policy, options, rows, found, turns, bar):
    # Levels of six moves or more: hardly any is solved by chance, and lost ones are played on, so episodes last.
    hard = [row for row in rows if row["solution_length"] >= 6]
    tasks = make_tasks(hard, groups=EPISODES // 8, group_size=8)
    sampling = options.rollout.sampling.model_copy(update={"temperature": 0.5})
    base = options.rollout.model_copy(update={"max_turns": turns, "sampling": sampling})
    times: dict[bool, list[float]] = {True: [], False: []}
    played: dict[bool, list[Trajectory]] = {}
    engines = {cached: build_engine(policy, base.model_copy(update={"reuse_cache": cached})) for cached in times}
    # The two take turns, so that a slow moment of the machine hits both. The first round encodes the pictures.
    for _ in range(ROUNDS + 1):
        for cached, engine in engines.items():
            settings = make_settings(options, base, max_steps=10_000, end_when_lost=False)
            seconds, played[cached] = play_timed(engine, policy, tasks, settings)
            times[cached].append(seconds)
    best = {cached: min(seconds[1:]) for cached, seconds in times.items()}
    rates = {cached: sum(len(e.token_ids) for e in played[cached]) / best[cached] for cached in best}
    mean_turns = sum(e.metrics["turns"] for e in played[True]) / EPISODES
    ratio = rates[True] / rates[False]
    print(
        f"\n{EPISODES} episodes, {turns} turns at most ({mean_turns:.1f} played): cached {rates[True]:,.0f} tokens/s, "
        f"uncached {rates[False]:,.0f} tokens/s, ratio {ratio:.2f} (bar {bar})"
    )
    found["engine"].append({"turns": turns, "cached": rates[True], "uncached": rates[False]})
    assert mean_turns > 0.9 * turns
    assert ratio >= bar


def test_share_of_environments(policy, options, rows, found, monkeypatch):
    tasks = make_tasks(rows, groups=32, group_size=8)
    settings = make_settings(options, options.rollout)
    engine = build_engine(policy, options.rollout)
    play_timed(engine, policy, tasks, settings)  # fills the caches of boards and pictures, as earlier iterations do
    # The loop's clock reads CPU time here: on a busy machine the wall clock counts other people's work.
    monkeypatch.setattr(time, "perf_counter", time.process_time)
    runs = []
    for version in range(1, ROUNDS + 1):
        engine.update_weights(None, version)  # as in training: every iteration encodes its pictures anew
        runs.append(play_timed(engine, policy, tasks, settings))
    seconds, episodes = min(runs, key=lambda run: run[0])
    whole = sum(e.timings["env"] for e in episodes) / seconds
    observing = observe_again(policy, episodes, settings) / seconds
    tokens = sum(len(e.token_ids) for e in episodes)
    print(
        f"\n{len(tasks)} episodes: {tokens / seconds:,.0f} tokens/s in {seconds:.2f} s; making observations "
        f"{100 * observing:.2f} % (bar 5 %), with dynamics, action parsing, chat encoding and start {100 * whole:.1f} %"
    )
    found |= {"episodes": len(tasks), "observing": observing, "environments": whole}
    assert observing < 0.05
    assert whole < 0.1


def observe_again(policy: Policy, episodes: Sequence[Trajectory], settings: PlaySettings) -> float:
    """CPU-seconds of as many observations as were made: board picture, PNG, message, patches; caches warm."""
    env = build_env({"extra_info": {"env_config": BOARD.to_env_config()}}, settings.env.args)
    count = sum(len(episode.images) for episode in episodes)
    boards = walk(env.board, 200)
    for board in boards:
        policy.reader.read(render_observation(board, env.cell_px))
    began = time.process_time()
    for number in range(count):
        env.board = boards[number % len(boards)]
        message = env.format_observation(env._observe())
        policy.reader.read(message["content"][0]["image"])
    return time.process_time() - began


def walk(board: Board, count: int) -> list[Board]:
    """Boards of a random walk."""
    generator = python_generator(0, "walk")
    boards = [board]
    while len(boards) < count:
        boards.append(boards[-1].move(generator.choice(boards[-1].legal_actions())).board)
    return boards
