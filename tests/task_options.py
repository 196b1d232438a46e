"""Option models with the tasks' defaults: of Sokoban under the names of the models, of geometry under its own."""

from __future__ import annotations

from typing import Any

from geo_sokoban_pipeline.config.grpo import TrainOptions as _TrainOptions
from geo_sokoban_pipeline.envs.geo3k.task import GEO3K, GEO3K_MULTI_TURN
from geo_sokoban_pipeline.envs.sokoban.task import SOKOBAN
from geo_sokoban_pipeline.parameters import ProjectParameters, section_model


def _inside(model: Any, path: str) -> Any:
    for name in path.split("."):
        model = model.model_fields[name].annotation
    return model


TrainOptions: type[_TrainOptions] = SOKOBAN.train_config
PolicyOptions = _inside(TrainOptions, "policy")
TinyPolicyOptions = _inside(TrainOptions, "policy.tiny")
ExpertOptions = _inside(TrainOptions, "warm_start.teacher")
EnvOptions = _inside(TrainOptions, "env")
RewardOptions = _inside(TrainOptions, "reward")
ControlOptions = _inside(ProjectParameters, "control_sokoban")
StudyOptions = _inside(ProjectParameters, "study")
StudyDefinition = section_model("study_default")
Geo3kTrainOptions = GEO3K.train_config
Geo3kMultiTurnTrainOptions = GEO3K_MULTI_TURN.train_config
GeometryExpertOptions = _inside(Geo3kTrainOptions, "warm_start.teacher")
GeometryTinyOptions = _inside(Geo3kTrainOptions, "policy.tiny")
GeometryEvaluationOptions = _inside(Geo3kTrainOptions, "evaluation")
