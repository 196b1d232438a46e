"""Synthetic episodes that keep the trajectory contract, for tests that need stored data but no model.

Token ids are drawn at random but for image pads; boards are drawn cell by cell, so that the PNGs compress as
rendered Sokoban boards do. The same arguments always give the same episodes.
"""

from __future__ import annotations

import io
import json
import random
from functools import cache

import numpy as np
from PIL import Image, ImageDraw

from geo_sokoban_pipeline.trajectories.schema import TableContext
from geo_sokoban_pipeline.trajectories.types import Trajectory, Turn

PAD = 151655
CONTEXT = TableContext(
    image_pad_id=PAD, merge_size=2, tokenizer_hash="t" * 32, template_hash="c" * 32, processor_hash="p" * 32
)
PATCH = 16  # pixels along one side of a patch, as in Qwen3-VL


@cache
def make_png(px: int, seed: int) -> bytes:
    """PNG of a random 6x6 board, `px` pixels wide and high."""
    generator = random.Random(seed)
    image = Image.new("RGB", (px, px))
    draw = ImageDraw.Draw(image)
    cell = px // 6
    colours = [(176, 80, 50), (8, 8, 8), (8, 8, 8), (8, 8, 8), (233, 184, 47), (70, 200, 70)]
    for row in range(6):
        for column in range(6):
            box = (column * cell, row * cell, column * cell + cell - 1, row * cell + cell - 1)
            colour = colours[0] if row in (0, 5) or column in (0, 5) else generator.choice(colours)
            draw.rectangle(box, fill=colour, outline=(255, 255, 255))
            if colour == colours[4]:
                draw.line(box, fill=(196, 140, 24), width=max(1, cell // 16))
            if colour == colours[5]:
                draw.ellipse((box[0] + 2, box[1] + 2, box[2] - 2, box[3] - 2), fill=(60, 180, 60))
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return buffer.getvalue()


def make_trajectories(
    episodes: int = 4,
    turns: int = 3,
    image_px: int = 96,
    *,
    iteration: int = 0,
    group_size: int = 4,
    response_tokens: int = 8,
    observation_tokens: int = 8,
    distinct_images: int = 40,
    evaluation: bool = False,
    seed: int = 0,
) -> list[Trajectory]:
    """Valid episodes of `turns` assistant turns, one board before each, in groups of `group_size`.

    Args:
        image_px: width and height of a board in pixels, a multiple of 32.
        response_tokens: generated tokens per turn, drawn at random.
        observation_tokens: tokens of an observation's text, the same in each.
        distinct_images: boards in circulation; repeats are equal bytes.
        evaluation: episodes without advantage that were not trained.
    """
    generator = np.random.default_rng([seed, iteration])
    rewards = generator.normal(size=episodes)
    shape = (turns, image_px, response_tokens, observation_tokens, distinct_images)
    made = [_make_trajectory(generator, iteration, *divmod(index, group_size), shape) for index in range(episodes)]
    for start in range(0, episodes, group_size):
        group = slice(start, start + group_size)
        centred = rewards[group] - rewards[group].mean()
        for trajectory, reward, advantage in zip(made[group], rewards[group], centred, strict=True):
            alone = len(rewards[group]) == 1
            trajectory.reward = float(reward)
            trajectory.advantage = None if evaluation else 0.0 if alone else float(advantage)
            trajectory.trained = not evaluation
            if not evaluation:
                trajectory.old_log_probs = trajectory.rollout_log_probs + np.float32(0)
    return made


def _make_trajectory(
    generator: np.random.Generator, iteration: int, group: int, sample: int, shape: tuple[int, ...]
) -> Trajectory:
    turn_count, px, response_tokens, observation_tokens, distinct_images = shape
    side = px // PATCH
    pads = side * side // CONTEXT.merge_size**2
    ids: list[int] = []
    mask: list[int] = []
    turns: list[Turn] = []
    for number in range(turn_count):
        for role in ("user", "assistant"):
            start = len(ids)
            words = generator.integers(1000, 9000, response_tokens).tolist()
            ids += [PAD] * pads + list(range(observation_tokens)) if role == "user" else words
            generated = role == "assistant"
            mask += [int(generated)] * (len(ids) - start)
            turns.append(_make_turn(generator, role, number, start, len(ids)))
    trained = np.array(mask, np.int8)
    log_probs = np.where(trained == 1, -generator.exponential(size=len(ids)), 0.0).astype(np.float32)
    boards = generator.integers(0, distinct_images, turn_count).tolist()
    return Trajectory(
        trajectory_id=f"train_sokoban/default/{iteration:05d}/{group:04d}/{sample:02d}",
        task="sokoban",
        task_id=f"{group:032x}",
        iteration=iteration,
        group_index=group,
        sample_index=sample,
        policy_version=iteration,
        seed=int(generator.integers(0, 2**62)),
        sampling=json.dumps({"engine": "transformers", "version": "5.23.0", "temperature": 1.0, "seeded": True}),
        status="completed",
        finish_reason="stop",
        prompt_length=turns[0].token_end,
        token_ids=np.array(ids, np.int32),
        loss_mask=trained,
        rollout_log_probs=log_probs,
        weight_spans=[(iteration, 0, len(ids))],
        turns=turns,
        images=[make_png(px, board) for board in boards],
        image_grid_thw=[(1, side, side)] * turn_count,
        response=" ".join(turn.text for turn in turns[1:]),
        reward_parts={"distance_delta": 1.0, "final_bonus": 5.0, "turn_reward_avg": float(generator.normal())},
        metrics={"steps": float(turn_count), "success": 1.0},
        timings={"environment": 0.01, "generate": float(generator.exponential())},
    )


def _make_turn(generator: np.random.Generator, role: str, number: int, start: int, end: int) -> Turn:
    if role == "user":
        text = f"<image>\nTurn {number}: choose your next moves."
        return Turn(role=role, text=text, token_start=start, token_end=end, image_indices=[number])
    move = ("up", "down", "left", "right")[int(generator.integers(4))]
    info = {"parsed_actions": [move], "metrics": {"turn_metrics": {"action_is_valid": True}}}
    text = f"<answer>{move}</answer>"
    reward = float(generator.normal())
    return Turn(role=role, text=text, token_start=start, token_end=end, action=move, reward=reward, info=info)
