"""Metrics of a run: one flat JSON row per iteration, loaded as a list of rows."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from kedro.io import DatasetError

from geo_sokoban_pipeline.datasets.iterations import IterationPartitions
from geo_sokoban_pipeline.formats import type_name
from geo_sokoban_pipeline.runs.storage import CorruptFolderError, read_json, write_json

if TYPE_CHECKING:
    from kedro_datasets._typing import PlotlyPreview

_STEP, _FIRST = "iteration", "rollout/raw_reward"


class MetricsDataset(IterationPartitions):
    """Rows `iter=00012.json`; saves {partition: row}, loads the rows as a list in the order of iterations.

    Args:
        path: folder of all rows.
        metadata: ignored here; read by kedro-viz.
    """

    suffix = ".json"

    def _write(self, path: Path, value: Any) -> None:
        if not isinstance(value, Mapping):
            raise DatasetError(f"{path}: a row of metrics is a dict, not {type_name(value)}")
        write_json(path, {name: _plain_number(path, name, number) for name, number in value.items()})

    def _read(self, path: Path) -> dict[str, float | int | None]:
        row = read_json(path)
        if not isinstance(row, dict):
            raise CorruptFolderError(f"{path} holds {type_name(row)}, not a row of metrics. Restore or delete it.")
        return row

    def _bytes_needed(self, value: Any) -> int | None:
        return 64 * len(value)

    def load(self) -> list[dict[str, float | int | None]]:
        """All rows, by iteration; `[]` where nothing is stored.

        Raises:
            DatasetError: a row is not readable JSON; the message names the file.
        """
        return [self._read(self._place(name)) for name in self.partitions()]

    def preview(self) -> PlotlyPreview:
        """Curves for kedro-viz: a menu chooses the metric, the mean reward comes first; None without rows."""
        rows = self.load()
        if not rows:
            return cast("PlotlyPreview", None)
        names = sorted({name for row in rows for name in row} - {_STEP}, key=lambda name: (name != _FIRST, name))
        steps = [row.get(_STEP) for row in rows]
        curves = [
            {
                "type": "scatter",
                "mode": "lines+markers",
                "name": name,
                "x": steps,
                "y": [row.get(name) for row in rows],
                "visible": not number,
            }
            for number, name in enumerate(names)
        ]
        choices = [
            {"label": name, "method": "update", "args": [{"visible": [other == name for other in names]}]}
            for name in names
        ]
        menu = {"buttons": choices, "x": 0, "xanchor": "left", "y": 1.05, "yanchor": "bottom"}  # above the curve
        layout = {"xaxis": {"title": {"text": _STEP}}, "showlegend": False, "updatemenus": [menu]}
        return cast("PlotlyPreview", {"data": curves, "layout": layout})


def _plain_number(path: Path, name: str, value: Any) -> float | int | None:
    if hasattr(value, "item"):
        value = value.item()
    if value is not None and not isinstance(value, bool | int | float):
        raise DatasetError(f"{path}: metric {name} is {value!r}; give a number or None")
    # JSON has no NaN and no infinity; a metric that diverged is stored as null rather than stopping the run.
    return None if isinstance(value, float) and not math.isfinite(value) else value
