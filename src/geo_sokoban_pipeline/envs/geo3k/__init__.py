"""Geometry: problems, tool calls and the environment."""

from geo_sokoban_pipeline.envs.geo3k.env import Geo3kEnv
from geo_sokoban_pipeline.envs.geo3k.tool_call import parse_tool_call

__all__ = ["Geo3kEnv", "parse_tool_call"]
