"""study_<task>: plan the runs of a study, run them side by side, read what they stored, write tables and figures."""

from __future__ import annotations

from kedro.pipeline import Node, Pipeline

from geo_sokoban_pipeline.pipelines.study import nodes

STUDIES = ("default", "from_zero", "long")


def create_pipeline(task: str) -> Pipeline:
    """The study pipeline of a task, in the namespace `study_<task>`."""
    run = f"study_{task}"
    definitions = [f"params:study_{name}" for name in STUDIES]
    template = Pipeline(
        [
            Node(
                nodes.plan_study,
                inputs=["command", "params:study", *definitions, "params:train", "params:data", "params:tracking"],
                outputs="plan",
                name="plan_study",
            ),
            Node(nodes.run_study, inputs=["command", "plan", "params:fresh"], outputs="finished", name="run_study"),
            Node(nodes.collect_study, inputs=["finished"], outputs="results", name="collect_study"),
            Node(nodes.write_docs, inputs=["plan", "results"], outputs=None, name="write_docs"),
        ]
    )
    same = ["params:study", *definitions, "params:fresh", "params:tracking"]
    return Pipeline(
        template,
        namespace=run,
        inputs={"command": "command"},
        parameters={"params:train": f"params:train_{task}", "params:data": f"params:{task}"}
        | {name: name for name in same},
        tags=["study"],
    )
