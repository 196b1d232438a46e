"""The environment of both systems: Sokoban whose every episode has a fixed number of responses.

No response ends an episode early. A response without a move is a turn without a move, and a solved level starts over
with the next response. So two systems with the same limit have the same number of turns, whatever their policies do.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from geo_sokoban_pipeline.envs.base import Info, Observation
from geo_sokoban_pipeline.envs.sokoban import Board, SokobanEnv
from geo_sokoban_pipeline.envs.sokoban.config import SokobanDataOptions
from geo_sokoban_pipeline.envs.sokoban.data_steps import make_prompts, read_levels

REWARD_ARGS = {"aggregate": "sum", "distance_weight": 0.1}
CELL_PX = 16


class FixedLengthEnv(SokobanEnv):
    """Sokoban of exactly `turns` responses, one move each, with the default run's images and texts."""

    def __init__(self, board: Board, turns: int) -> None:
        super().__init__(board, max_actions_per_turn=1, max_steps=10**9, cell_px=CELL_PX, observation_style="brief")
        self.turns = turns

    def step(self, text: str) -> tuple[Observation, bool, Info]:
        """See `SokobanEnv.step`; done after the last turn."""
        if self.board.is_solved:
            self.board = self.initial_board
        observation, _, info = super().step(text)
        self.done = len(self.turn_rewards) >= self.turns
        return observation, self.done, info


def build_env(sample: Mapping[str, Any], args: Mapping[str, Any]) -> FixedLengthEnv:
    """Environment of a prompts row; `args` holds `turns`."""
    return FixedLengthEnv(Board.from_env_config(sample["extra_info"]["env_config"]), **args)


def make_rows(count: int) -> list[dict[str, Any]]:
    """`count` training rows of the default data: 6×6 boards, one box, images of 96×96 pixels."""
    base = {"cell_px": CELL_PX, "instruction": "brief", "inner_walls": [1, 4], "max_solution": 8}
    options = SokobanDataOptions.model_validate(base | {"counts": {"train": count, "validation": 8, "eval": 8}})
    rows = make_prompts(read_levels(options)[0], options)[0].to_dict("records")
    return [row for row in rows if row["split"] == "train"]
