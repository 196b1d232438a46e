"""The command that runs now, as far as a command that it starts has to be like it."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Command:
    """Where and how the current command runs.

    Attributes:
        project: folder of the project.
        conf_source: folder or archive of the configuration.
        env: configuration environment; None: Kedro's default.
        data_root: absolute data root.
    """

    project: Path
    conf_source: str
    env: str | None
    data_root: Path

    def words(self, config: Path) -> list[str]:
        """`kedro run` in a process of its own, with the same environment and configuration and a file of arguments."""
        env = [] if self.env is None else [f"--env={self.env}"]
        return [
            *(sys.executable, "-m", "kedro", "run"),
            f"--config={config}",
            f"--conf-source={self.conf_source}",
            *env,
        ]

    @staticmethod
    def environment(data_root: Path) -> dict[str, str]:
        """Environment variables of a run on a data root, with one thread."""
        return {**os.environ, "GEO_SOKOBAN_DATA_ROOT": str(data_root), "OMP_NUM_THREADS": "1"}
