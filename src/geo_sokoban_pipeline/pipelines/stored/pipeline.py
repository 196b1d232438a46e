"""rollout_<task>, update_<task>, evaluate_<task>, regrade_<task>, export_<task>, report_<task>, browse_<task>,
score_<task>, fork_<task>, credit_<task>: either half of the loop, the evaluation, other rewards, training data for
others, the report, the site, scores of tokens, the worth of turns, and estimators against it, from what a run has
stored.

They take their settings from `train_<task>` and write into namespaces of their own.
"""

from __future__ import annotations

from kedro.pipeline import Node, Pipeline

from geo_sokoban_pipeline.config.credit import CreditPipelineOptions
from geo_sokoban_pipeline.config.grpo import (
    BrowsePipelineOptions,
    EvaluatePipelineOptions,
    ExportPipelineOptions,
    ForkPipelineOptions,
    RegradePipelineOptions,
    ReportPipelineOptions,
    RolloutPipelineOptions,
    ScorePipelineOptions,
    UpdatePipelineOptions,
)
from geo_sokoban_pipeline.pipelines.options import typed
from geo_sokoban_pipeline.pipelines.stored import nodes
from geo_sokoban_pipeline.tasks import task_of

_OPTIONS = ["params:options", "params:train", "params:seed"]


def create_pipelines(task: str) -> dict[str, Pipeline]:
    """The pipelines on a stored run of a task, by their kind."""
    train = task_of(task).train_config
    steps = {
        # Collect trajectories with a stored policy, no training.
        "rollout": (
            Node(
                typed(nodes.collect_trajectories, options=RolloutPipelineOptions, settings=train),
                inputs=["source_policy", "source_prompts", "prompts", *_OPTIONS],
                outputs=["trajectories", "metrics"],
                name="collect_trajectories",
                tags=["gpu"],
            ),
        ),
        # Train on stored trajectories, no environment, no engine.
        "update": (
            Node(
                typed(nodes.update_on_stored, options=UpdatePipelineOptions, settings=train),
                inputs=["source_trajectories", "source_before", "source_start", *_OPTIONS],
                outputs=["metrics", "checkpoints"],
                name="update_on_stored",
                tags=["grpo", "gpu"],
            ),
        ),
        # Evaluate any stored policy against the baselines.
        "evaluate": (
            Node(
                typed(nodes.evaluate_stored, options=EvaluatePipelineOptions, settings=train),
                inputs=["source_policy", "source_prompts", "prompts", "eval_prompts", "identity", *_OPTIONS],
                outputs=["eval_summary", "eval_trajectories"],
                name="evaluate_stored",
                tags=["evaluation", "gpu"],
            ),
            Node(
                typed(nodes.report_evaluation, options=EvaluatePipelineOptions, settings=train),
                inputs=["eval_summary", "eval_trajectories", "commands", "params:run_id", *_OPTIONS],
                outputs="report",
                name="report_evaluation",
                tags=["report"],
            ),
        ),
        # Grade stored episodes again, without a model.
        "regrade": (
            Node(
                typed(nodes.regrade_stored, options=RegradePipelineOptions, settings=train),
                inputs=["source_episodes", "source_start", "source_prompts", "prompts", *_OPTIONS[:2]],
                outputs=["trajectories", "metrics"],
                name="regrade_stored",
            ),
        ),
        # Write stored episodes as training data for other trainers, and upload them on request.
        "export": (
            Node(
                typed(nodes.export_episodes, options=ExportPipelineOptions),
                inputs=["source_episodes", "source_outputs", "params:options"],
                outputs="export",
                name="export_episodes",
            ),
            Node(
                typed(nodes.push_export, options=ExportPipelineOptions),
                inputs=["export", "export_folder", "params:options"],
                outputs=None,
                name="push_export",
            ),
        ),
        # Write the report of a stored run, or of one that goes on.
        "report": (
            Node(
                typed(nodes.report_stored, options=ReportPipelineOptions),
                inputs=["source_root", "params:options"],
                outputs="report",
                name="report_stored",
                tags=["report"],
            ),
        ),
        # Write the site of stored episodes.
        "browse": (
            Node(
                typed(nodes.browse_stored, options=BrowsePipelineOptions),
                inputs=["source_root", "params:options"],
                outputs="site",
                name="browse_stored",
                tags=["report"],
            ),
        ),
        # Score the tokens of stored episodes under any stored policy.
        "score": (
            Node(
                typed(nodes.score_stored, options=ScorePipelineOptions, settings=train),
                inputs=["source_outputs", "source_policy", *_OPTIONS[:2]],
                outputs=["token_scores", "occlusion"],
                name="score_stored",
                tags=["gpu"],
            ),
        ),
        # Measure the worth of stored turns by continuations.
        "fork": (
            Node(
                typed(nodes.fork_stored, options=ForkPipelineOptions, settings=train),
                inputs=[
                    *("source_outputs", "source_versions", "source_policy", "source_prompts"),
                    *("prompts", "validation_prompts", "eval_prompts", "turn_values_state", *_OPTIONS),
                ],
                outputs=["turn_values"],
                name="fork_stored",
                tags=["evaluation", "gpu"],
            ),
        ),
        # Compare estimated advantages with the true ones, on groups of the same prompts.
        "credit": (
            Node(
                typed(nodes.collect_trajectories, options=CreditPipelineOptions, settings=train),
                inputs=["source_policy", "source_prompts", "prompts", *_OPTIONS],
                outputs=["trajectories", "metrics"],
                name="resample_groups",
                tags=["gpu"],
            ),
            Node(
                typed(nodes.fork_resampled, options=CreditPipelineOptions, settings=train),
                inputs=["trajectories", "source_policy", "prompts", "turn_values_state", "params:run_id", *_OPTIONS],
                outputs=["turn_values"],
                name="fork_resampled",
                tags=["evaluation", "gpu"],
            ),
            Node(
                typed(nodes.measure_estimators, options=CreditPipelineOptions, settings=train),
                inputs=["trajectories", "turn_values", "source_policy", *_OPTIONS],
                outputs=["credit", "report"],
                name="measure_estimators",
                tags=["evaluation", "report"],
            ),
        ),
    }
    return {kind: _instance(kind, task, *own) for kind, own in steps.items()}


def _instance(kind: str, task: str, *steps: Node) -> Pipeline:
    """Steps in the namespace `<kind>_<task>`: they read data of the task, and a stored run by entries of their own."""
    run = f"{kind}_{task}"
    used = {name for node in steps for name in node.inputs}
    data = {"prompts", "validation_prompts", "eval_prompts", "identity"}
    further = ("commands", "export_folder", "turn_values_state")
    own = {name for name in used if name.startswith("source_") or name in further}
    parameters = {
        "params:options": f"params:{run}",
        "params:train": f"params:train_{task}",
        "params:seed": "params:seed",
        "params:run_id": "params:run_id",
    }
    return Pipeline(
        steps,
        namespace=run,
        inputs={name: f"{task}.{name}" for name in used & data} | {name: f"{run}.{name}" for name in own},
        parameters={name: value for name, value in parameters.items() if name in used},
        tags=[kind],
    )
