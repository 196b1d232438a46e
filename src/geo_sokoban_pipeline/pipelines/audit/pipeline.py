"""audit_<task>: whether everything that a run of train_<task> has stored keeps its guarantees."""

from __future__ import annotations

from kedro.pipeline import Node, Pipeline

from geo_sokoban_pipeline.config.study import AuditOptions
from geo_sokoban_pipeline.pipelines.audit import nodes
from geo_sokoban_pipeline.pipelines.options import typed

_STORED = ("trajectories", "eval_trajectories", "held_out_trajectories", "checkpoints", "policy")


def create_pipeline(task: str) -> Pipeline:
    """The audit of one task's run; the findings are stored before they are judged."""
    parameters = ("params:run_id", "params:audit")
    return Pipeline(
        [
            Node(
                typed(nodes.audit_stored, {"task": task}, options=AuditOptions),
                inputs=[*_STORED, "runs", *parameters],
                outputs="audit",
                name="audit_stored",
                tags=["gpu"],
            ),
            Node(typed(nodes.judge_stored), inputs="audit", outputs=None, name="judge_stored"),
        ],
        namespace=f"audit_{task}",
        inputs={"runs": "runs", **{name: f"train_{task}.{name}" for name in _STORED}},
        parameters={name: name for name in parameters},
        tags=["audit"],
    )
