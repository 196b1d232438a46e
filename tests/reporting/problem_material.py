"""Episodes and numbers of a geometry run without a model: drawn problems, answered by the expert through the real
environments. The same arguments always give the same inputs.
"""

from __future__ import annotations

import json
import random
from functools import cache
from typing import Any

import numpy as np

from builders import PAD
from geo_sokoban_pipeline.envs.base import make_expert
from geo_sokoban_pipeline.envs.geo3k.answer_env import build_env as build_answer_env
from geo_sokoban_pipeline.envs.geo3k.config import DATA_OPTIONS
from geo_sokoban_pipeline.envs.geo3k.data import summarise_data
from geo_sokoban_pipeline.envs.geo3k.data_steps import check_problems, make_prompts, read_problems
from geo_sokoban_pipeline.envs.geo3k.env import build_env as build_tool_env
from geo_sokoban_pipeline.envs.geo3k.evaluation import record_answer
from geo_sokoban_pipeline.envs.images import encode_png, read_data_uri
from geo_sokoban_pipeline.evaluation.rollouts import read_finished, summary_row
from geo_sokoban_pipeline.evaluation.summary import evaluate_baselines
from geo_sokoban_pipeline.grpo import group_advantages
from geo_sokoban_pipeline.reporting.report import ReportInputs
from geo_sokoban_pipeline.tasks import task_of
from geo_sokoban_pipeline.trajectories.types import Trajectory, Turn
from reporting.material import lazily
from task_options import GeometryExpertOptions

PADS = 12  # tokens of a 128×96 image at patch 16, merge 2
RESPONSE_TOKENS = 4
COUNTS = {"train": 40, "validation": 10, "eval": 20}


@cache
def make_data(task: str) -> tuple[tuple[dict[str, Any], ...], dict[str, Any]]:
    """Training prompts of a task and the data report."""
    options: Any = DATA_OPTIONS[task].model_validate({"counts": COUNTS})
    raw = read_problems(options, task)
    index, _ = check_problems(raw, options, task)
    rows = tuple(make_prompts(raw, index, options, task)[0])
    return rows, summarise_data(index.to_dict("records"), [], options)


def answer(task: str, row: dict[str, Any], skill: float, name: str, group: int, sample: int = 0) -> Trajectory:
    """One episode; `skill` is the share of answers that are the label, the others follow a rule at random."""
    turns = 3 if task == "geo3k_multi_turn" else 1
    env: Any = (
        build_answer_env(row, {}) if turns == 1 else build_tool_env(row, {"max_turns": turns, "feedback": "brief"})
    )
    generator = random.Random(f"{name}/{group}/{sample}")
    expert = make_expert(GeometryExpertOptions(name="solver", noise=1.0 - skill), row)
    env.reset()
    said = [Turn(role="user", text=row["prompt"], token_start=0, token_end=PADS + 3, image_indices=[0])]
    ids, mask, responses, done = [1, *[PAD] * PADS, 2, 3], [0] * (PADS + 3), [], False
    while not done and len(responses) < turns:
        responses.append(expert.respond(env, generator))
        observation, done, info = env.step(responses[-1])
        start, ids, mask = len(ids), [*ids, *range(10, 10 + RESPONSE_TOKENS)], [*mask, *[1] * RESPONSE_TOKENS]
        action = ",".join(info.get("parsed_actions") or []) or None
        said.append(
            Turn(role="assistant", text=responses[-1], token_start=start, token_end=len(ids), action=action, info=info)
        )
        if not done:
            ids, mask = [*ids, 4, 5], [*mask, 0, 0]
            text = observation["obs_str"]
            said.append(Turn(role="user", text=text, token_start=len(ids) - 2, token_end=len(ids)))
    env.finalize(responses, "completed")
    trained, metrics = np.array(mask, np.int8), env.final_metrics()
    image = np.asarray(read_data_uri(row["images"][0], max_bytes=1 << 20, max_pixels=1 << 20))
    return Trajectory(
        trajectory_id=f"{name}/g{group:03d}/s{sample:02d}",
        task=task,
        task_id=row["problem_hash"],
        iteration=0,
        group_index=group,
        sample_index=sample,
        policy_version=0,
        seed=group,
        sampling=json.dumps({"engine": "transformers", "greedy": "greedy" in name}),
        status="completed",
        finish_reason="stop",
        prompt_length=said[0].token_end,
        token_ids=np.array(ids, np.int32),
        loss_mask=trained,
        rollout_log_probs=np.where(trained == 1, -0.5, 0.0).astype(np.float32),
        weight_spans=[(0, 0, len(ids))],
        turns=said,
        images=[encode_png(image)],
        image_grid_thw=[(1, 6, 8)],
        label=row["answer"],
        difficulty=row["family"],
        response=" ".join(responses),
        reward=metrics["success"],
        metrics={**metrics, "turns": float(len(responses))},
    )


