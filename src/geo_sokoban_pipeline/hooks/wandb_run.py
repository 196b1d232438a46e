"""Weights & Biases as a second tracker: one run of the service for each run of the project, as with MLflow.

It is used where `WANDB_API_KEY` is set and the package `wandb` is installed. W&B numbers its own steps, so the axes of
the charts are metrics (`iteration`, `policy_version`, `warm_start/step`). Offline it has no history that could be asked
for, so the run's folder notes what has been sent.
"""

from __future__ import annotations

import importlib.util
import os
import uuid
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from geo_sokoban_pipeline.hooks.tracked import PromptTable, points_of
from geo_sokoban_pipeline.preflight.machine import WANDB_KEY
from geo_sokoban_pipeline.runs.folders import WANDB_NOTE
from geo_sokoban_pipeline.runs.storage import read_json, write_json

if TYPE_CHECKING:
    from geo_sokoban_pipeline.parameters import TrackingOptions

# Axis of the charts by prefix of a metric; the first prefix that fits counts.
_AXES = {"eval/validation/": "policy_version", "warm_start/": "warm_start/step", "": "iteration"}
_SERVICE = "WANDB_SERVICE"  # by which child processes would find the service of this one


def is_wanted(options: TrackingOptions, environment: Mapping[str, str] | None = None) -> bool:
    """Whether W&B is to be used: the parameter allows it, and the key is set."""
    environment = os.environ if environment is None else environment
    return options.enabled and options.wandb and bool(environment.get(WANDB_KEY))


def is_installed() -> bool:
    """Whether the package is there; nothing is imported."""
    return importlib.util.find_spec("wandb") is not None


class WandbRun:
    """A run of W&B and what it has been sent."""

    service = "Weights & Biases"

    def __init__(self, run: Any, note: Path, sent: Mapping[str, Any]) -> None:
        self._run = run
        self._note = note
        self._rows = set(sent.get("iterations", []))
        self._points = {(name, step) for name, step in sent.get("points", [])}
        for prefix, axis in _AXES.items():
            run.define_metric(axis, hidden=True)
            run.define_metric(f"{prefix}*", step_metric=axis)

    @classmethod
    def open(cls, options: TrackingOptions, data_root: Path, folder: Path, name: str) -> WandbRun:
        """The W&B run noted in a run's folder, continued, or a new one.

        Args:
            folder: of the run's models.
            name: of a new run, such as `train_sokoban/default`.
        """
        import wandb

        note = folder / WANDB_NOTE
        stored = read_json(note) if note.is_file() else {}
        if stored.get("project") != options.experiment:
            stored = {"id": uuid.uuid4().hex[:12], "project": options.experiment}
        place = Path(os.environ.get("WANDB_DIR") or data_root)
        place.mkdir(parents=True, exist_ok=True)
        before = os.environ.get(_SERVICE)
        settings = wandb.Settings(
            console="off",  # the terminal belongs to the command
            silent=True,
            x_disable_stats=not options.system_metrics,
            x_stats_sampling_interval=options.system_metrics or 15.0,
        )
        try:
            run = wandb.init(
                project=options.experiment,
                id=stored["id"],
                name=name,
                resume="allow",
                reinit="create_new",
                dir=str(place),
                settings=settings,
            )
        finally:
            if before is None:
                os.environ.pop(_SERVICE, None)
        write_json(note, stored)
        return cls(run, note, stored.get("sent", {}))

    def describe(self, tags: Mapping[str, str], parameters: Mapping[str, Any]) -> None:
        """Record parameters and tags as the run's configuration."""
        self._run.config.update(dict(parameters), allow_val_change=True)
        self.set_tags(tags)

    def log_rows(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Record metrics rows; iterations that have been sent are left out."""
        for row in rows:
            iteration = int(row["iteration"])
            if iteration not in self._rows:
                self._log(points_of(row))
                self._rows.add(iteration)
                self._remember()

    def log_points(self, points: Iterable[tuple[str, float, int]]) -> None:
        """Record (metric, value, step); those that have been sent are left out."""
        new = [point for point in points if (point[0], point[2]) not in self._points]
        if new:
            self._log(new)
            self._points |= {(name, step) for name, _, step in new}
            self._remember()

    def log_input(self, table: PromptTable) -> None:
        """Record a table of prompts in the run's configuration."""
        entry = {
            "context": table.context,
            "digest": table.digest,
            "rows": table.rows,
            "data_id": table.data_id,
            "source": table.source,
        }
        self._run.config.update({f"inputs.{table.name}": entry}, allow_val_change=True)

    def log_table(self, name: str, columns: Mapping[str, list[Any]]) -> None:
        """Record a table; W&B shows the newest of a name."""
        import wandb

        rows = [list(row) for row in zip(*columns.values(), strict=True)]
        self._run.log({name: wandb.Table(columns=list(columns), data=rows, allow_mixed_types=True)})

    def set_tags(self, tags: Mapping[str, str]) -> None:
        """Record tags in the run's configuration: W&B's own tags are single words."""
        self._run.config.update(dict(tags), allow_val_change=True)

    def log_file(self, path: Path, place: str) -> None:
        """Upload a file of the run, such as its report; offline it is copied for a later upload."""
        self._run.save(str(path), base_path=str(path.parent), policy="now")

    def close(self, status: str, error: Exception | None) -> None:
        """End the run; an error is kept in its summary."""
        if error is not None:
            self._run.summary["error"] = f"{type(error).__name__}: {error}"
        self._run.finish(exit_code=0 if status == "FINISHED" else 1)

    def abandon(self) -> None:
        """Nothing: W&B's service ends with the process."""

    def _log(self, points: Iterable[tuple[str, float, int]]) -> None:
        by_axis: dict[tuple[str, int], dict[str, float]] = {}
        for name, value, step in points:
            axis = next(axis for prefix, axis in _AXES.items() if name.startswith(prefix))
            by_axis.setdefault((axis, step), {})[name] = value
        for (axis, step), values in by_axis.items():
            self._run.log({axis: step, **values})

    def _remember(self) -> None:
        stored = read_json(self._note)
        points = sorted([name, step] for name, step in self._points)
        write_json(self._note, {**stored, "sent": {"iterations": sorted(self._rows), "points": points}})
