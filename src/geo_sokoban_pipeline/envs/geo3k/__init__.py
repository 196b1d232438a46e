"""Geometry: problems, tool calls and the environment."""
