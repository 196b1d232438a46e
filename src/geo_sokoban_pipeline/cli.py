"""Kedro's command line in this project: its own commands, with the hooks of `hooks/command_line.py` around them.

Kedro imports this module before it reads the words of a command, and in no other case.
"""

from __future__ import annotations

import os

import click
from kedro.framework.cli.project import run
from kedro.framework.project import settings

from geo_sokoban_pipeline.hooks.command_line import CommandLineHooks

__all__ = ["cli", "run"]


cli = click.Group("kedro")  # no commands of its own: one group with Kedro's in --help

# Libraries send no usage data. Their switches are variables, as in the Makefile: the Hugging Face libraries read them
# at their import, and the processes that a command starts inherit them. Sessions without a command line need none:
# settings.py leaves Kedro's plugin out, and hooks/tracking.py imports MLflow without its telemetry.
for name in ("DO_NOT_TRACK", "HF_HUB_DISABLE_TELEMETRY", "KEDRO_DISABLE_TELEMETRY"):
    os.environ.setdefault(name, "1")
next(hook for hook in settings.HOOKS if isinstance(hook, CommandLineHooks)).register()
