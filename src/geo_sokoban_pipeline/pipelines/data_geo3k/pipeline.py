"""data_geo3k and data_geo3k_multi_turn: read problems, check them, make prompts of them, report what there is."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, update_wrapper
from typing import Any

from kedro.pipeline import Node, Pipeline

from geo_sokoban_pipeline.pipelines.data_geo3k import nodes

PROMPT_TABLES = ["prompts", "validation_prompts", "eval_prompts"]


def create_pipeline(task: str) -> Pipeline:
    """The pipeline of `geo3k` or `geo3k_multi_turn`, in the namespace of that name, whose data all runs share."""

    def of_task(function: Callable[..., Any]) -> Callable[..., Any]:
        """The node's function, told the section of the parameters for its messages."""
        return update_wrapper(partial(function, section=task), function)

    return Pipeline(
        [
            Node(of_task(nodes.read_problems), "params:options", "raw_problems", name="read_problems"),
            Node(
                of_task(nodes.check_problems),
                ["raw_problems", "params:options"],
                ["problem_index", "rejected"],
                name="check_problems",
            ),
            Node(
                of_task(nodes.make_prompts),
                ["raw_problems", "problem_index", "params:options"],
                PROMPT_TABLES,
                name="make_prompts",
            ),
            Node(
                of_task(nodes.report_data),
                ["problem_index", "rejected", "params:options"],
                "data_report",
                name="report_data",
            ),
        ],
        namespace=task,
        parameters={"params:options": f"params:{task}"},
        tags=["data"],
    )
