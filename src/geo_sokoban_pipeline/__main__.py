"""The installed package as a command: `geo-sokoban-pipeline`, or `python -m geo_sokoban_pipeline`.

`browse` and paths write a site of stored episodes, without a project. Everything else is `kedro run` without a project
folder: it takes the words of `kedro run`; the configuration comes from `--conf-source`, a folder or the archive that
`kedro package` writes. Paths are relative to the current folder.
"""

from __future__ import annotations

import sys
from typing import Any


def main(*args: Any, **kwargs: Any) -> Any:
    """Run Kedro's `run` command; in an interactive session it returns the outputs instead of leaving Python."""
    words = list(args[0] if args else kwargs.get("args") or sys.argv[1:])
    if words[:1] == ["browse"]:
        from geo_sokoban_pipeline.reporting.viewer.command import browse

        return browse(words[1:], prog_name="geo-sokoban-pipeline browse")
    # Not before: Kedro announces at its import how it logs.
    from kedro.framework.cli.utils import find_run_command
    from kedro.framework.project import configure_project, settings

    from geo_sokoban_pipeline.hooks.command_line import PACKAGE, CommandLineHooks, prepare_words

    configure_project(PACKAGE)
    kwargs.setdefault("standalone_mode", not hasattr(sys, "ps1"))
    if not kwargs["standalone_mode"]:
        return find_run_command(PACKAGE)(*args, **kwargs)
    kwargs.pop("args", None)
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
