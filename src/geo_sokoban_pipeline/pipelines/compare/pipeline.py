"""compare: what several training runs have stored, side by side on one page."""

from __future__ import annotations

from kedro.pipeline import Node, Pipeline

from geo_sokoban_pipeline.pipelines.compare import nodes
from geo_sokoban_pipeline.pipelines.options import typed


def create_pipeline() -> Pipeline:
    """The pipeline, in the namespace `compare`."""
    return Pipeline(
        [
            Node(
                typed(nodes.compare_runs),
                inputs=["runs", "params:runs"],
                outputs="report",
                name="compare_runs",
                tags=["report"],
            )
        ],
        namespace="compare",
        inputs={"runs": "runs"},
        parameters={"params:runs": "params:runs"},
        tags=["compare"],
    )
