"""The project's own catalog entries of the tables of a task, below another data root."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml
from kedro.io import DataCatalog
from kedro.runner import SequentialRunner

from geo_sokoban_pipeline.hooks.config_loader import task_data
from geo_sokoban_pipeline.pipelines.data import create_pipeline
from geo_sokoban_pipeline.tasks import task_of

CATALOG = Path(__file__).parents[1] / "conf" / "base" / "catalog"


def table_entries(folder: Path | str, parameters: dict[str, Any]) -> dict[str, Any]:
    """Entries by their patterns, such as `{task}.prompts`; parameters are sections by task."""
    values = {"${globals:data_root}": str(folder), "${task_data:}": json.dumps(task_data(parameters))}
    entries: dict[str, Any] = {}
    for file in ("01_raw", "02_intermediate", "05_model_input"):
        text = (CATALOG / f"{file}.yml").read_text(encoding="utf-8")
        for name, value in values.items():
            text = text.replace(name, value)
        entries |= {name: entry for name, entry in yaml.safe_load(text).items() if not name.startswith("_")}
    return entries


def run_data(folder: Path | str, parameters: dict[str, Any], task: str) -> DataCatalog:
    """Run the pipeline `data_<task>` and return its catalog."""
    catalog = DataCatalog.from_config(table_entries(folder, {task: parameters}))
    catalog[f"params:{task}"] = parameters
    SequentialRunner().run(create_pipeline(task_of(task)), catalog)
    return catalog
