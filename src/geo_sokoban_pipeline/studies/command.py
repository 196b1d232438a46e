"""The command that runs now, as far as a command that it starts has to be like it."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from geo_sokoban_pipeline.options.base import ParameterError

DATA_ROOT = "GEO_SOKOBAN_DATA_ROOT"


@dataclass(frozen=True)
class Command:
    """Where and how the current command runs.

    Attributes:
        project: folder of the project.
        conf_source: folder or archive of the configuration.
        env: configuration environment; None: Kedro's default.
        data_root: absolute data root.
        find_root: the data root of a command that is started with this one in `GEO_SOKOBAN_DATA_ROOT`; None where its
            configuration has none.
    """

    project: Path
    conf_source: str
    env: str | None
    data_root: Path
    find_root: Callable[[Path], Path | None]

    def check_root(self, root: Path) -> None:
        """See that a command of a study writes where the study expects it.

        Raises:
            ParameterError: it would write elsewhere, over the data of other runs.
        """
        found = self.find_root(root)
        if found != root.resolve():
            raise ParameterError(
                f"data_root: the configuration does not follow {DATA_ROOT}. A run of this study belongs into {root}, "
                f"but would write into {found or 'no data root at all'}. Write `data_root: ${{oc.env:{DATA_ROOT}, "
                f"<path>}}` in globals.yml with your own path, or set {DATA_ROOT} instead."
            )

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
        return {**os.environ, DATA_ROOT: str(data_root), "OMP_NUM_THREADS": "1"}
