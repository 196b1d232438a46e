"""Geometry: problems, tool calls and the environment."""

from geo_sokoban_pipeline.envs.geo3k.tool_call import parse_tool_call

__all__ = ["parse_tool_call"]
