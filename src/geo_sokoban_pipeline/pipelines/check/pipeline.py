"""check_<task>: what a run of train_<task> with these parameters would meet, before it begins."""

from __future__ import annotations

from functools import partial, update_wrapper

from kedro.pipeline import Node, Pipeline

from geo_sokoban_pipeline.pipelines.check import nodes
from geo_sokoban_pipeline.pipelines.options import typed


def create_pipeline(task: str) -> Pipeline:
    """The pre-flight of one task; the table is stored before it is judged."""
    check = update_wrapper(partial(nodes.check_run, task=task), nodes.check_run)
    return Pipeline(
        [
            Node(typed(check), inputs=["runs", "parameters"], outputs="table", name="check_run", tags=["gpu"]),
            Node(typed(nodes.judge_table), inputs="table", outputs=None, name="judge_table"),
        ],
        namespace=f"check_{task}",
        inputs={"runs": "runs"},
        tags=["check"],
    )
