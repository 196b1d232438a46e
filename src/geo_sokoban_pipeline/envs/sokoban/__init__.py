"""Sokoban as a world of values: boards, exact solver, level generator, pictures, players, and the environment."""

from geo_sokoban_pipeline.envs.sokoban.actions import parse_actions
from geo_sokoban_pipeline.envs.sokoban.backward import enumerate_layouts, levels_of_layout
from geo_sokoban_pipeline.envs.sokoban.board import Board, Move, MoveRewards
from geo_sokoban_pipeline.envs.sokoban.env import SokobanEnv, build_env
from geo_sokoban_pipeline.envs.sokoban.layout import DIRECTIONS, Layout
from geo_sokoban_pipeline.envs.sokoban.levels import Level, LevelsExhaustedError, generate_levels
from geo_sokoban_pipeline.envs.sokoban.players import Player, make_player
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
