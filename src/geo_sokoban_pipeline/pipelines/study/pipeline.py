"""study_<task>: plan the runs of a study, run them side by side, read what they stored, write tables and figures."""

from __future__ import annotations

from functools import partial, update_wrapper

from kedro.pipeline import Node, Pipeline

from geo_sokoban_pipeline.envs.base import Task
from geo_sokoban_pipeline.pipelines.options import typed
from geo_sokoban_pipeline.pipelines.study import nodes


def create_pipeline(task: Task) -> Pipeline:
    """The study pipeline of a task, in the namespace `study_<task>`."""
    plan = update_wrapper(partial(nodes.plan_study, studies=(*task.studies, *task.further_studies)), nodes.plan_study)
    template = Pipeline(
        [
            Node(typed(plan), inputs=["command", "parameters"], outputs="plan", name="plan_study"),
            Node(
                typed(nodes.run_study),
                inputs=["command", "plan", "params:fresh"],
                outputs="finished",
                name="run_study",
                tags=["gpu"],
            ),
            Node(typed(nodes.collect_study), inputs=["finished"], outputs="results", name="collect_study"),
            Node(
                typed(nodes.write_docs), inputs=["plan", "results"], outputs="docs", name="write_docs", tags=["report"]
            ),
        ]
    )
    return Pipeline(
        template,
        namespace=f"study_{task.name}",
        inputs={"command": "command"},
        parameters={"params:fresh": "params:fresh"},
        tags=["study"],
    )
