"""train_<task>: data → policy → warm start → GRPO loop → evaluation → audit → report, on one screen."""

from __future__ import annotations

from typing import Any

from kedro.pipeline import Node, Pipeline
from kedro.pipeline.preview_contract import MermaidPreview

from geo_sokoban_pipeline.pipelines.audit.nodes import audit_training
from geo_sokoban_pipeline.pipelines.options import typed
from geo_sokoban_pipeline.pipelines.train import nodes
from geo_sokoban_pipeline.tasks import task_of

_OPTIONS = ["params:options", "identity", "params:seed"]
# The loop inside `train_grpo`, which Kedro's graph cannot hold.
_LOOP = """graph TD
  state[(resume_state)] --> collect[collect: draw prompts, roll out]
  collect --> score[score: advantages, filter]
  score -- too little signal --> collect
  score --> update[update: optimizer steps]
  update --> sync[sync weights]
  sync --> validate[validate, where due]
  validate --> commit[commit: trajectories, metrics, checkpoint]
  commit --> collect
  commit --> done[COMPLETE]
"""


def create_pipeline(task: str) -> Pipeline:
    """The training pipeline of a task, in the namespace `train_<task>`; the task's data pipeline comes before it."""
    run, model = f"train_{task}", task_of(task).train_config
    shared = ("prompts", "validation_prompts", "eval_prompts", "data_report", "identity")
    return Pipeline(
        [
            Node(
                typed(nodes.prepare_policy),
                inputs=["base_policy_state", "params:policy", "params:seed"],
                outputs="base_policy",
                name="prepare_policy",
                tags=["policy"],
            ),
            Node(
                typed(nodes.warm_start, options=model),
                inputs=["base_policy", "prompts", "validation_prompts", "policy_state", *_OPTIONS],
                outputs="policy",
                name="warm_start",
                tags=["sft", "gpu"],
            ),
            Node(
                typed(nodes.train_grpo, options=model),
                inputs=["policy", "prompts", "validation_prompts", "resume_state", *_OPTIONS],
                # The checkpoint is saved last: its manifest commits the iteration.
                outputs=["trajectories", "eval_trajectories", "metrics", "checkpoints"],
                name="train_grpo",
                tags=["grpo", "gpu"],
                preview_fn=draw_loop,
            ),
            Node(
                typed(nodes.select_policy),
                inputs=["checkpoints", "policy", "params:evaluation", "params:task"],
                outputs="final_policy",
                name="select_policy",
                tags=["policy"],
            ),
            Node(
                typed(nodes.evaluate_policies, options=model),
                inputs=["policy", "final_policy", "prompts", "eval_prompts", *_OPTIONS],
                outputs=["eval_summary", "held_out_trajectories"],
                name="evaluate_policies",
                tags=["evaluation", "gpu"],
            ),
            Node(
                typed(audit_training),
                inputs=[
                    "trajectories",
                    "eval_trajectories",
                    "held_out_trajectories",
                    "prompts",
                    "validation_prompts",
                    "eval_prompts",
                    "data_report",
                    "checkpoints",
                    "policy",
                    "params:run_id",
                    "params:task",
                ],
                outputs="audit",
                name="audit_training",
                tags=["report"],
            ),
            Node(
                typed(nodes.write_report, options=model),
                inputs=[
                    "metrics",
                    "eval_summary",
                    "policy",
                    "held_out_trajectories",
                    "trajectories",
                    "eval_trajectories",
                    "data_report",
                    "episodes",
                    "audit",
                    "audited",
                    "commands",
                    "browsed",
                    "params:run_id",
                    "params:options",
                    "params:data",
                    "params:seed",
                ],
                outputs="report",
                name="write_report",
                tags=["report"],
            ),
        ],
        namespace=run,
        inputs={"browsed": f"browse_{task}.browsed", "audited": f"audit_{task}.audited"}
        | {name: f"{task}.{name}" for name in shared}
        | {
            name: f"{run}.{name}"
            for name in ("base_policy_state", "policy_state", "resume_state", "episodes", "commands")
        },
        parameters={
            "params:options": f"params:{run}",
            **{f"params:{part}": f"params:{run}.{part}" for part in ("policy", "evaluation", "task")},
            "params:data": f"params:{task}",
            "params:seed": "params:seed",
            "params:run_id": "params:run_id",
        },
        tags=["train"],
    )


def draw_loop() -> Any:
    """Mermaid preview of one iteration, which kedro-viz shows at its node."""
    return MermaidPreview(content=_LOOP)
