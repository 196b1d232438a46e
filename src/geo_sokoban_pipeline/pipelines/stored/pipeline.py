"""rollout_<task>, update_<task>, evaluate_<task>: either half of the loop, and the evaluation, on what a run has
stored.

They take their settings from `train_<task>` and write into namespaces of their own.
"""

from __future__ import annotations

from kedro.pipeline import Node, Pipeline

from geo_sokoban_pipeline.pipelines.stored import nodes

_OPTIONS = ["params:options", "params:train", "params:seed"]


def create_rollout_pipeline(task: str) -> Pipeline:
    """Collect trajectories with a stored policy, no training."""
    node = Node(
        nodes.collect_trajectories,
        inputs=["runs", "prompts", *_OPTIONS],
        outputs=["trajectories", "metrics"],
        name="collect_trajectories",
    )
    return _instance([node], "rollout", task, ["prompts"])


def create_update_pipeline(task: str) -> Pipeline:
    """Train on stored trajectories, no environment, no engine."""
    node = Node(
        nodes.update_on_stored,
        inputs=["runs", *_OPTIONS],
        outputs=["metrics", "checkpoints"],
        name="update_on_stored",
    )
    return _instance([node], "update", task, [])


def create_evaluate_pipeline(task: str) -> Pipeline:
    """Evaluate any stored policy against the baselines."""
    evaluate = Node(
        nodes.evaluate_stored,
        inputs=["runs", "prompts", "eval_prompts", "identity", *_OPTIONS],
        outputs=["eval_summary", "eval_trajectories"],
        name="evaluate_stored",
    )
    report = Node(
        nodes.report_evaluation,
        inputs=["eval_summary", "eval_trajectories", "commands", "params:run_id", *_OPTIONS],
        outputs="report",
        name="report_evaluation",
    )
    return _instance([evaluate, report], "evaluate", task, ["prompts", "eval_prompts", "identity"])


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
        | {name: entry for name, entry in {"runs": "runs", "commands": f"{run}.commands"}.items() if name in used},
        parameters={name: value for name, value in parameters.items() if name in used},
        tags=[kind],
    )
