"""The run that is looked at: its parameters and its folders, without touching either."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from geo_sokoban_pipeline.options.check import CheckPipelineOptions
from geo_sokoban_pipeline.options.project import ProjectParameters
from geo_sokoban_pipeline.options.training import TrainOptions
from geo_sokoban_pipeline.storage import MANIFEST


@dataclass(frozen=True)
class Subject:
    """What a pre-flight looks at.

    Attributes:
        task: such as `sokoban`; the run is `train_<task>`.
        parameters: all parameters of the command.
        data_root: folder that holds `06_models` and the other layers.
    """

    task: str
    parameters: ProjectParameters
    data_root: Path

    @property
    def run(self) -> str:
        """Namespace of the run."""
        return f"train_{self.task}"

    @property
    def options(self) -> TrainOptions:
        """Options of the run."""
        found: TrainOptions = getattr(self.parameters, self.run)
        return found

    @property
    def data(self) -> Any:
        """Options of the task's data."""
        return getattr(self.parameters, self.task)

    @property
    def settings(self) -> CheckPipelineOptions:
        """Options of the pre-flight itself."""
        found: CheckPipelineOptions = getattr(self.parameters, f"check_{self.task}")
        return found

    @property
    def models(self) -> Path:
        """Folder of the run's policies, checkpoints and lock."""
        return self.data_root / "06_models" / self.run / self.parameters.run_id

    @property
    def base_policy(self) -> Path | None:
        """The run's own copy of the policy it started from, which it goes on with; None: it has none yet."""
        return self._stored("base_policy")

    @property
    def learnt_policy(self) -> Path | None:
        """The run's policy after the warm start; None: it has none yet."""
        return self._stored("policy")

    @property
    def outputs(self) -> Path:
        """Folder of the run's trajectories and metrics."""
        return self.data_root / "07_model_output" / self.run / self.parameters.run_id

    @property
    def reports(self) -> Path:
        """Folder of the run's summary and report."""
        return self.data_root / "08_reporting" / self.run / self.parameters.run_id

    def _stored(self, name: str) -> Path | None:
        folder = self.models / name
        return folder if not self.parameters.fresh and (folder / MANIFEST).is_file() else None
