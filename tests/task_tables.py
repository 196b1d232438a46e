"""The project's own catalog entries of the tables of a task, below another data root."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from kedro.io import DataCatalog
from kedro.runner import SequentialRunner
from omegaconf import OmegaConf

from geo_sokoban_pipeline.hooks.config_loader import task_data
from geo_sokoban_pipeline.pipelines.data import create_pipeline
from geo_sokoban_pipeline.tasks import task_of

CATALOG = Path(__file__).parents[1] / "conf" / "base" / "catalog"


def table_entries(folder: Path | str, parameters: dict[str, Any]) -> dict[str, Any]:
    """Entries by their patterns, such as `{task}.prompts`; parameters are sections by task."""
    files = (CATALOG / f"{layer}.yml" for layer in ("01_raw", "02_intermediate", "05_model_input"))
    text = "\n".join(file.read_text(encoding="utf-8") for file in files)
    text = text.replace("${globals:data_root}", str(folder))
    text = text.replace("${task_data:}", json.dumps(task_data(parameters)))
    entries = OmegaConf.to_container(OmegaConf.create(text), resolve=True)
    return {name: entry for name, entry in entries.items() if not name.startswith("_")}


def run_data(folder: Path | str, parameters: dict[str, Any], task: str) -> DataCatalog:
    """Run the pipeline `data_<task>` and return its catalog."""
    catalog = DataCatalog.from_config(table_entries(folder, {task: parameters}))
    catalog[f"params:{task}"] = parameters
    SequentialRunner().run(create_pipeline(task_of(task)), catalog)
    return catalog
