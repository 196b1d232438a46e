"""Kedro's command line in this project: its own commands, with the hooks of `hooks/command_line.py` around them.

Kedro imports this module before it reads the words of a command, and in no other case.
"""

from __future__ import annotations

import click
from kedro.framework.cli.project import run
from kedro.framework.project import settings

from geo_sokoban_pipeline.hooks.command_line import CommandLineHooks
from geo_sokoban_pipeline.hooks.terminal import switch_off_telemetry

__all__ = ["cli", "run"]


cli = click.Group("kedro")  # no commands of its own: one group with Kedro's in --help

switch_off_telemetry()
next(hook for hook in settings.HOOKS if isinstance(hook, CommandLineHooks)).register()
