"""rollout_<task>, update_<task>, evaluate_<task>, regrade_<task>, export_<task>, report_<task>, browse_<task>,
score_<task>: either half of the loop, the evaluation, other rewards, training data for others, the report, the site,
and scores of tokens, from what a run has stored.

They take their settings from `train_<task>` and write into namespaces of their own.
"""

from __future__ import annotations

from kedro.pipeline import Node, Pipeline

from geo_sokoban_pipeline.config.grpo import (
    BrowsePipelineOptions,
    EvaluatePipelineOptions,
    ExportPipelineOptions,
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


def create_rollout_pipeline(task: str) -> Pipeline:
    """Collect trajectories with a stored policy, no training."""
    node = Node(
        typed(nodes.collect_trajectories, options=RolloutPipelineOptions, settings=task_of(task).train_config),
        inputs=["source_policy", "source_prompts", "prompts", *_OPTIONS],
        outputs=["trajectories", "metrics"],
        name="collect_trajectories",
        tags=["gpu"],
    )
    return _instance([node], "rollout", task, ["prompts"])


def create_update_pipeline(task: str) -> Pipeline:
    """Train on stored trajectories, no environment, no engine."""
    node = Node(
        typed(nodes.update_on_stored, options=UpdatePipelineOptions, settings=task_of(task).train_config),
        inputs=["source_trajectories", "source_before", "source_start", *_OPTIONS],
        outputs=["metrics", "checkpoints"],
        name="update_on_stored",
        tags=["grpo", "gpu"],
    )
    return _instance([node], "update", task, [])


def create_evaluate_pipeline(task: str) -> Pipeline:
    """Evaluate any stored policy against the baselines."""
    evaluate = Node(
        typed(nodes.evaluate_stored, options=EvaluatePipelineOptions, settings=task_of(task).train_config),
        inputs=["source_policy", "source_prompts", "prompts", "eval_prompts", "identity", *_OPTIONS],
        outputs=["eval_summary", "eval_trajectories"],
        name="evaluate_stored",
        tags=["evaluation", "gpu"],
    )
    report = Node(
        typed(nodes.report_evaluation, options=EvaluatePipelineOptions, settings=task_of(task).train_config),
        inputs=["eval_summary", "eval_trajectories", "commands", "params:run_id", *_OPTIONS],
        outputs="report",
        name="report_evaluation",
        tags=["report"],
    )
    return _instance([evaluate, report], "evaluate", task, ["prompts", "eval_prompts", "identity"])


def create_regrade_pipeline(task: str) -> Pipeline:
    """Grade stored episodes again, without a model."""
    node = Node(
        typed(nodes.regrade_stored, options=RegradePipelineOptions, settings=task_of(task).train_config),
        inputs=["source_episodes", "source_start", "source_prompts", "prompts", "params:options", "params:train"],
        outputs=["trajectories", "metrics"],
        name="regrade_stored",
    )
    return _instance([node], "regrade", task, ["prompts"])


def create_export_pipeline(task: str) -> Pipeline:
    """Write stored episodes as training data for other trainers, and upload them on request."""
    node = Node(
        typed(nodes.export_episodes, options=ExportPipelineOptions),
        inputs=["source_episodes", "params:options"],
        outputs="export",
        name="export_episodes",
    )
    push = Node(
        typed(nodes.push_export, options=ExportPipelineOptions),
        inputs=["export", "export_folder", "params:options"],
        outputs=None,
        name="push_export",
    )
    return _instance([node, push], "export", task, [])


def create_report_pipeline(task: str) -> Pipeline:
    """Write the report of a stored run, or of one that goes on."""
    node = Node(
        typed(nodes.report_stored, options=ReportPipelineOptions),
        inputs=["source_root", "params:options"],
        outputs="report",
        name="report_stored",
        tags=["report"],
    )
    return _instance([node], "report", task, [])


def create_browse_pipeline(task: str) -> Pipeline:
    """Write the site of stored episodes."""
    node = Node(
        typed(nodes.browse_stored, options=BrowsePipelineOptions),
        inputs=["source_outputs", "params:options"],
        outputs="site",
        name="browse_stored",
        tags=["report"],
    )
    return _instance([node], "browse", task, [])


def create_score_pipeline(task: str) -> Pipeline:
    """Score the tokens of stored episodes under any stored policy."""
    node = Node(
        typed(nodes.score_stored, options=ScorePipelineOptions, settings=task_of(task).train_config),
        inputs=["source_outputs", "source_policy", "params:options", "params:train"],
        outputs=["token_scores", "occlusion"],
        name="score_stored",
        tags=["gpu"],
    )
    return _instance([node], "score", task, [])


def _instance(nodes_: list[Node], kind: str, task: str, data: list[str]) -> Pipeline:
    run = f"{kind}_{task}"
    used = {name for node in nodes_ for name in node.inputs}
    parameters = {
        "params:options": f"params:{run}",
        "params:train": f"params:train_{task}",
        "params:seed": "params:seed",
        "params:run_id": "params:run_id",
    }
    return Pipeline(
        nodes_,
        namespace=run,
        inputs={name: f"{task}.{name}" for name in data}
        | {
            name: f"{run}.{name}"
            for name in used
            if name.startswith("source_") or name in ("commands", "export_folder")
        },
        parameters={name: value for name, value in parameters.items() if name in used},
        tags=[kind],
    )
