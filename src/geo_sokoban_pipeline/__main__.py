"""The installed package as a command: `python -m geo_sokoban_pipeline` is `kedro run` without a project folder.

It takes the words of `kedro run`; the configuration comes from `--conf-source`, a folder or the archive that
`kedro package` writes. Paths are relative to the current folder.
"""

from __future__ import annotations

import sys
from typing import Any

from kedro.framework.cli.utils import find_run_command
from kedro.framework.project import configure_project, settings

from geo_sokoban_pipeline.hooks.command_line import PACKAGE, CommandLineHooks, prepare_words


def main(*args: Any, **kwargs: Any) -> Any:
    """Run Kedro's `run` command; in an interactive session it returns the outputs instead of leaving Python."""
    configure_project(PACKAGE)
    kwargs.setdefault("standalone_mode", not hasattr(sys, "ps1"))
    if not kwargs["standalone_mode"]:
        return find_run_command(PACKAGE)(*args, **kwargs)
    words = list(args[0] if args else kwargs.pop("args", None) or sys.argv[1:])
    prepare_words(words)
    hooks: CommandLineHooks = next(hook for hook in settings.HOOKS if isinstance(hook, CommandLineHooks))
    try:
        return find_run_command(PACKAGE)(words, **kwargs)
    except SystemExit as error:
        hooks.end_command(error, error.code if isinstance(error.code, int) else 1)
        raise
    except Exception as error:
        hooks.end_command(error, 1)
        raise


if __name__ == "__main__":
    main()
