"""A small made study: numbers chosen so that every branch of the tables and bars is taken."""

from __future__ import annotations

from typing import Any


def row(player: str, solved: int, mode: str = "sampled", episodes: int = 640) -> dict[str, Any]:
    half = episodes // 2
    return {
        "player": player,
        "mode": mode,
        "solved": solved,
        "episodes": episodes,
        "by_length": [[1, min(solved, half), half], [2, max(0, solved - half), episodes - half]],
    }


def make_seed(seed: int, final: int, minutes: float | None = 7.5, greedy: int = 400) -> dict[str, Any]:
    return {
        "seed": seed,
        "run_id": f"default-seed{seed}",
        "minutes": minutes,
        "cpu_seconds": {"warm_start": 100.0, "grpo": 200.0, "control_teacher": 201.5 - 10 * seed},
        "steps": {"warm_start": 1000, "grpo": 140, "control_teacher": 2000},
        "memory_gb": [],
        "rows": [
            row("warm_start", 256),
            row("warm_start", 224, "greedy"),
            row("final", final),
            row("final", greedy, "greedy"),
            row("final_blank", 60),
            row("random", 90, "-"),
            row("random_legal", 128, "-"),
            row("teacher", 250, "-"),
            row("teacher_patient", 300, "-"),
            row("solver", 640, "-"),
            row("control_teacher", 280),
            row("control_teacher", 240, "greedy"),
        ],
        "curves": {
            "warm_start": [[50.0, 0.2, 0.15], [100.0, 0.4, 0.35]],
            "grpo": [[0.0, 0.4, 0.35], [100.0, 0.5, 0.5], [200.0, 0.6 + 0.05 * seed, 0.6]],
            "control_teacher": [[110.0, 0.42, 0.36], [201.5, 0.44, 0.37]],
        },
    }


BARS: list[dict[str, Any]] = [
    {"player": "warm_start", "mode": "sampled", "at_least": 20.0, "apart": False},
    {"player": "final", "mode": "sampled", "over": "warm_start", "at_least": 20.0, "apart": True},
    {"player": "final", "mode": "greedy", "over": "warm_start", "at_least": 15.0, "apart": False},
    {"player": "final", "mode": "sampled", "over": "random_legal", "at_least": 25.0, "apart": False},
    {"player": "final_blank", "mode": "sampled", "over": "random_legal", "at_most": 5.0, "apart": False},
    {"player": "final", "mode": "sampled", "over": "control_optimal", "at_least": 0.0, "apart": False},
]


def make_results(
    *seeds: dict[str, Any], name: str = "default", sets: list[dict[str, Any]] | None = None
) -> dict[str, Any]:
    return {
        "study": name,
        "task": "sokoban",
        "title": "The default run",
        "chosen_on": [],
        "max_minutes": 8.0,
        "least_spent": 0.97,
        "max_growth": None,
        "bars": BARS,
        "machine": {
            "workers": 2,
            "other_workers": 2,
            "cores": [2],
            "processor": ["A 7"],
            "machine": ["x86_64"],
            "python": ["3.11.7"],
            "torch": ["2.13.0"],
            "transformers": ["5.23.0"],
            "version": ["0.1.0"],
            "commit": ["abc", None],
        },
        "made_with": {},
        "levels": {
            "count": 640,
            "layouts": 57,
            "shared_layouts": 0,
            "move_limit": 10,
            "lengths": [1, 2],
            "height": 6,
            "width": 6,
            "boxes": 1,
            "validation_count": 160,
        },
        "teacher": "direct",
        "seeds": list(seeds),
        "sets": sets or [],
    }


def answer_row(player: str, solved: int, first: int, mode: str = "sampled", episodes: int = 640) -> dict[str, Any]:
    half = episodes // 2
    families = [["arc", min(solved, half), half], ["linear_pair", max(0, solved - half), episodes - half]]
    return {
        "player": player,
        "mode": mode,
        "solved": solved,
        "episodes": episodes,
        "first_attempts": first,
        "called_share": 0.9,
        "plausible_share": 0.95,
        "breakdowns": {"family": families, "answer_form": [["integer", solved, episodes]]},
    }


def make_answer_results(turns: int = 3) -> dict[str, Any]:
    """The same for geometry: one seed, with the scoring tool or without."""
    seed = make_seed(0, 0)
    seed["rows"] = [
        answer_row("warm_start", 320, 128),
        answer_row("final", 560, 420),
        answer_row("final", 570, 430, "greedy"),
        answer_row("final_blank", 40, 20),
        answer_row("final_shuffled", 50, 30),
        answer_row("control_teacher", 330, 130),
        answer_row("most_frequent", 30, 30, "-"),
        answer_row("teacher", 384, 128, "-"),
        answer_row("label", 640, 640, "-"),
    ]
    bars = [
        {"player": "final", "mode": "sampled", "over": "warm_start", "at_least": 10.0, "apart": True},
        {"player": "final", "mode": "sampled", "over": "warm_start", "at_least": 50.0, "measure": "first_attempt"},
    ]
    levels = {"count": 640, "families": 5, "answers": 93, "turn_limit": turns, "difficulty": "tiny"}
    return make_results(seed, name="geo3k_multi_turn") | {
        "task": "geo3k_multi_turn" if turns > 1 else "geo3k",
        "title": "Geometry",
        "teacher": "plausible",
        "bars": bars,
        "levels": levels | {"shared_problems": 0, "validation_count": 256},
    }