@cache
def make_run(task: str) -> ReportInputs:
    """Inputs of the report of a run in which GRPO helped."""
    rows, report = make_data(task)
    options = task_of(task).train_config.model_validate({})
    played, summary_rows = {}, []
    for number, (policy, skill) in enumerate({"warm_start": 0.3, "final": 0.8}.items()):
        episodes = []
        for mode in ("sampled", "greedy"):
            found = [answer(task, row, skill, f"{policy}/{mode}", at) for at, row in enumerate(rows)]
            records = [
                record_answer(read_finished(task_of(task), one, row)) for one, row in zip(found, rows, strict=True)
            ]
            summary_rows.append(summary_row(task_of(task), records, policy=policy, mode=mode))
            episodes += found
        played[f"iter={number:05d}/part-000"] = lazily(episodes)
    blind = [
        record_answer(read_finished(task_of(task), answer(task, row, 0.0, "blank", at), row))
        for at, row in enumerate(rows)
    ]
    summary_rows += [
        summary_row(task_of(task), blind, policy=f"final{suffix}", mode="sampled") for suffix in ("_blank", "_shuffled")
    ]
    summary = {
        "task": task,
        "prompts": len(rows),
        **task_of(task).describe_prompts(list(rows), options),
        "policies": ["warm_start", "final"],
        "rows": summary_rows + evaluate_baselines(list(rows), list(rows), options, 0),
    }
    trained = [answer(task, rows[group], 0.5, "train/sampled", group, at) for group in range(4) for at in range(4)]
    groups = [episode.group_index for episode in trained]
    advantages = group_advantages([episode.reward or 0.0 for episode in trained], groups)
    for episode, advantage in zip(trained, advantages, strict=True):
        episode.advantage, episode.trained = float(advantage), True
    metrics = [_iteration(number, task) for number in range(3)]
    return ReportInputs(
        task=task,
        run=f"train_{task}",
        run_id="default",
        metrics=metrics,
        summary=summary,
        warm_start=[{"step": 10, "loss": 1.0, "validation_loss": 1.1, "seconds": 2.0}],
        held_out=played,
        trained={"iter=00000/part-000": lazily(trained)},
        data_report=report,
        parameters={"seed": 0, task: {"instruction": "question"}},
        versions={"torch": "2.13.0"},
    )


def _iteration(number: int, task: str) -> dict[str, Any]:
    row = {
        "iteration": number,
        "rollout/success_rate": 0.2 + 0.1 * number,
        "rollout/raw_reward": 0.2 + 0.1 * number,
        "rollout/answered": 0.9,
        "perf/step_time": 1.0,
        "eval/validation/sampled_solve_rate": 0.3,
        "eval/validation/sampled_low": 0.2,
        "eval/validation/sampled_high": 0.4,
        "eval/validation/sampled_first_attempt_rate": 0.25,
    }
    return row | ({"rollout/first_attempt_rate": 0.2, "rollout/tool_calls/mean": 1.5} if "multi" in task else {})
