"""A run for reports without a model: true boards, played by players of known skill, metrics that look like a run's.

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
from geo_sokoban_pipeline.envs.sokoban import Board, SokobanEnv, generate_levels
from geo_sokoban_pipeline.envs.sokoban.board import MoveRewards
from geo_sokoban_pipeline.envs.sokoban.levels import Level
from geo_sokoban_pipeline.envs.sokoban.players import make_player
from geo_sokoban_pipeline.evaluation.intervals import wilson_interval
from geo_sokoban_pipeline.reporting.report import ReportInputs
from geo_sokoban_pipeline.trajectories import Trajectory, Turn, trajectories_to_table

PADS = 9  # tokens of a 96×96 picture at patch 16, merge 2
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
    env = SokobanEnv(
        level.board, 1, cell_px=16, rewards=REWARDS, observation_style="brief", optimal_steps=level.solution_length
    )
    solver, noise = make_player("solver"), make_player("random")
    observation, _ = env.reset()
    ids: list[int] = []
    mask: list[int] = []
    turns: list[Turn] = []
    images: list[bytes] = []
    done = False
    while not done and len(images) < 10:
        ids, mask = _observe(observation, ids, mask, turns, images)
        player = solver if generator.random() < skill else noise
        action = player.choose(env.board, generator) or "up"
        start = len(ids)
        ids = [*ids, 910, {"up": 912, "down": 913, "left": 914, "right": 915}[action], 911, 904]
        mask = [*mask, 1, 1, 1, 1]
        text = f"<answer>{action.capitalize()}</answer>"
        observation, done, info = env.step(text)
        turn = Turn(role="assistant", text=text, token_start=start, token_end=len(ids), action=action, info=info)
        turn.reward = info["turn_reward"]
        turns.append(turn)
    if not done:
        ids, mask = _observe(observation, ids, mask, turns, images)
    return _finish(env, name, group, sample, iteration, ids, mask, turns, images, generator)


def _observe(
    observation: dict[str, Any], ids: list[int], mask: list[int], turns: list[Turn], images: list[bytes]
) -> tuple[list[int], list[int]]:
    added = [900, 901, 902, *[PAD] * PADS, 903, 904, 902, 900, 905, 902]
    images.append(observation["multi_modal_data"]["<image>"][0].info["png"])
    text = "<image>\nNext?" if turns else "You are playing Sokoban. Push the box onto the target.\n<image>\nNext?"
    end = len(ids) + len(added)
    turns.append(Turn(role="user", text=text, token_start=len(ids), token_end=end, image_indices=[len(images) - 1]))
    return [*ids, *added], [*mask, *[0] * len(added)]


def _finish(
    env: SokobanEnv,
    name: str,
    group: int,
    sample: int,
    iteration: int,
    ids: list[int],
    mask: list[int],
    turns: list[Turn],
    images: list[bytes],
    generator: random.Random,
) -> Trajectory:
    trained = np.array(mask, np.int8)
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
        loss_mask=trained,
        rollout_log_probs=log_probs,
        weight_spans=[(iteration, 0, len(ids))],
        turns=turns,
        images=images,
        image_grid_thw=[(1, 6, 6)] * len(images),
        response="".join(turn.text for turn in turns[1:]),
        reward=reward,
        reward_parts={"final_bonus": bonus, "distance_delta": delta},
        metrics=metrics,
        timings={"engine": 0.02, "env": 0.001},
    )


def lazily(trajectories: list[Trajectory]) -> Callable[[], pa.Table]:
    """A partition as the catalog hands it out."""
    return lambda: trajectories_to_table(trajectories, CONTEXT)


def make_played(levels: int = 48) -> dict[str, Callable[[], pa.Table]]:
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


def make_trained(groups: int = 6, size: int = 4, iteration: int = 199) -> dict[str, Callable[[], pa.Table]]:
    """Two iterations of training episodes in groups, with advantages per turn; the older one must not be read."""
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

    def refuse() -> pa.Table:
        raise AssertionError("an old part was read")

    return {"iter=00000/part-000": refuse, f"iter={iteration:05d}/part-000": lazily(episodes)}


def make_metrics(iterations: int = 200) -> list[dict[str, Any]]:
    """Rows of a run that learns."""
    generator = np.random.default_rng(3)
    rows = []
    for at in range(iterations):
        skill = 0.4 + 0.26 * (1 - math.exp(-at / 60))
        noise = float(generator.normal())
        row: dict[str, Any] = {
            "iteration": at,
            "policy_version": at,
            "rollout/success_rate": min(1.0, skill + 0.03 * noise),
            "rollout/raw_reward": 1.2 * skill - 0.2 + 0.04 * noise,
            "rollout/response_len/mean": 26 - 6 * skill + noise,
            "rollout/trained_ratio": 0.45 + 0.05 * noise,
            "rollout/truncated_ratio": 0.0,
            "train/entropy_loss": 0.21 - 0.1 * skill + 0.004 * noise,
            "train/ppo_kl": 0.004 + 0.0005 * abs(noise),
            "train/pg_clipfrac": 0.01 + 0.002 * abs(noise),
            "train/grad_norm": 1.5 + 0.3 * noise,
            "train/train_rollout_logprob_abs_diff": 3e-7 + 1e-8 * noise,
            "perf/rollout_time": 0.7 + 0.05 * noise,
            "perf/engine_time": 0.6 + 0.04 * noise,
            "perf/env_time": 0.02,
            "perf/update_time": 0.6 + 0.03 * noise,
            "perf/step_time": 1.33 + 0.08 * noise,
            "rollout/episodes": 256.0,
            "train/steps": 3.0,
            "perf/tokens_per_second": 9000 + 300 * noise,
        }
        if at == 0 or (at + 1) % 25 == 0:
            for mode, shift in (("sampled", 0.0), ("greedy", -0.02)):
                solved = round(160 * (skill + shift))
                low, high = wilson_interval(solved, 160)
                prefix = f"eval/validation/{mode}"
                row |= {f"{prefix}_solve_rate": solved / 160, f"{prefix}_low": low, f"{prefix}_high": high}
                row[f"{prefix}_mean_return"] = 1.2 * skill - 0.2
            row["perf/eval_time"] = 1.4
            row["perf/step_time"] += 1.4
        rows.append(row)
    return rows


def make_summary() -> dict[str, Any]:
    """An evaluation in which GRPO helped."""
    shares = {
        ("warm_start", "sampled"): [0.99, 0.86, 0.61, 0.35, 0.24, 0.12, 0.11, 0.01],
        ("warm_start", "greedy"): [0.97, 0.8, 0.5, 0.24, 0.12, 0.05, 0.04, 0.0],
        ("final", "sampled"): [1.0, 0.94, 0.9, 0.69, 0.57, 0.62, 0.53, 0.2],
        ("final", "greedy"): [1.0, 0.95, 0.88, 0.68, 0.55, 0.6, 0.5, 0.18],
        ("final_blank", "sampled"): [0.5, 0.3, 0.1, 0.05, 0.02, 0.0, 0.0, 0.0],
        ("random", "-"): [0.6, 0.3, 0.08, 0.04, 0.01, 0.0, 0.0, 0.0],
        ("random_legal", "-"): [0.75, 0.4, 0.15, 0.08, 0.03, 0.02, 0.0, 0.0],
        ("solver", "-"): [1.0] * 8,
        ("teacher (direct)", "-"): [1.0, 0.8, 0.5, 0.3, 0.2, 0.1, 0.1, 0.0],
    }
    rows = [_summary_row(policy, mode, values) for (policy, mode), values in shares.items()]
    rows[2]["pass_at_k"] = {"1": 0.681, "2": 0.77}
    return {
        "task": "sokoban",
        "prompts": 640,
        "layouts": 57,
        "move_limit": 10,
        "policies": ["warm_start", "final"],
        "rows": rows,
    }


def _summary_row(policy: str, mode: str, shares: list[float]) -> dict[str, Any]:
    lengths = []
    for length, share in enumerate(shares, start=1):
        low, high = wilson_interval(round(80 * share), 80)
        cell = {"length": length, "episodes": 80, "solved": round(80 * share)}
        lengths.append(cell | {"solve_rate": cell["solved"] / 80, "low": low, "high": high})
    solved = sum(cell["solved"] for cell in lengths)
    low, high = wilson_interval(solved, 640)
    return {
        "policy": policy,
        "mode": mode,
        "episodes": 640,
        "solved": solved,
        "solve_rate": solved / 640,
        "low": low,
        "high": high,
        "mean_return": 1.3 * solved / 640 - 0.2,
        "steps_over_optimal": None if policy == "final_blank" else 1.0 + 0.2 * (1 - solved / 640),
        "invalid_share": 0.001 if mode != "-" else 0.0,
        "by_length": lengths,
        "pass_at_k": None,
    }


def make_data_report() -> dict[str, Any]:
    """What `sokoban.data_report` holds."""
    counts = {"train": (6144, 173), "validation": (256, 28), "eval": (640, 57)}
    splits = {
        name: {
            "levels": levels,
            "distinct_levels": levels,
            "layouts": layouts,
            "by_length": {str(length): levels // 8 for length in range(1, 9)},
        }
        for name, (levels, layouts) in counts.items()
    }
    return {
        "source": "generate",
        "rows_read": 7040,
        "rows_rejected": 0,
        "rejected_reasons": {},
        "levels": 7040,
        "unsolved_within_limit": 0,
        "setting_yields": {str(length): 3000 for length in range(1, 9)},
        "split_rule": "layout",
        "split_note": "No wall layout (up to symmetry) occurs in two splits.",
        "splits": splits,
        "overlaps": {"layouts": 0, "levels": 0},
    }


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
        "metrics": make_metrics(),
        "summary": make_summary(),
        "warm_start": warm,
        "played": make_played(),
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


def solved_by(board: Board, actions: list[str]) -> Board:
    """The board after moves."""
    for action in actions:
        board = board.move(action).board
    return board
