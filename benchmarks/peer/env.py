"""The environment of both systems: Sokoban whose every episode has a fixed number of responses.

No response ends an episode early. A response without a move is a turn without a move, and a solved level starts over
with the next response. So two systems with the same limit have the same number of turns, whatever their policies do.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from geo_sokoban_pipeline.envs.base import Info, Observation
from geo_sokoban_pipeline.envs.sokoban import Board, SokobanEnv

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
