"""Geometry: problems, tool calls and the environments.

Names are loaded when they are first asked for: every command imports the task, and few need the rest.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from geo_sokoban_pipeline.envs.geo3k.env import Geo3kEnv
    from geo_sokoban_pipeline.envs.geo3k.tool_call import parse_tool_call

_PLACES = {"Geo3kEnv": "env", "parse_tool_call": "tool_call"}

__all__ = ["Geo3kEnv", "parse_tool_call"]


def __getattr__(name: str) -> Any:
    if name in _PLACES:
        return getattr(import_module(f"{__name__}.{_PLACES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
