"""Hooks: the rules that hold for every run, whatever its nodes do.

Parameters are checked before any work, one process at a time owns a run's folders, and MLflow watches from outside.
"""

from geo_sokoban_pipeline.hooks.command_line import CommandLineHooks
from geo_sokoban_pipeline.hooks.live_report import LiveReportHooks
from geo_sokoban_pipeline.hooks.parameters import CommandHooks, ParameterHooks
from geo_sokoban_pipeline.hooks.runs import HistoryHooks, RunHooks
from geo_sokoban_pipeline.hooks.terminal import TerminalHooks
from geo_sokoban_pipeline.hooks.tracking import TrackingHooks

__all__ = [
    "CommandHooks",
    "CommandLineHooks",
    "HistoryHooks",
    "LiveReportHooks",
    "ParameterHooks",
    "RunHooks",
    "TerminalHooks",
    "TrackingHooks",
]
