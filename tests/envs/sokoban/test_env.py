"""The environment: slime's worked examples, limits, observations, building from a row."""

from __future__ import annotations

import json

import numpy as np
import pytest
from PIL import Image

from geo_sokoban_pipeline.envs.base import InteractionEnv
from geo_sokoban_pipeline.envs.sokoban import (
    Board,
    MoveRewards,
    SokobanEnv,
    build_env,
    parse_actions,
    render,
)
from geo_sokoban_pipeline.rewards import sokoban_reward

LEVEL = Board.from_text("######\n#P___#\n#_X_O#\n#____#\n#____#\n######")
ROW = Board.from_text("#######\n#_PXO_#\n#######")


def test_reset_step_and_metadata_have_the_seed_keys():
    env = SokobanEnv(LEVEL)
    observation, info = env.reset()
    (image,) = observation["multi_modal_data"]["<image>"]
    assert (image.mode, image.size) == ("RGB", (384, 384))
    assert env.box_target_distance() == info["box_target_distance"] == 2
    assert isinstance(env, InteractionEnv)
    _, _, info = env.step("<answer>Down, fly, Right</answer>")
    assert info == {
        "raw_action": "<answer>Down, fly, Right</answer>",
        "parsed_actions": ["down", "right"],
        "metrics": {
            "turn_metrics": {"action_is_valid": True, "action_is_effective": True},
            "traj_metrics": {"success": False},
        },
        "turn_reward": pytest.approx(0.02),
        "box_target_distance": 1,
    }
    json.dumps(info)
    metadata = env.metadata()
    assert set(metadata) == {
        *("seed", "initial_state_text", "initial_obs_text", "dist0", "turns"),
        *("final_state_text", "final_obs_text", "dist1", "turn_rewards", "final_bonus"),
    }
    assert metadata["initial_state_text"] == LEVEL.to_symbols() and metadata["turns"] == 1
    assert metadata["initial_state_text"].split("\n")[1] == " # \t P \t _ \t _ \t _ \t # "


@pytest.mark.parametrize(
    ("board", "responses", "rewards", "total", "effective", "steps"),
    [
        (LEVEL, ["Up"], [-0.05], -0.05, False, 1),
        (LEVEL, ["Right"], [0.01], 0.01, True, 1),
        (LEVEL, ["no action here"], [0.0], 0.0, False, 0),
        (LEVEL, ["Down,Right,Right"], [1.03], 8.03, True, 3),
        (LEVEL, ["Down", "Right", "Right"], [0.01, 0.01, 1.01], 7.343333, True, 3),
        (ROW, ["Right,Right,Right"], [1.01], 7.01, True, 1),
        (LEVEL, ["Up, Right, Up"], [-0.09], -0.09, True, 3),
    ],
)
def test_worked_examples(board, responses, rewards, total, effective, steps):
    env = SokobanEnv(board)
    dist0 = env.reset()[1]["box_target_distance"]
    for response in responses:
        _, ended, info = env.step(response)
    done = total > 5
    assert env.turn_rewards == pytest.approx(rewards)
    assert ended is done and env.steps == steps
    assert info["metrics"]["turn_metrics"]["action_is_effective"] is effective
    assert env.final_bonus == (5.0 if done else 0.0)
    assert info["metrics"]["traj_metrics"]["success"] is done
    earned = sokoban_reward(env.turn_rewards, env.final_bonus, dist0, env.box_target_distance())["total_reward"]
    assert earned == pytest.approx(total, abs=1e-6)


def test_stepping_after_the_end_is_an_error_until_reset():
    env = SokobanEnv(ROW)
    env.step("right")
    with pytest.raises(RuntimeError, match="call reset first"):
        env.step("right")
    env.reset()
    assert env.board == ROW and env.turn_rewards == [] and env.steps == 0
    with env:
        env.close()


def test_observation_texts():
    full, _ = SokobanEnv(LEVEL).reset()
    for part in ("See the image", "None", "Up, Down, Left or Right"):
        assert part in full["obs_str"]
    assert SokobanEnv(LEVEL, observation_style="brief").reset()[0]["obs_str"] == "Next?"
    both = SokobanEnv(LEVEL, text_grid=True).reset()[0]
    assert LEVEL.to_symbols() in both["obs_str"] and both["multi_modal_data"]
    text_only = SokobanEnv(LEVEL, render_mode="text", observation_style="brief").reset()[0]
    assert text_only == {"obs_str": f"{LEVEL.to_grid()}\nNext?"}
    assert Board.from_text(LEVEL.to_grid()) == LEVEL
    assert "<image>" not in full["obs_str"]


