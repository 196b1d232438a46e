"""Words of geometry in reports and studies: problems, answers, families, first attempts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from geo_sokoban_pipeline.envs.report import DataTable, Summary, TaskReport, compare_blind, study_cell
from geo_sokoban_pipeline.formats import DASH, START, count, find_baseline, find_row, percent, plural, write_rate

if TYPE_CHECKING:
    from geo_sokoban_pipeline.trajectories.types import Turn


class GeometryReport(TaskReport):
    """See `TaskReport`."""

    agents = {
        "control_optimal": ("SFT control: the labels", "final"),
        "most_frequent": ("most frequent answer", "random"),
        "label": ("the label itself", "solver"),
        "solver": ("solver (optimal)", "solver"),
    }
    tiles = ("most_frequent", "teacher")
    rivals = ("teacher",)
    difficulty = "family"
    curves = (
        ("rollout/answered", "Episodes with an answer", "share"),
        ("rollout/tool_calls/mean", "Tool calls", "responses that try one, mean per episode"),
        ("rollout/grading_timeouts", "Grading timeouts", "share of the episodes"),
    )
    no_action = "no answer"
    chosen = (
        "For each kind of problem: the first one that is answered correctly, and the first one that is not while there "
        "is room."
    )
    study_policies = (*TaskReport.study_policies, "final_shuffled")
    study_baselines = ("most_frequent", "teacher", "label")
    study_lines = (("most_frequent", "legal"), ("teacher", "training"))
    study_breakdowns = (("family", "family"), ("form of the answer", "answer_form"))
    study_shares = (
        (
            "plausible_share",
            "**Plausible answers**: last answers that one of the rules gives for this figure's number, right or wrong. "
            "The others misread the figure or miscalculate.",
        ),
        ("called_share", "**Calls**: episodes that call the scoring tool."),
    )
    first_attempts = (
        "**First attempt**: correct before any feedback of the scoring tool. The table above counts last answers."
    )

    def evaluated_on(self, summary: Summary) -> str:
        """Problems, their families and distinct answers."""
        parts = [
            plural(summary[name], *words)
            for name, words in (("families", ("family", "families")), ("answers", ("distinct answer",)))
            if summary.get(name)
        ]
        kinds = f" ({', '.join(parts)})" if parts else ""
        number = summary.get("prompts")
        return self.name_clusters(plural(number, "held-out problem"), number, summary.get("clusters")) + kinds

    def compare(self, summary: Summary, policies: Sequence[str]) -> list[str]:
        """First attempts, the most frequent answer, the expert, blank and shuffled images."""
        most, expert = find_baseline(summary, "most_frequent"), find_baseline(summary, "teacher")
        named = (("the most frequent answer of training", most), ("the expert of the warm start", expert))
        rates = [(name, write_rate(row)) for name, row in named if row]
        text = ", ".join(f"{name}{'' if at else ' is correct'} for {rate}" for at, (name, rate) in enumerate(rates))
        baselines = [f"{text[:1].upper()}{text[1:]}."] if rates else []
        return [*_first_attempts(summary, policies), *baselines, *compare_blind(summary, policies, "it has")]

    def read_action(self, turn: Turn) -> str | None:
        """The parsed action, else the answer in the box."""
        from geo_sokoban_pipeline.rewards.math_answer.default import extract_answer

        return turn.action or extract_answer(turn.text)

    def data_table(self, splits: Mapping[str, Mapping[str, Any]]) -> DataTable:
        """Problems, images, answers, and problems by family where one is known."""
        families = list(dict.fromkeys(name for split in splits.values() for name in split.get("by_family") or {}))
        families = [] if families == ["unknown"] else families
        lines = []
        for name, split in splits.items():
            cells = [count(split.get(key)) for key in ("problems", "distinct_problems", "images", "distinct_answers")]
            most = split.get("most_frequent_answer") or {}
            share = f"{most['answer']} ({percent(most['share'])})" if most else DASH
            by_family = split.get("by_family") or {}
            lines.append((name, [*cells, share, *(count(by_family.get(family, 0)) for family in families)]))
        columns = ["problems", "distinct", "images", "answers", "most frequent label"]
        shown = [family.replace("_", " ") for family in families]
        return DataTable([*columns, *shown], lines, [], "problems by family", len(columns))

    def study_entry(self, summary: Summary, data: Mapping[str, Any]) -> dict[str, Any]:
        """Problems, families, answers, turns."""
        generated = data["source"] == "generate"
        return {
            "count": summary["prompts"],
            "families": summary.get("families", 0),
            "answers": summary["answers"],
            "turn_limit": summary["turn_limit"],
            "difficulty": data["problems"]["difficulty"] if generated else None,
        }

    def study_counts(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """Correct first attempts, shares of episodes with calls and with plausible answers, and counts by kind."""
        first = row["first_attempt"] or {}
        return {
            "first_attempts": first.get("solved"),
            **{f"first_{end}": first[end] for end in ("low", "high") if end in first},
            "called_share": (row.get("tools") or {}).get("called_share"),
            "plausible_share": row.get("plausible_share"),
            "breakdowns": {
                column: [[cell["label"], *study_cell(cell)] for cell in cells]
                for column, cells in (row.get("breakdowns") or {}).items()
            },
        }

    def study_prompts(self, levels: Mapping[str, Any]) -> str:
        """Problems, their source, and whether they occur in training."""
        shared, turns = levels["shared_problems"], levels["turn_limit"]
        common = "none of which occurs in training" if not shared else f"{shared} of which occur in training too"
        kind = f"generated, difficulty {levels['difficulty']}, " if levels["difficulty"] else ""
        families = f"{levels['families']} families, " if levels["families"] else ""
        responses = "one response" if turns == 1 else f"{turns} responses at most"
        answers = f"{levels['answers']} distinct answers"
        return f"{count(levels['count'])} evaluation problems, {common} ({kind}{families}{answers}), {responses}"


def has_tool(summary: Summary) -> bool:
    """Whether any row has calls of a scoring tool; an environment of one's own may have turns without one."""
    return any((row.get("tools") or {}).get("calls") for row in summary.get("rows") or [])


def _first_attempts(summary: Summary, names: Sequence[str]) -> list[str]:
    """Sentence about the policies' first attempts, if an episode may have several."""
    if (summary.get("turn_limit") or 1) == 1 or not names:
        return []
    rows = [find_row(summary, name, "sampled") for name in dict.fromkeys((names[0], names[-1]))]
    rates = [write_rate(row["first_attempt"]) if row.get("first_attempt") else None for row in rows if row]
    if not rates or None in rates:  # the environment does not report them
        return []
    start = "before GRPO" if names[0] == START else "after the warm start"
    before = f"; {rates[0]} {start}" if len(rates) > 1 else ""
    what = "first attempts, before any feedback of the scoring tool" if has_tool(summary) else "first responses"
    return [f"Of its {what}, {rates[-1]} are correct{before}."]
