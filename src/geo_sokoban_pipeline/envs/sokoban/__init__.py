"""Sokoban as a world of values: boards, exact solver, level generator, pictures, players, and the environment."""

from geo_sokoban_pipeline.envs.sokoban.board import DIRECTIONS, Board, Layout, Move, MoveRewards
from geo_sokoban_pipeline.envs.sokoban.env import SokobanEnv, build_env, parse_actions
from geo_sokoban_pipeline.envs.sokoban.expert import Player, make_player
from geo_sokoban_pipeline.envs.sokoban.levels import (
    Level,
    LevelsExhaustedError,
    enumerate_layouts,
    generate_levels,
    levels_of_layout,
)
from geo_sokoban_pipeline.envs.sokoban.render import render, render_png
from geo_sokoban_pipeline.envs.sokoban.solver import SearchLimitError, solve

__all__ = [
    "DIRECTIONS",
    "Board",
    "Layout",
    "Level",
    "LevelsExhaustedError",
    "Move",
    "MoveRewards",
    "Player",
    "SearchLimitError",
    "SokobanEnv",
    "build_env",
    "enumerate_layouts",
    "generate_levels",
    "levels_of_layout",
    "make_player",
    "parse_actions",
    "render",
    "render_png",
    "solve",
]
