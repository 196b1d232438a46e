"""The pipelines by name, written out: nothing is found by looking around, nothing heavy is imported.

Every command of Kedro calls `register_pipelines`, so what it imports must be light: torch, transformers, MLflow and
their like are imported inside the functions that need them.
"""

from __future__ import annotations

from kedro.pipeline import Pipeline


def register_pipelines() -> dict[str, Pipeline]:
    """All pipelines of the project; `__default__` trains on Sokoban."""
    from geo_sokoban_pipeline.pipelines import check, compare, control, data_geo3k, data_sokoban, stored, study, train
    from geo_sokoban_pipeline.tasks import TASKS

    geometry = ("geo3k", "geo3k_multi_turn")
    data = {"sokoban": data_sokoban.create_pipeline(), **{task: data_geo3k.create_pipeline(task) for task in geometry}}
    named: dict[str, Pipeline] = {f"data_{task}": data[task] for task in TASKS}
    for task in TASKS:
        named |= {
            f"train_{task}": data[task] + train.create_pipeline(task),
            f"rollout_{task}": data[task] + stored.create_rollout_pipeline(task),
            f"update_{task}": stored.create_update_pipeline(task),
            f"evaluate_{task}": stored.create_evaluate_pipeline(task),
            f"check_{task}": check.create_pipeline(task),
            f"control_{task}": control.create_pipeline(task),
        }
    named |= {name: study.create_pipeline(name) for name in study.STUDIES}
    named["compare"] = compare.create_pipeline()
    return {**named, "__default__": named["train_sokoban"]}
