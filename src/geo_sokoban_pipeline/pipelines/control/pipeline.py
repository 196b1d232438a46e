"""control_<task>: the warm start of a finished run continues for as long as its GRPO took, then is evaluated."""

from __future__ import annotations

from kedro.pipeline import Node, Pipeline
from pydantic import BaseModel

from geo_sokoban_pipeline.config.study import ControlOptions
from geo_sokoban_pipeline.pipelines.control import nodes
from geo_sokoban_pipeline.pipelines.options import typed
from geo_sokoban_pipeline.tasks import task_of


def create_pipeline(task: str) -> Pipeline:
    """The control of a task, in the namespace `control_<task>`; it takes its settings from `train_<task>`."""
    run = f"control_{task}"
    models: dict[str, type[BaseModel]] = {"control": ControlOptions, "options": task_of(task).train_config}
    return Pipeline(
        [
            Node(
                typed(nodes.plan_control, **models),
                inputs=[
                    "source_start",
                    "source_progress",
                    "source_episodes",
                    "prompts",
                    "validation_prompts",
                    "budget_state",
                    "params:options",
                    "params:train",
                    "identity",
                    "params:seed",
                ],
                outputs="budget",
                name="plan_control",
                tags=["sft", "gpu"],
            ),
            Node(
                typed(nodes.continue_sft, **models),
                inputs=[
                    "source_start",
                    "source_episodes",
                    "prompts",
                    "validation_prompts",
                    "policy_state",
                    "budget",
                    "params:options",
                    "params:train",
                    "params:seed",
                ],
                outputs="policy",
                name="continue_sft",
                tags=["sft", "gpu"],
            ),
            Node(
                typed(nodes.evaluate_control, **models),
                inputs=["policy", "eval_prompts", "params:options", "params:train", "identity", "params:seed"],
                outputs="eval_summary",
                name="evaluate_control",
                tags=["evaluation", "gpu"],
            ),
        ],
        namespace=run,
        inputs={name: f"{task}.{name}" for name in ("prompts", "validation_prompts", "eval_prompts", "identity")}
        | {name: f"{run}.{name}" for name in ("policy_state", "budget_state")}
        | {name: f"{run}.{name}" for name in ("source_start", "source_progress", "source_episodes")},
        parameters={
            "params:options": f"params:{run}",
            "params:train": f"params:train_{task}",
            "params:seed": "params:seed",
        },
        tags=["control"],
    )
