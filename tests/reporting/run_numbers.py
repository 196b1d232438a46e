"""Numbers of a run that learns: metrics, an evaluation summary, an account of the data. All are made up, and fixed."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from geo_sokoban_pipeline.envs.metrics import wilson_interval


def make_metrics(iterations: int = 200) -> list[dict[str, Any]]:
    """Rows of a run that learns."""
    generator = np.random.default_rng(3)
    rows = []
    for at in range(iterations):
        skill = 0.4 + 0.26 * (1 - math.exp(-at / 60))
        noise = float(generator.normal())
        row: dict[str, Any] = {
            "iteration": at,
            "policy_version": at,
            "rollout/success_rate": min(1.0, skill + 0.03 * noise),
            "rollout/raw_reward": 1.2 * skill - 0.2 + 0.04 * noise,
            "rollout/response_len/mean": 26 - 6 * skill + noise,
            "rollout/trained_ratio": 0.45 + 0.05 * noise,
            "rollout/truncated_ratio": 0.0,
            "train/entropy_loss": 0.21 - 0.1 * skill + 0.004 * noise,
            "train/ppo_kl": 0.004 + 0.0005 * abs(noise),
            "train/pg_clipfrac": 0.01 + 0.002 * abs(noise),
            "train/grad_norm": 1.5 + 0.3 * noise,
            "train/train_rollout_logprob_abs_diff": 3e-7 + 1e-8 * noise,
            "perf/rollout_time": 0.7 + 0.05 * noise,
            "perf/engine_time": 0.6 + 0.04 * noise,
            "perf/env_time": 0.02,
            "perf/update_time": 0.6 + 0.03 * noise,
            "perf/step_time": 1.33 + 0.08 * noise,
            "perf/save_time": 0.05,
            "perf/write_time": 0.02,
            "rollout/episodes": 256.0,
            "train/steps": 3.0,
            "perf/tokens_per_second": 9000 + 300 * noise,
        }
        if at == 0 or (at + 1) % 25 == 0:
            for mode, shift in (("sampled", 0.0), ("greedy", -0.02)):
                solved = round(160 * (skill + shift))
                low, high = wilson_interval(solved, 160)
                prefix = f"eval/{'validation' if at else 'start'}/{mode}"
                row |= {f"{prefix}_solve_rate": solved / 160, f"{prefix}_low": low, f"{prefix}_high": high}
                row[f"{prefix}_mean_return"] = 1.2 * skill - 0.2
            row["perf/eval_time"] = 1.4
            row["perf/step_time"] += 1.4
        rows.append(row)
    return rows


def make_summary(iterations: int = 200) -> dict[str, Any]:
    """An evaluation in which GRPO helped, of the policy after so many iterations."""
    shares = {
        ("warm_start", "sampled"): [0.99, 0.86, 0.61, 0.35, 0.24, 0.12, 0.11, 0.01],
        ("warm_start", "greedy"): [0.97, 0.8, 0.5, 0.24, 0.12, 0.05, 0.04, 0.0],
        ("final", "sampled"): [1.0, 0.94, 0.9, 0.69, 0.57, 0.62, 0.53, 0.2],
        ("final", "greedy"): [1.0, 0.95, 0.88, 0.68, 0.55, 0.6, 0.5, 0.18],
        ("final_blank", "sampled"): [0.5, 0.3, 0.1, 0.05, 0.02, 0.0, 0.0, 0.0],
        ("random", "-"): [0.6, 0.3, 0.08, 0.04, 0.01, 0.0, 0.0, 0.0],
        ("random_legal", "-"): [0.75, 0.4, 0.15, 0.08, 0.03, 0.02, 0.0, 0.0],
        ("solver", "-"): [1.0] * 8,
        ("teacher (direct)", "-"): [1.0, 0.8, 0.5, 0.3, 0.2, 0.1, 0.1, 0.0],
    }
    rows = [_summary_row(policy, mode, values) for (policy, mode), values in shares.items()]
    rows[2]["pass_at_k"] = {"1": 0.681, "2": 0.77}
    return {
        "task": "sokoban",
        "prompts": 640,
        "layouts": 57,
        "move_limit": 10,
        "policies": ["warm_start", "final"],
        "checkpoints": {
            "warm_start": {"iteration": None, "policy_version": 0, "hash": "a0" * 16},
            "final": {"iteration": iterations - 1, "policy_version": iterations, "hash": "b1" * 16},
        },
        "rows": rows,
    }


def _summary_row(policy: str, mode: str, shares: list[float]) -> dict[str, Any]:
    lengths = []
    for length, share in enumerate(shares, start=1):
        low, high = wilson_interval(round(80 * share), 80)
        cell = {"length": length, "episodes": 80, "solved": round(80 * share)}
        lengths.append(cell | {"solve_rate": cell["solved"] / 80, "low": low, "high": high})
    solved = sum(cell["solved"] for cell in lengths)
    low, high = wilson_interval(solved, 640)
    return {
        "policy": policy,
        "mode": mode,
        "episodes": 640,
        "solved": solved,
        "solve_rate": solved / 640,
        "low": low,
        "high": high,
        "mean_return": 1.3 * solved / 640 - 0.2,
        "steps_over_optimal": None if policy == "final_blank" else 1.0 + 0.2 * (1 - solved / 640),
        "invalid_share": 0.001 if mode != "-" else 0.0,
        "by_length": lengths,
        "pass_at_k": None,
    }


def make_data_report() -> dict[str, Any]:
    """What `sokoban.data_report` holds."""
    counts = {"train": (6144, 173), "validation": (256, 28), "eval": (640, 57)}
    splits = {
        name: {
            "levels": levels,
            "distinct_levels": levels,
            "layouts": layouts,
            "by_length": {str(length): levels // 8 for length in range(1, 9)},
        }
        for name, (levels, layouts) in counts.items()
    }
    return {
        "source": "generate",
        "rows_read": 7040,
        "rows_rejected": 0,
        "rejected_reasons": {},
        "levels": 7040,
        "unsolved_within_limit": 0,
        "setting_yields": {str(length): 3000 for length in range(1, 9)},
        "split_rule": "layout",
        "split_note": "No wall layout (up to symmetry) occurs in two splits.",
        "splits": splits,
        "overlaps": {"layouts": 0, "levels": 0},
    }
