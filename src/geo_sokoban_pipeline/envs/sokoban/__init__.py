"""Sokoban: boards, exact solver, level generator, images, experts, and the environment.

Names are loaded when they are first asked for: every command imports the task, and few need the rest.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from geo_sokoban_pipeline.envs.sokoban.board import DIRECTIONS, Board, Layout, Move, MoveRewards
    from geo_sokoban_pipeline.envs.sokoban.drawing import render, render_png, render_solution
    from geo_sokoban_pipeline.envs.sokoban.env import SokobanEnv, build_env, parse_actions
    from geo_sokoban_pipeline.envs.sokoban.expert import MovePolicy, make_agent
    from geo_sokoban_pipeline.envs.sokoban.levels import (
        Level,
        LevelsExhaustedError,
        enumerate_layouts,
        generate_levels,
        levels_of_layout,
    )
    from geo_sokoban_pipeline.envs.sokoban.solver import SearchLimitError, solve

_PLACES = {
    "board": ("DIRECTIONS", "Board", "Layout", "Move", "MoveRewards"),
    "env": ("SokobanEnv", "build_env", "parse_actions"),
    "expert": ("MovePolicy", "make_agent"),
    "levels": ("Level", "LevelsExhaustedError", "enumerate_layouts", "generate_levels", "levels_of_layout"),
    "drawing": ("render", "render_png", "render_solution"),
    "solver": ("SearchLimitError", "solve"),
}

__all__ = [
    "DIRECTIONS",
    "Board",
    "Layout",
    "Level",
    "LevelsExhaustedError",
    "Move",
    "MoveRewards",
    "MovePolicy",
    "SearchLimitError",
    "SokobanEnv",
    "build_env",
    "enumerate_layouts",
    "generate_levels",
    "levels_of_layout",
    "make_agent",
    "parse_actions",
    "render",
    "render_png",
    "render_solution",
    "solve",
]


def __getattr__(name: str) -> Any:
    for module, names in _PLACES.items():
        if name in names:
            return getattr(import_module(f"{__name__}.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
