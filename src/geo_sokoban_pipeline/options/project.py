"""All parameters of the project: one model whose fields are the top-level names.

What is not a field here is an error, so a misspelt section never falls silently back to its defaults.
"""

from __future__ import annotations

from pydantic import Field

from geo_sokoban_pipeline.options.base import RunId, StrictModel
from geo_sokoban_pipeline.options.check import CheckPipelineOptions
from geo_sokoban_pipeline.options.geo3k import Geo3kDataOptions, Geo3kMultiTurnDataOptions
from geo_sokoban_pipeline.options.sokoban import SokobanDataOptions
from geo_sokoban_pipeline.options.study import ControlOptions, StudyDefinition, StudyOptions
from geo_sokoban_pipeline.options.training import (
    EvaluatePipelineOptions,
    RolloutPipelineOptions,
    TrainOptions,
    UpdatePipelineOptions,
)


class TrackingOptions(StrictModel):
    """Where MLflow records a run. It only watches: whatever goes wrong there is a warning, never the end of a run."""

    enabled: bool = Field(True, description="Off: MLflow is not even imported.")
    uri: str | None = Field(None, description="MLflow tracking URI. None: the sqlite file mlflow.db in the data root.")
    experiment: str = Field("geo_sokoban_pipeline", min_length=1, description="Name of the MLflow experiment.")
    sample_trajectories: bool = Field(True, description="Record the run's newest trajectory file as an artifact.")


class ProjectParameters(StrictModel):
    """The root of `conf/*/parameters*`."""

    run_id: RunId = Field("default", description="Folder of the run below every {run} path; only by --params.")
    fresh: bool = Field(False, description="Clear the run's folders before it starts; only by --params.")
    seed: int = Field(0, description="Seed of the run: initial weights, warm start, rollouts. Not of the data.")
    tracking: TrackingOptions = TrackingOptions()
    sokoban: SokobanDataOptions = Field(default_factory=SokobanDataOptions, description="Data, shared by all runs.")
    geo3k: Geo3kDataOptions = Field(default_factory=Geo3kDataOptions, description="Data, shared by all runs.")
    geo3k_multi_turn: Geo3kMultiTurnDataOptions = Field(
        default_factory=Geo3kMultiTurnDataOptions, description="Data, shared by all runs."
    )
    train_sokoban: TrainOptions = Field(default_factory=TrainOptions, description="A run, from policy to report.")
    rollout_sokoban: RolloutPipelineOptions = Field(
        default_factory=RolloutPipelineOptions, description="Collecting without training."
    )
    update_sokoban: UpdatePipelineOptions = Field(
        default_factory=UpdatePipelineOptions, description="Training on stored trajectories."
    )
    evaluate_sokoban: EvaluatePipelineOptions = Field(
        default_factory=EvaluatePipelineOptions, description="Evaluation of any checkpoint."
    )
    control_sokoban: ControlOptions = Field(
        default_factory=ControlOptions, description="More imitation instead of GRPO, to compare with."
    )
    study: StudyOptions = Field(default_factory=StudyOptions, description="Which study runs, and how.")
    study_default: StudyDefinition = Field(default_factory=StudyDefinition, description="The recipe of `make run`.")
    study_from_zero: StudyDefinition = Field(
        default_factory=StudyDefinition, description="GRPO after imitation of random legal moves."
    )
    study_long: StudyDefinition = Field(default_factory=StudyDefinition, description="One long run.")
    check_sokoban: CheckPipelineOptions = Field(
        default_factory=CheckPipelineOptions, description="Pre-flight of a training run."
    )