def test_messages_hold_images_then_one_text():
    env = SokobanEnv(LEVEL, cell_px=16)
    observation, _ = env.reset()
    message = env.format_observation({"role": "system", **observation})
    assert message["role"] == "user"
    image, text = message["content"]
    assert image["type"] == "image" and isinstance(image["image"], Image.Image)
    assert image["image"].tobytes() == render(LEVEL, 16).tobytes()
    assert text == {"type": "text", "text": observation["obs_str"]}
    for nothing in (None, {}):
        assert env.format_observation(nothing) == {"role": "user", "content": [{"type": "text", "text": ""}]}


def test_final_metrics_know_the_optimum():
    env = SokobanEnv(LEVEL, optimal_steps=3)
    env.step("up, down, right")
    env.step("right")
    assert env.final_metrics() == {
        "success": 1.0,
        "lost": 0.0,
        "steps": 4.0,
        "turns": 2.0,
        "invalid_turns": 0.0,
        "invalid_share": 0.0,
        "boxes_on_target": 1.0,
        "dist0": 2.0,
        "dist1": 0.0,
        "optimal_steps": 3.0,
        "steps_over_optimal": pytest.approx(4 / 3),
    }
    assert "optimal_steps" not in SokobanEnv(LEVEL).final_metrics()


def test_build_env_reads_a_row_and_lets_arguments_win():
    row = {"extra_info": {"env_config": LEVEL.to_env_config(max_steps=40)}, "solution_length": 3}
    env = build_env(row)
    assert (env.initial_board, env.options.max_steps, env.options.optimal_steps) == (LEVEL, 40, 3)
    env = build_env(row, {"max_steps": 10, "rewards": {"malformed": -0.2}, "observation_style": "brief", "cell_px": 16})
    assert (env.options.max_steps, env.options.cell_px) == (10, 16)
    assert env.options.rewards == MoveRewards(malformed=-0.2)
    config = LEVEL.to_env_config() | {"initial_boxes": np.array([[2, 2]])}
    assert build_env({"extra_info": {"env_config": config}}, {}).initial_board == LEVEL


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"max_step": 3}, r"env.args.max_step=3: unknown name. Did you mean env.args.max_steps\?"),
        ({"rewards": {"bonus": 1}}, "env.args.rewards.bonus=1: unknown name. Known here: blocked"),
        ({"board": 1}, "env.args.board=1: unknown name"),
        ({"max_steps": 0}, "max_steps=0: input should be greater than or equal to 1"),
        ({"max_actions_per_turn": 0}, "max_actions_per_turn=0"),
        ({"cell_px": 4}, "cell_px=4: input should be greater than or equal to 8"),
        ({"observation_style": "long"}, "observation_style=\"long\": input should be 'full' or 'brief'"),
        ({"render_mode": "3d"}, 'render_mode="3d"'),
        ({"distance": "x"}, 'distance="x"'),
    ],
)
def test_bad_arguments_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        build_env({"extra_info": {"env_config": LEVEL.to_env_config()}}, arguments)


@pytest.mark.parametrize(
    ("response", "actions"),
    [
        ("<answer>Up, left</answer>", ["up", "left"]),
        ("<answer>fly</answer> up", []),  # an answer block without a move counts as no move
        ("<ANSWER>\nDown\n</Answer>", ["down"]),
        ("<answer>up</answer><answer>down</answer>", ["up"]),
        ("<answer>up", []),  # an open block is no block, and "<answer>up" is no token
        ("<answer> up", ["up"]),
        ("Right,Right,Right", ["right"] * 3),
        ("up;down\nleft\tright", ["up", "down", "left"]),
        ("up,down , , left", ["up", "down", "left"]),
        ("up. (left) 'down' right!", []),  # attached punctuation disqualifies
        ("I go UP then dOwN", ["up", "down"]),
        ("upward left", ["left"]),
        ("↑", []),
        ("", []),
        ("<answer></answer>", []),
        ("<answer>up left down right</answer>", ["up", "left", "down"]),
        ("<think>up <answer>up</answer></think><answer>left</answer>", ["left"]),
        ("<think>a</think> up <think>b</think> down", ["down"]),
        ("<think><answer>up</answer>", ["up"]),
    ],
)
def test_action_grammar(response, actions):
    assert parse_actions(response, 3) == actions
