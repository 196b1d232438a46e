"""Words of Sokoban in reports and studies: levels, moves, optimal lengths."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from geo_sokoban_pipeline.envs.report import DataTable, Summary, TaskReport, compare_blind, study_cell
from geo_sokoban_pipeline.formats import count, find_baseline, percent, plural, write_rate

if TYPE_CHECKING:
    from geo_sokoban_pipeline.trajectories.types import Turn

_ARROWS = {"up": "↑", "down": "↓", "left": "←", "right": "→"}


class SokobanReport(TaskReport):
    """See `TaskReport`."""

    agents = {
        "random": ("random moves", "random"),
        "random_legal": ("random legal moves", "legal"),
        "solver": ("solver (optimal)", "solver"),
    }
    cluster = ("wall layout", "wall layouts")
    solves = "solves"
    tiles = ("random_legal", "solver")
    rivals = ("random_legal",)
    difficulty = "optimal length"
    unit = "moves"
    equal = ", up to symmetry"
    step = "move"
    lost = "deadlocked"
    no_action = "no valid move"
    chosen = "For each optimal length: the first solved level, and the first unsolved one while there is room."
    study_baselines = ("random", "random_legal", "teacher", "teacher_patient", "solver")
    study_lines = (("random_legal", "legal"), ("teacher_patient", "training"))
    study_breakdowns = (("optimal length", "by_length"),)
    study_rows = {**TaskReport.study_rows, "random_legal": "random legal moves"}

    def evaluated_on(self, summary: Summary) -> str:
        """Levels and their wall layouts."""
        number = summary.get("prompts")
        return self.name_clusters(plural(number, "held-out level"), number, summary.get("layouts"))

    def compare(self, summary: Summary, policies: Sequence[str]) -> list[str]:
        """Random legal moves, the solver, the move limit, blank images."""
        legal, solver = find_baseline(summary, "random_legal"), find_baseline(summary, "solver")
        parts = []
        if legal:
            parts.append(f"Random legal moves solve {write_rate(legal)}")
        if solver:
            parts.append(f"{'a' if parts else 'A'}n exact solver {percent(solver['solve_rate'])}")
        limit = summary.get("move_limit")
        within = f", all within {plural(limit, 'move')}" if limit else ""
        found = [f"{', '.join(parts)}{within}."] if parts else []
        return found + compare_blind(summary, policies, "it solves")

    def shorten_actions(self, turns: Sequence[Turn]) -> str:
        """An arrow for each move."""
        return "".join(_ARROWS.get(action, action) for turn in turns for action in (turn.action or "·").split(","))

    def last_image(self, image: bytes, turn: Turn) -> bytes | None:
        """The board after the last moves."""
        from geo_sokoban_pipeline.envs.sokoban.drawing import play_moves

        return play_moves(image, [move for move in (turn.action or "").split(",") if move])

    def is_lost(self, image: bytes) -> bool:
        """Whether some box can no longer reach a target."""
        from geo_sokoban_pipeline.envs.sokoban.drawing import read_board

        found = read_board(image)
        return found is not None and found[0].is_lost

    def name_kind(self, difficulty: str) -> str:
        """`optimal: 3 moves`."""
        return f"optimal: {plural(int(difficulty), 'move')}"

    def reward_parts(self, names: Sequence[str], args: Mapping[str, Any]) -> list[str]:
        """Of mean and sum of the turn rewards the one that enters the reward; neither the total nor the distances."""
        unused = "turn_reward_avg" if args.get("aggregate") == "sum" else "turn_reward_total"
        return [name for name in names if name not in (unused, "dist0", "dist1", "total_reward")]

    def data_notes(self, report: Mapping[str, Any]) -> list[str]:
        """Levels that the solver gave up, and how many levels the setting has."""
        found = []
        if report.get("unsolved_within_limit"):
            given_up = count(report["unsolved_within_limit"])
            found.append(f"{given_up} levels have no known optimal length (limit of the solver).")
        if levels := sum((report.get("setting_yields") or {}).values()):
            found.append(f"The setting has {count(levels)} distinct levels in total.")
        return found

    def data_table(self, splits: Mapping[str, Mapping[str, Any]]) -> DataTable:
        """Levels, layouts, and levels by optimal length."""
        lengths = {key for split in splits.values() for key in split.get("by_length") or {}}
        ordered = sorted(lengths, key=lambda key: (not key.isdigit(), key.zfill(9)))
        lines = [
            (
                name,
                [count(split.get(key)) for key in ("levels", "distinct_levels", "layouts")]
                + [count((split.get("by_length") or {}).get(key, 0)) for key in ordered],
            )
            for name, split in splits.items()
        ]
        return DataTable(["levels", "distinct", "layouts", *ordered], lines, [], "levels by optimal length", 3)

    def study_entry(self, summary: Summary, data: Mapping[str, Any]) -> dict[str, Any]:
        """Levels, layouts, lengths, sizes."""
        lengths = [cell["length"] for cell in summary["rows"][0]["by_length"]]
        return {
            "count": summary["prompts"],
            "layouts": summary["layouts"],
            "move_limit": summary["move_limit"],
            "lengths": [min(lengths), max(lengths)] if lengths else [],
            "per_length": sorted({cell["episodes"] for cell in summary["rows"][0]["by_length"]}),
            "height": data["height"],
            "width": data["width"],
            "boxes": data["boxes"],
        }

    def study_counts(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """[length, solved, episodes, low, high] by optimal length."""
        return {"by_length": [[cell["length"], *study_cell(cell)] for cell in row["by_length"]]}

    def study_prompts(self, levels: Mapping[str, Any]) -> str:
        """Levels, their sizes and lengths, and whether their walls occur in training."""
        low, high = levels["lengths"]
        shared = levels["shared_layouts"]
        walls = "none of which occurs in training" if not shared else f"{shared} of which occur in training too"
        distinct = "distinct " if levels.get("distinct") == levels["count"] else ""
        each = f" ({levels['per_length'][0]} of each)" if len(levels.get("per_length", [])) == 1 else ""
        return (
            f"{count(levels['count'])} {distinct}evaluation levels ({levels['height']}×{levels['width']}, "
            f"{levels['boxes']} box{'es' if levels['boxes'] > 1 else ''}, {levels['layouts']} wall layouts, {walls}), "
            f"optimal lengths {low} to {high}{each}, {levels['move_limit']} moves at most"
        )
