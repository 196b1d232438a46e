"""Configuration: Kedro's OmegaConf loader, which also knows `${data_id:<task>}`, the folder of a task's tables.

The id follows from the parameters alone, so commands without hooks (`kedro viz`) find the same tables as `kedro run`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

from kedro.config import OmegaConfigLoader

from geo_sokoban_pipeline.envs.identity import identify_data
from geo_sokoban_pipeline.options.base import validate_parameters
from geo_sokoban_pipeline.tasks import task_of


class ProjectConfigLoader(OmegaConfigLoader):
    """`OmegaConfigLoader` with the resolver `data_id`, which as all of Kedro's belongs to the newest loader.

    Args:
        conf_source, env, runtime_params, custom_resolvers, settings: as of `OmegaConfigLoader`.
    """

    def __init__(
        self,
        conf_source: str | Path,
        env: str | None = None,
        runtime_params: dict[str, Any] | None = None,
        *,
        custom_resolvers: Mapping[str, Callable[..., Any]] | None = None,
        **settings: Any,
    ) -> None:
        resolvers = {**(custom_resolvers or {}), "data_id": self._data_id}
        super().__init__(conf_source, env, runtime_params, custom_resolvers=resolvers, **settings)

    def _data_id(self, task: str) -> str:
        # Where hooks run they have put the checked parameters here; each other look would read the files again.
        merged = self["parameters"] if "parameters" in self.data else self._parameters_as_read
        return identify_data(task, validate_parameters(merged.get(task, {}), task_of(task).data, prefix=task)).id

    @cached_property
    def _parameters_as_read(self) -> dict[str, Any]:
        found: dict[str, Any] = self["parameters"]
        return found
