"""study_<task>: plan the runs of a study, run them side by side, read what they stored, write tables and figures."""

from __future__ import annotations

from functools import partial, update_wrapper

from kedro.pipeline import Node, Pipeline

from geo_sokoban_pipeline.pipelines.study import nodes

# The studies of each pipeline by name; the first one is its default.
STUDIES = {"study_sokoban": ("default", "from_zero", "long"), "study_geo3k": ("geo3k", "geo3k_multi_turn")}


def create_pipeline(run: str) -> Pipeline:
    """The study pipeline of a name in `STUDIES`, in the namespace of that name."""
    plan = update_wrapper(partial(nodes.plan_study, studies=STUDIES[run]), nodes.plan_study)
    template = Pipeline(
        [
            Node(plan, inputs=["command", "parameters"], outputs="plan", name="plan_study"),
            Node(nodes.run_study, inputs=["command", "plan", "params:fresh"], outputs="finished", name="run_study"),
            Node(nodes.collect_study, inputs=["finished"], outputs="results", name="collect_study"),
            Node(nodes.write_docs, inputs=["plan", "results"], outputs=None, name="write_docs"),
        ]
    )
    return Pipeline(
        template,
        namespace=run,
        inputs={"command": "command"},
        parameters={"params:fresh": "params:fresh"},
        tags=["study"],
    )
