"""data_<task>: the task's own steps from a source to prompts, in the namespace `<task>`; all runs share the data."""

from __future__ import annotations

from functools import partial, update_wrapper

from kedro.pipeline import Node, Pipeline

from geo_sokoban_pipeline.console import track
from geo_sokoban_pipeline.envs.base import DataStep, Task
from geo_sokoban_pipeline.pipelines.hub_rows import hub_reader
from geo_sokoban_pipeline.pipelines.options import typed


def create_pipeline(task: Task) -> Pipeline:
    """The data pipeline of a task."""
    return Pipeline(
        [_node(task, step) for step in task.data_steps],
        namespace=task.name,
        parameters={"params:options": f"params:{task.name}"},
        tags=["data"],
    )


def _node(task: Task, step: DataStep) -> Node:
    offered = {"hub": hub_reader(task.name), "track": track}
    function = partial(step.function, **{name: offered[name] for name in step.asks})
    update_wrapper(function, getattr(step.function, "func", step.function))  # Kedro shows its name and source
    outputs = list(step.outputs) if len(step.outputs) > 1 else step.outputs[0]
    return Node(typed(function), inputs=[*step.inputs, "params:options"], outputs=outputs, name=step.name)
