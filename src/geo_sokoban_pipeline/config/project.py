"""All parameters of the project: one model whose fields are the top-level names.

What is not a field here is an error, so a misspelt section never falls silently back to its defaults.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BeforeValidator, Field, StringConstraints, model_validator

from geo_sokoban_pipeline.config.base import RunId, Seed, StrictModel
from geo_sokoban_pipeline.config.geo3k import Geo3kDataOptions, Geo3kMultiTurnDataOptions
from geo_sokoban_pipeline.config.geo3k_training import Geo3kMultiTurnTrainOptions, Geo3kTrainOptions
from geo_sokoban_pipeline.config.grpo import (
    EvaluatePipelineOptions,
    RolloutPipelineOptions,
    TrainOptions,
    UpdatePipelineOptions,
)
from geo_sokoban_pipeline.config.sokoban import SokobanDataOptions
from geo_sokoban_pipeline.config.study import CheckPipelineOptions, ControlOptions, StudyDefinition, StudyOptions
from geo_sokoban_pipeline.masking import holds_password, mask_addresses

_DATA = "Data; runs with the same settings share them."
# A run id, or a training pipeline and a run id.
_RUN_NAME = r"^(train_[a-z0-9_]+/)?[A-Za-z0-9][A-Za-z0-9._-]*$"
_TRAIN = "A run, from policy to report."
_ROLLOUT = "Collecting without training."
_UPDATE = "Training on stored trajectories."
_EVALUATE = "Evaluation of any checkpoint."
_CONTROL = "More imitation instead of GRPO, to compare with."
_CHECK = "Pre-flight of a training run."


def split_runs(value: Any) -> Any:
    """Names of runs from a list, or from one text with `+` between them, as `default+seed2`."""
    return value.split("+") if isinstance(value, str) else value


RunNames = Annotated[list[Annotated[str, StringConstraints(pattern=_RUN_NAME)]], BeforeValidator(split_runs)]


class TrackingOptions(StrictModel):
    """Where MLflow records a run. It only watches: whatever goes wrong there is a warning, never the end of a run."""

    enabled: bool = Field(True, description="Off: MLflow is not even imported.")
    uri: str | None = Field(
        None,
        description="MLflow tracking URI, without a password. None: the sqlite file mlflow.db in the data root.",
    )
    experiment: str = Field("geo_sokoban_pipeline", min_length=1, description="Name of the MLflow experiment.")
    sample_trajectories: bool = Field(True, description="Record the run's newest trajectory file as an artifact.")

    @model_validator(mode="after")
    def _check(self) -> TrackingOptions:
        if self.uri is not None and holds_password(self.uri):
            raise ValueError(
                f"uri={mask_addresses(self.uri)}: a password must not stand there, because the URI is stored with the "
                "run. For http set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD; for a database give the user "
                "alone, and the password by a file such as ~/.pgpass."
            )
        return self


class ProjectParameters(StrictModel):
    """The root of `conf/*/parameters*`."""

    run_id: RunId = Field("default", description="Folder of the run below every {run} path; only by --params.")
    fresh: bool = Field(False, description="Clear the run's folders before it starts; only by --params.")
    runs: RunNames = Field(
        default_factory=list,
        description="Runs that `compare` puts side by side: run ids of train_sokoban, or `train_geo3k/<run id>`; the "
        "others are compared with the first one.",
    )
    seed: Seed = Field(0, description="Seed of the run: initial weights, warm start, rollouts. Not of the data.")
    tracking: TrackingOptions = TrackingOptions()
    sokoban: SokobanDataOptions = Field(default_factory=SokobanDataOptions, description=_DATA)
    geo3k: Geo3kDataOptions = Field(default_factory=Geo3kDataOptions, description=_DATA)
    geo3k_multi_turn: Geo3kMultiTurnDataOptions = Field(default_factory=Geo3kMultiTurnDataOptions, description=_DATA)
    train_sokoban: TrainOptions = Field(default_factory=TrainOptions, description=_TRAIN)
    train_geo3k: Geo3kTrainOptions = Field(default_factory=Geo3kTrainOptions, description=_TRAIN)
    train_geo3k_multi_turn: Geo3kMultiTurnTrainOptions = Field(
        default_factory=Geo3kMultiTurnTrainOptions, description=_TRAIN
    )
    rollout_sokoban: RolloutPipelineOptions = Field(default_factory=RolloutPipelineOptions, description=_ROLLOUT)
    rollout_geo3k: RolloutPipelineOptions = Field(default_factory=RolloutPipelineOptions, description=_ROLLOUT)
    rollout_geo3k_multi_turn: RolloutPipelineOptions = Field(
        default_factory=RolloutPipelineOptions, description=_ROLLOUT
    )
    update_sokoban: UpdatePipelineOptions = Field(default_factory=UpdatePipelineOptions, description=_UPDATE)
    update_geo3k: UpdatePipelineOptions = Field(default_factory=UpdatePipelineOptions, description=_UPDATE)
    update_geo3k_multi_turn: UpdatePipelineOptions = Field(default_factory=UpdatePipelineOptions, description=_UPDATE)
    evaluate_sokoban: EvaluatePipelineOptions = Field(default_factory=EvaluatePipelineOptions, description=_EVALUATE)
    evaluate_geo3k: EvaluatePipelineOptions = Field(default_factory=EvaluatePipelineOptions, description=_EVALUATE)
    evaluate_geo3k_multi_turn: EvaluatePipelineOptions = Field(
        default_factory=EvaluatePipelineOptions, description=_EVALUATE
    )
    control_sokoban: ControlOptions = Field(default_factory=ControlOptions, description=_CONTROL)
    control_geo3k: ControlOptions = Field(default_factory=ControlOptions, description=_CONTROL)
    control_geo3k_multi_turn: ControlOptions = Field(default_factory=ControlOptions, description=_CONTROL)
    check_sokoban: CheckPipelineOptions = Field(default_factory=CheckPipelineOptions, description=_CHECK)
    check_geo3k: CheckPipelineOptions = Field(default_factory=CheckPipelineOptions, description=_CHECK)
    check_geo3k_multi_turn: CheckPipelineOptions = Field(default_factory=CheckPipelineOptions, description=_CHECK)
    study: StudyOptions = Field(default_factory=StudyOptions, description="Which study runs, and how.")
    study_default: StudyDefinition = Field(default_factory=StudyDefinition, description="The recipe of `make run`.")
    study_from_zero: StudyDefinition = Field(
        default_factory=StudyDefinition, description="GRPO after imitation of random legal moves."
    )
    study_long: StudyDefinition = Field(default_factory=StudyDefinition, description="One long run.")
    study_geo3k: StudyDefinition = Field(
        default_factory=lambda: StudyDefinition(task="geo3k"), description="The recipe of `make run-geo3k`."
    )
    study_geo3k_multi_turn: StudyDefinition = Field(
        default_factory=lambda: StudyDefinition(task="geo3k_multi_turn"),
        description="The recipe of `make run-geo3k-multi-turn`.",
    )
