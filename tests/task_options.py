"""Option models with the tasks' defaults: of Sokoban under the names of the models, of geometry under its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from geo_sokoban_pipeline.config.grpo import TrainOptions as _TrainOptions
from geo_sokoban_pipeline.envs.geo3k.task import GEO3K, GEO3K_MULTI_TURN
from geo_sokoban_pipeline.envs.sokoban.task import SOKOBAN
from geo_sokoban_pipeline.parameters import ProjectParameters, section_model
from geo_sokoban_pipeline.tasks import task_of

CONF = Path(__file__).parents[1] / "conf" / "base" / "parameters"


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


def conf_options(task: str) -> Any:
    """Options of `conf/base/parameters/train_<task>.yml`, in one process."""
    text = (CONF / f"train_{task}.yml").read_text(encoding="utf-8")
    return task_of(task).train_config.model_validate({**yaml.safe_load(text)[f"train_{task}"], "processes": 1})
