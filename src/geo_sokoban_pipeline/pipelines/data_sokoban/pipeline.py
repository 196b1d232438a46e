"""data_sokoban: read levels, make prompts of them, report what there is."""

from __future__ import annotations

from kedro.pipeline import Node, Pipeline

from geo_sokoban_pipeline.pipelines.data_sokoban.nodes import make_prompts, read_levels, report_data

PROMPT_TABLES = ["prompts", "validation_prompts", "eval_prompts"]


def create_pipeline() -> Pipeline:
    """The pipeline in the namespace `sokoban`, whose data all runs share."""
    return Pipeline(
        [
            Node(
                read_levels, inputs="params:options", outputs=["raw_levels", "rejected", "reading"], name="read_levels"
            ),
            Node(make_prompts, inputs=["raw_levels", "params:options"], outputs=PROMPT_TABLES, name="make_prompts"),
            Node(
                report_data,
                inputs=["raw_levels", "rejected", "reading", *PROMPT_TABLES, "params:options"],
                outputs="data_report",
                name="report_data",
            ),
        ],
        namespace="sokoban",
        parameters={"params:options": "params:sokoban"},
        tags=["data"],
    )
