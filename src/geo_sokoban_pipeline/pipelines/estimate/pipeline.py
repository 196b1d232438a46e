"""estimate_<task>: what a run of train_<task> would take on GPUs of some kind, by count, without hub or weights."""

from __future__ import annotations

from kedro.pipeline import Node, Pipeline

from geo_sokoban_pipeline.parameters import section_model
from geo_sokoban_pipeline.pipelines.estimate import nodes
from geo_sokoban_pipeline.pipelines.options import typed


def create_pipeline(task: str) -> Pipeline:
    """The estimate of one task: one node, which prints what it stores."""
    taken = {"options": f"train_{task}", "settings": f"estimate_{task}"}
    models = {argument: section_model(name) for argument, name in taken.items()}
    return Pipeline(
        [
            Node(
                typed(nodes.estimate_run, {"task": task}, **models),
                inputs={argument: f"params:{name}" for argument, name in taken.items()},
                outputs="estimate",
                name="estimate_run",
            )
        ],
        namespace=f"estimate_{task}",
        parameters={f"params:{name}": f"params:{name}" for name in taken.values()},
        tags=["estimate"],
    )
