"""The installed package as a command: `python -m geo_sokoban_pipeline` is `kedro run` without a project folder.

It takes the words of `kedro run`; the configuration comes from `--conf-source`, a folder or the archive that
`kedro package` writes. Paths are relative to the current folder.
"""

from __future__ import annotations

import sys
from typing import Any

from kedro.framework.cli.utils import find_run_command
from kedro.framework.project import configure_project

PACKAGE = "geo_sokoban_pipeline"


def main(*args: Any, **kwargs: Any) -> Any:
    """Run Kedro's `run` command; in an interactive session it returns the outputs instead of leaving Python."""
    configure_project(PACKAGE)
    kwargs.setdefault("standalone_mode", not hasattr(sys, "ps1"))
    return find_run_command(PACKAGE)(*args, **kwargs)


if __name__ == "__main__":
    main()
