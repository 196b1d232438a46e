"""Weights & Biases as a second tracker: one run of the service for each run of the project, as with MLflow.

It is used where `WANDB_API_KEY` is set and the package `wandb` is installed. W&B numbers its own steps, so the axes of
the charts are metrics (`iteration`, `policy_version`, `warm_start/step`). Offline it has no history that could be asked
for, so the run's folder notes what has been sent.
"""

from __future__ import annotations

import importlib.util
import json
import os
import uuid
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from geo_sokoban_pipeline.hooks.tracked import PromptTable, points_of
from geo_sokoban_pipeline.parameters import TrackingOptions
from geo_sokoban_pipeline.preflight.machine import WANDB_KEY
from geo_sokoban_pipeline.runs.folders import WANDB_NOTE, WANDB_SENT
from geo_sokoban_pipeline.runs.storage import CorruptFolderError, find_json, write_json

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

    def __init__(self, run: Any, folder: Path) -> None:
        self._run = run
        self._sent = folder / WANDB_SENT
        self._rows, self._points = read_sent(folder)
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

        note, stored = folder / WANDB_NOTE, dict[str, Any]()
        with suppress(CorruptFolderError):
            stored = find_json(note) or {}
        if stored.get("project") != options.experiment:
            (folder / WANDB_SENT).unlink(missing_ok=True)
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
        return cls(run, folder)

    def describe(self, tags: Mapping[str, str], parameters: Mapping[str, Any]) -> None:
        """Record parameters and tags as the run's configuration."""
        self._run.config.update(dict(parameters), allow_val_change=True)
        self.set_tags(tags)

    def log_rows(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Record metrics rows; iterations that have been sent are left out."""
        for row in rows:
            if (iteration := int(row["iteration"])) not in self._rows:
                self._log(points_of(row))
                self._rows.add(iteration)
                self._remember({"iterations": [iteration]})

    def log_points(self, points: Iterable[tuple[str, float, int]]) -> None:
        """Record (metric, value, step); those that have been sent are left out."""
        if new := [point for point in points if (point[0], point[2]) not in self._points]:
            self._log(new)
            self._points |= {(name, step) for name, _, step in new}
            self._remember({"points": [[name, step] for name, _, step in new]})

    def log_input(self, table: PromptTable) -> None:
        """Record a table of prompts in the run's configuration."""
        entry = {name: getattr(table, name) for name in ("context", "digest", "rows", "data_id", "source")}
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

    def _remember(self, sent: Mapping[str, Any]) -> None:
        with self._sent.open("a", encoding="utf-8") as file:
            file.write(f"\n{json.dumps(sent)}")  # begins a line: a killed command may have left a torn one


def read_sent(folder: Path) -> tuple[set[int], set[tuple[str, int]]]:
    """Iterations, and points (name, step), that the W&B run of a folder has been sent; a torn line tells nothing."""
    rows, points = set[int](), set[tuple[str, int]]()
    file = folder / WANDB_SENT
    for line in file.read_text(encoding="utf-8").splitlines() if file.is_file() else []:
        with suppress(ValueError):
            sent = json.loads(line)
            rows |= set(sent.get("iterations", []))
            points |= {(name, step) for name, step in sent.get("points", [])}
    return rows, points
