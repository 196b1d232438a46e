"""Episodes for reports without a model: true boards, played by players of known skill.

Episodes keep the trajectory contract; the same arguments always give the same inputs.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pyarrow as pa

from builders import CONTEXT, PAD
from geo_sokoban_pipeline.envs.images import encode_png
from geo_sokoban_pipeline.envs.sokoban import SokobanEnv, generate_levels
from geo_sokoban_pipeline.envs.sokoban.board import MoveRewards
from geo_sokoban_pipeline.envs.sokoban.expert import make_agent
from geo_sokoban_pipeline.envs.sokoban.levels import Level
from geo_sokoban_pipeline.reporting.report import ReportInputs
from geo_sokoban_pipeline.trajectories.types import Trajectory, Turn, trajectories_to_table
from reporting.run_numbers import make_data_report, make_metrics, make_summary

PADS = 9  # tokens of a 96×96 image at patch 16, merge 2
WORDS = {900: "<|im_start|>", 901: "user", 902: "\n", 903: "Next?", 904: "<|im_end|>", 905: "assistant"} | {
    910: "<answer>",
    911: "</answer>",
    912: "Up",
    913: "Down",
    914: "Left",
    915: "Right",
    PAD: "<|image_pad|>",
}
REWARDS = MoveRewards(blocked=-0.01, moved=-0.01, box_on=0.0, box_off=0.0, malformed=-0.1, success_bonus=1.0)


def token_texts(ids: Any) -> list[str]:
    """Texts of the ids above."""
    return [WORDS[token] for token in ids]


@cache
def make_levels(count: int) -> tuple[Level, ...]:
    """6×6 levels with one box, lengths 1 to 8 in turn."""
    return tuple(generate_levels(count, 7, 6, 6, min_solution=1, max_solution=8, lengths=range(1, 9)))


def play(level: Level, skill: float, name: str, group: int, sample: int = 0, *, iteration: int = 0) -> Trajectory:
    """One episode; `skill` is the share of moves that come from the solver, the others are random."""
    generator = random.Random(f"{name}/{group}/{sample}")
    solver, noise = make_agent("solver"), make_agent("random")

    def choose(env: SokobanEnv) -> str:
        player = solver if generator.random() < skill else noise
        return player.choose(env.board, generator) or "up"

    return _play(level, choose, name, group, sample, iteration, generator)


def play_moves_of(level: Level, moves: list[str], end_when_lost: bool) -> Trajectory:
    """One episode of given moves."""
    left = iter(moves)
    args = {"end_when_lost": end_when_lost}
    return _play(level, lambda env: next(left), "moves", 0, 0, 0, random.Random(0), len(moves), args)


def _play(
    level: Level,
    choose: Callable[[SokobanEnv], str],
    name: str,
    group: int,
    sample: int,
    iteration: int,
    generator: random.Random,
    turn_limit: int = 10,
    args: dict[str, Any] | None = None,
) -> Trajectory:
    style = {"observation_style": "brief", "optimal_steps": level.solution_length, **(args or {})}
    env = SokobanEnv(level.board, 1, cell_px=16, rewards=REWARDS, **style)
    observation, _ = env.reset()
    ids: list[int] = []
    mask: list[int] = []
    turns: list[Turn] = []
    images: list[bytes] = []
    done = False
    while not done:
        added = [900, 901, 902, *[PAD] * PADS, 903, 904, 902, 900, 905, 902]
        text = "<image>\nNext?" if turns else "You are playing Sokoban. Push the box onto the target.\n<image>\nNext?"
        end = len(ids) + len(added)
        turns.append(Turn(role="user", text=text, token_start=len(ids), token_end=end, image_indices=[len(images)]))
        images.append(encode_png(np.asarray(observation["multi_modal_data"]["<image>"][0])))
        ids, mask = [*ids, *added], [*mask, *[0] * len(added)]
        if len(images) > turn_limit:
            break
        action = choose(env)
        ids = [*ids, 910, {"up": 912, "down": 913, "left": 914, "right": 915}[action], 911, 904]
        mask = [*mask, 1, 1, 1, 1]
        text = f"<answer>{action.capitalize()}</answer>"
        observation, done, info = env.step(text)
        turn = Turn(role="assistant", text=text, token_start=end, token_end=len(ids), action=action, info=info)
        turn.reward = info["turn_reward"]
        turns.append(turn)
    log_probs = np.array([math.log(generator.uniform(0.2, 0.99)) if one else 0.0 for one in mask], np.float32)
    metrics = env.final_metrics()
    bonus, delta = env.final_bonus, metrics["dist0"] - metrics["dist1"]
    reward = sum(env.turn_rewards) + bonus + 0.1 * delta
    return Trajectory(
        trajectory_id=f"{name}/g{group:03d}/s{sample:02d}",
        task="sokoban",
        task_id=env.initial_board.canonical_hash,
        iteration=iteration,
        group_index=group,
        sample_index=sample,
        policy_version=iteration,
        seed=group,
        sampling=json.dumps({"engine": "transformers", "greedy": "greedy" in name, "temperature": 1.0}),
        status="completed",
        finish_reason="stop",
        prompt_length=turns[0].token_end,
        token_ids=np.array(ids, np.int32),
        loss_mask=np.array(mask, np.int8),
        rollout_log_probs=log_probs,
        weight_spans=[(iteration, 0, len(ids))],
        turns=turns,
        images=images,
        image_grid_thw=[(1, 6, 6)] * len(images),
        response="".join(turn.text for turn in turns[1:]),
        difficulty=str(int(metrics["optimal_steps"])),
        reward=reward,
        reward_parts={"final_bonus": bonus, "distance_delta": delta, "dist0": metrics["dist0"]},
        metrics=metrics,
        timings={"engine": 0.02, "env": 0.001},
    )


def lazily(trajectories: list[Trajectory]) -> Callable[..., pa.Table]:
    """A partition as the catalog hands it out."""
    table = trajectories_to_table(trajectories, CONTEXT)
    return lambda columns=None: table if columns is None else table.select(columns)


@cache
def make_played(levels: int = 48) -> dict[str, Callable[..., pa.Table]]:
    """Held-out episodes of two policies, sampled and greedy."""
    parts = {}
    for number, (policy, skill) in enumerate({"warm_start": 0.45, "final": 0.8}.items()):
        episodes = [
            play(level, skill, f"train_sokoban/{policy}/{mode}", at)
            for mode in ("sampled", "greedy")
            for at, level in enumerate(make_levels(levels))
        ]
        parts[f"iter={number:05d}/part-000"] = lazily(episodes)
    return parts


@cache
def make_trained(groups: int = 6, size: int = 4, iteration: int = 199) -> dict[str, Callable[..., pa.Table]]:
    """Two iterations of training episodes in groups, with advantages per turn; of the older one no tokens are read."""
    episodes = [
        play(make_levels(48)[3 + group], 0.6, f"train_sokoban/i{iteration:05d}", group, sample, iteration=iteration)
        for group in range(groups)
        for sample in range(size)
    ]
    for group in range(groups):
        members = [episode for episode in episodes if episode.group_index == group]
        mean = sum(episode.reward or 0.0 for episode in members) / len(members)
        for episode in members:
            episode.advantage = (episode.reward or 0.0) - mean
            episode.trained = True
            for at, turn in enumerate(turn for turn in episode.turns if turn.role == "assistant"):
                turn.advantage = episode.advantage * 0.95**at

    def refuse(columns: list[str] | None = None) -> pa.Table:
        if columns is None or {"token_ids", "images"} & set(columns):
            raise AssertionError("the tokens of an old part were read")
        return lazily(episodes[:size])(columns)

    return {"iter=00000/part-000": refuse, f"iter={iteration:05d}/part-000": lazily(episodes)}


def make_inputs(**changes: Any) -> ReportInputs:
    """Inputs of a whole run, with fields replaced by name."""
    warm = [
        {
            "step": step,
            "loss": 0.6 + 0.8 * math.exp(-step / 300),
            "validation_loss": 0.63 + 0.8 * math.exp(-step / 300),
            "seconds": step * 0.11,
        }
        for step in range(50, 1371, 60)
    ]
    values: dict[str, Any] = {
        "task": "sokoban",
        "run": "train_sokoban",
        "run_id": "default",
        "metrics": make_metrics(30),
        "summary": make_summary(),
        "warm_start": warm,
        "held_out": make_played(),
        "trained": make_trained(),
        "data_report": make_data_report(),
        "parameters": {
            "seed": 0,
            "sokoban": {"height": 6, "inner_walls": [1, 4]},
            "train_sokoban": {
                "grpo": {"group_size": 8, "filter": "mixed_success"},
                "optimizer": {"learning_rate": 7e-4},
            },
        },
        "versions": {"geo-sokoban-pipeline": "0.1.0", "torch": "2.13.0", "transformers": "5.23.0"},
        "token_texts": token_texts,
    }
    return ReportInputs(**(values | changes))
