"""check_<task>: what a run of train_<task> with these parameters would meet, before it begins."""

from __future__ import annotations

from kedro.pipeline import Node, Pipeline

from geo_sokoban_pipeline.parameters import section_model
from geo_sokoban_pipeline.pipelines.check import nodes
from geo_sokoban_pipeline.pipelines.options import typed


def create_pipeline(task: str) -> Pipeline:
    """The pre-flight of one task; the table is stored before it is judged."""
    # Without a model for `<task>`: it would become one for all nodes, and data steps and notebooks take plain values.
    sections = ("tracking", f"train_{task}", f"check_{task}")
    taken = {name: name for name in ("run_id", "fresh", "seed")} | {"data": task} | {name: name for name in sections}
    return Pipeline(
        [
            Node(
                typed(nodes.check_run, {"task": task}, **{name: section_model(name) for name in sections}),
                inputs={"runs": "runs", **{argument: f"params:{name}" for argument, name in taken.items()}},
                outputs="table",
                name="check_run",
                tags=["gpu"],
            ),
            Node(typed(nodes.judge_table), inputs="table", outputs=None, name="judge_table"),
        ],
        namespace=f"check_{task}",
        inputs={"runs": "runs"},
        parameters={f"params:{name}": f"params:{name}" for name in taken.values()},
        tags=["check"],
    )
