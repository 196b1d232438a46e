"""The pipelines by name, written out: nothing is found by looking around, nothing heavy is imported.

Every command of Kedro calls `register_pipelines`, so what it imports must be light: torch, transformers, MLflow and
their like are imported inside the functions that need them.
"""

from __future__ import annotations

import warnings

from kedro.pipeline import Pipeline


def register_pipelines() -> dict[str, Pipeline]:
    """All pipelines of the project, the same for every registered task; `__default__` trains on the default one."""
    with warnings.catch_warnings():
        # A node of one namespace that reads another's dataset (`sokoban.prompts`, shared by all runs) has a dot in an
        # input's name however it is mapped; Kedro warns of that once per process. Names typed by hand inside a template
        # would be wrong at once, since they would not exist.
        warnings.filterwarnings("ignore", message=r"One or more dataset names contain '\.'", module=r"kedro\.pipeline")
        # The drawing of the loop at `train_grpo` is the only use of this feature; where Kedro drops it, a test fails.
        warnings.filterwarnings("ignore", message=r"The 'preview_fn' feature is experimental")
        return _create_pipelines()


def _create_pipelines() -> dict[str, Pipeline]:
    from geo_sokoban_pipeline.pipelines import audit, check, compare, control, data, estimate, stored, study, train
    from geo_sokoban_pipeline.tasks import DEFAULT, TASKS

    named: dict[str, Pipeline] = {f"data_{name}": data.create_pipeline(task) for name, task in TASKS.items()}
    for task in TASKS:
        named |= {
            f"train_{task}": named[f"data_{task}"] + train.create_pipeline(task),
            **{f"{kind}_{task}": pipeline for kind, pipeline in stored.create_pipelines(task).items()},
            f"check_{task}": check.create_pipeline(task),
            f"estimate_{task}": estimate.create_pipeline(task),
            f"audit_{task}": audit.create_pipeline(task),
            f"control_{task}": control.create_pipeline(task),
        }
        named[f"rollout_{task}"] += named[f"data_{task}"]
    named |= {f"study_{name}": study.create_pipeline(task) for name, task in TASKS.items() if task.studies}
    named["compare"] = compare.create_pipeline()
    return {**named, "__default__": named[f"train_{DEFAULT}"]}
