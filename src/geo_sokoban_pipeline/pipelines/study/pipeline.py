"""study_<task>: plan the runs of a study, run them side by side, read what they stored, write tables and figures."""

from __future__ import annotations

from kedro.pipeline import Node, Pipeline

from geo_sokoban_pipeline.envs.base import Task
from geo_sokoban_pipeline.parameters import section_model
from geo_sokoban_pipeline.pipelines.options import typed
from geo_sokoban_pipeline.pipelines.study import nodes
from geo_sokoban_pipeline.tasks import TASKS


def create_pipeline(task: Task) -> Pipeline:
    """The study pipeline of a task, in the namespace `study_<task>`."""
    studies = (*task.studies, *task.comparisons, *task.further_studies)
    sections = [
        *(f"study_{name}" for name in studies),
        *(name for one in TASKS.values() for name in (one.name, one.run)),
    ]
    taken = {"options": "study", "tracking": "tracking", **{name: name for name in sections}}  # section by argument
    # No models for `<task>`: they would become models for all nodes, and data steps and notebooks take plain values.
    models = {argument: None if section in TASKS else section_model(section) for argument, section in taken.items()}
    return Pipeline(
        [
            Node(
                typed(nodes.plan_study, {"studies": studies}, **models),
                inputs={"command": "command", **{argument: f"params:{name}" for argument, name in taken.items()}},
                outputs="plan",
                name="plan_study",
            ),
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
        ],
        namespace=f"study_{task.name}",
        inputs={"command": "command"},
        parameters={f"params:{name}": f"params:{name}" for name in ("fresh", *taken.values())},
        tags=["study"],
    )
