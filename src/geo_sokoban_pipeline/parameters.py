"""All parameters of the project: one model whose fields are the top-level names.

An unknown section is an error, so a misspelt one never falls silently back to its defaults. Sections of tasks are made
from the registered tasks: `<task>`, `<kind>_<task>`, and `study_<name>` of their studies.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from pydantic import Field, create_model, model_validator

from geo_sokoban_pipeline.config import study
from geo_sokoban_pipeline.config.base import RunId, RunNames, Seed, Setting, StrictModel, with_defaults
from geo_sokoban_pipeline.config.credit import CreditPipelineOptions
from geo_sokoban_pipeline.config.grpo import (
    BrowsePipelineOptions,
    EvaluatePipelineOptions,
    ExportPipelineOptions,
    ForkPipelineOptions,
    RegradePipelineOptions,
    ReportPipelineOptions,
    RolloutPipelineOptions,
    ScorePipelineOptions,
    SourceOptions,
    UpdatePipelineOptions,
)
from geo_sokoban_pipeline.config.study import AuditOptions
from geo_sokoban_pipeline.masking import holds_password, mask_addresses
from geo_sokoban_pipeline.tasks import TASKS

# By kind of pipeline on a stored run: the model of its section, and what it is for.
ON_RUNS: dict[str, tuple[type[StrictModel], str]] = {
    "rollout": (RolloutPipelineOptions, "Collecting without training."),
    "update": (UpdatePipelineOptions, "Training on stored trajectories."),
    "evaluate": (EvaluatePipelineOptions, "Evaluation of any checkpoint."),
    "regrade": (RegradePipelineOptions, "Stored episodes under another reward or other advantages."),
    "export": (ExportPipelineOptions, "Stored episodes as training data for other trainers."),
    "report": (ReportPipelineOptions, "The report of a run, also while it goes on."),
    "browse": (BrowsePipelineOptions, "The site of stored episodes."),
    "score": (ScorePipelineOptions, "Scores of the tokens of stored episodes."),
    "fork": (ForkPipelineOptions, "The worth of turns of stored episodes, by continuing from the states around them."),
    "credit": (CreditPipelineOptions, "Estimated advantages against the true ones."),
    "control": (study.ControlOptions, "More SFT instead of GRPO, to compare with."),
}


class TrackingOptions(StrictModel):
    """Where MLflow records a run, and Weights & Biases. Their errors are warnings and never end a run."""

    enabled: bool = Field(True, description="Off: neither MLflow nor wandb is even imported.")
    uri: str | None = Field(
        None,
        description="MLflow tracking URI, without a password. None: the sqlite file mlflow.db in the data root. "
        "Artifacts lie beside a sqlite file; other servers choose their place.",
    )
    experiment: str = Field("geo_sokoban_pipeline", min_length=1, description="Name of the MLflow experiment.")
    sample_trajectories: bool = Field(True, description="Record the run's newest trajectory file as an artifact.")
    system_metrics: float = Field(
        15.0, ge=0, le=86_400, description="Time between records of CPU, memory, disk, network and GPUs. 0: none."
    )
    wandb: bool = Field(
        True,
        description="Record in Weights & Biases as well, where WANDB_API_KEY is set and the package wandb is "
        "installed; the project is `experiment`.",
    )

    @model_validator(mode="after")
    def _check(self) -> TrackingOptions:
        if self.uri is not None and holds_password(self.uri):
            raise ValueError(
                f"uri={mask_addresses(self.uri)}: a password must not stand there, because the URI is stored with the "
                "run. For http set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD; for a database give the user "
                "alone, and the password by a file such as ~/.pgpass."
            )
        return self


class _General(StrictModel):
    run_id: RunId = Field("default", description="Folder of the run below every {run} path; only by --params.")
    fresh: bool = Field(
        False,
        description="Replace the stored run, which is deleted after the new one's first checkpoint. Only by --params.",
    )
    runs: RunNames = Field(
        default_factory=list,
        description="Runs that `compare` puts side by side: run ids of the default task, or `train_<task>/<run id>`; "
        "the others are compared with the first one.",
    )
    seed: Seed = Field(0, description="Seed of the run: initial weights, warm start, rollouts. Not of the data.")
    tracking: TrackingOptions = TrackingOptions()
    audit: AuditOptions = Field(default_factory=AuditOptions, description="Audits of stored runs.")


def _studies() -> dict[str, Any]:
    """Sections of the studies; each may override the data of its task, under the task's name."""
    overrides: dict[str, Any] = {
        name: (dict[str, Any], Field(default_factory=dict, description=f"Overrides of the data of {task.title}."))
        for name, task in TASKS.items()
    }
    further = create_model("EvaluationSetOptions", __base__=study.EvaluationSetOptions, **overrides)
    sets = (tuple[further, ...], Field((), description="Further sets of evaluation prompts."))
    definition = create_model("StudyDefinition", __base__=study.StudyDefinition, **overrides, evaluations=sets)
    for model in (further, definition):
        model.__doc__, model.TASKS = model.__base__.__doc__, tuple(TASKS)
    named = {
        name: (task, meaning)
        for task in TASKS.values()
        for name, meaning in {**task.studies, **task.comparisons}.items()
    }
    options = with_defaults(study.StudyOptions, {"name": Setting("default", choices=("default", *named))})
    sections: dict[str, Any] = {
        "study": (options, Field(default_factory=options, description="Which study runs, and how."))
    }
    for name, (task, meaning) in named.items():
        own = with_defaults(definition, {"task": Setting(task.name, choices=tuple(TASKS))})
        sections[f"study_{name}"] = (own, Field(default_factory=own, description=meaning))
    return sections


def _sections() -> dict[str, Any]:
    """Sections of the tasks: their data, their runs, and what works on stored runs."""
    data, train, others = {}, {}, {}
    for name, task in TASKS.items():
        about = "Data; runs with the same settings share them."
        data[name] = (task.data_config, Field(default_factory=task.data_config, description=about))
        model = task.train_config
        train[task.run] = (model, Field(default_factory=model, description="A run, from policy to report."))
    for kind, (general, about) in ON_RUNS.items():
        for name, task in TASKS.items():
            own = with_defaults(general, {"source": {"run": task.run}})
            others[f"{kind}_{name}"] = (own, Field(default_factory=own, description=about))
    for name in TASKS:
        check = study.CheckPipelineOptions
        others[f"check_{name}"] = (check, Field(default_factory=check, description="Pre-flight of a training run."))
        counted, about = study.EstimatePipelineOptions, "Seconds, memory and price of a training run by count."
        others[f"estimate_{name}"] = (counted, Field(default_factory=counted, description=about))
    return {**data, **train, **others, **_studies()}


if TYPE_CHECKING:
    _Sections = _General
else:
    _Sections = create_model("_Sections", __base__=_General, **_sections())


class ProjectParameters(_Sections):
    """The root of `conf/*/parameters*`."""


def section_model(name: str) -> type[Any]:
    """Model of a section, such as `study_default` or `train_sokoban`."""
    model: Any = ProjectParameters.model_fields[name].annotation
    assert isinstance(model, type), "every section is annotated with its model"
    return model


def source_of(run: str, parameters: ProjectParameters) -> SourceOptions | None:
    """The stored run that a pipeline works on; None: it takes none."""
    return cast("SourceOptions | None", getattr(getattr(parameters, run, None), "source", None))
