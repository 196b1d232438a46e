"""What reports, comparisons and the docs of studies say of one task: plain data and pure functions.

`TaskReport` holds what most tasks share and knows no task; a task derives from it what its readers expect beyond that.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from geo_sokoban_pipeline.formats import START, count, find_row, percent, plural

if TYPE_CHECKING:
    from geo_sokoban_pipeline.trajectories.types import Turn

Summary = Mapping[str, Any]

# Label and colour of a row of an evaluation; colours are those of charts.
_AGENTS = {
    START: ("before GRPO", "warm"),
    "warm_start": ("warm start", "warm"),
    "final": ("after GRPO", "final"),
    "control_teacher": ("control: more of the warm start", "final"),
    "control_optimal": ("control: SFT on optimal play", "final"),
    "teacher": ("teacher", "legal"),
    "teacher_patient": ("teacher, never gives up", "legal"),
}
_ABLATIONS = {"_blank": "blank images", "_shuffled": "shuffled images"}


@dataclass(frozen=True)
class DataTable:
    """Prompts by split: column names, lines of (split, cells), and sentences about the data.

    Attributes:
        group: heading of the columns from `plain` on.
        plain: columns before them.
    """

    columns: list[str]
    lines: list[tuple[str, list[str]]]
    notes: list[str]
    group: str = ""
    plain: int = 1


class TaskReport:
    """What readers of one task see.

    Attributes:
        agents: (label, colour) by the name of a row, beside those that all tasks have.
        solves: verb before a rate.
        tiles: baselines that get a number in the headline.
        rivals: baselines beside the policies in tables by the kind of prompt.
        difficulty: what the difficulty of a prompt is.
        no_action: what stands in for an action that could not be understood.
        chosen: rule by which the played episodes of a page are chosen.
        study_policies, study_baselines: rows of a study's tables, in their order.
        study_lines: baselines whose rates are lines of a study's figure, with their colours.
        study_breakdowns: tables by the kind of prompt, as (heading, column); the first one is also shown by seed.
        study_shares: numbers that tell how a policy answers, with what stands above their table.
        study_compared: rows that the README compares a study's policy with, and what it calls them.
    """

    agents: Mapping[str, tuple[str, str]] = MappingProxyType({})
    solves: str = "has"
    tiles: Sequence[str] = ()
    rivals: Sequence[str] = ()
    difficulty: str = "difficulty"
    no_action: str = "no valid action"
    chosen: str = "For each kind of prompt: the first solved one, and the first unsolved one while there is room."
    study_policies: Sequence[str] = ("warm_start", "final", "control_teacher", "control_optimal", "final_blank")
    study_baselines: Sequence[str] = ("teacher",)
    study_lines: Sequence[tuple[str, str]] = (("teacher", "training"),)
    study_breakdowns: Sequence[tuple[str, str]] = ()
    study_shares: Sequence[tuple[str, str]] = ()
    study_compared: Mapping[str, str] = MappingProxyType({"warm_start": "warm start"})

    # Rows of an evaluation.

    def label(self, name: str) -> str:
        """Name of a policy or baseline for readers; unknown ones keep theirs."""
        for suffix, words in _ABLATIONS.items():
            if name.endswith(suffix):
                return f"{self.label(name.removesuffix(suffix))}, {words}"
        return {**_AGENTS, **self.agents}.get(name, (name, ""))[0]

    def row_label(self, name: str, mode: str) -> str:
        """Name of a row: the policy, and how it decoded where there is a choice."""
        return self.label(name) if mode == "-" else f"{self.label(name)}, {mode}"

    def colour(self, name: str) -> str:
        """Colour of a row; policies without one of their own share the main colour."""
        if name.endswith(tuple(_ABLATIONS)):
            return "random"
        return {**_AGENTS, **self.agents}.get(name, ("", "legal" if name.startswith("teacher") else "final"))[1]

    # The headline.

    def played(self, summary: Summary) -> str:
        """What was played."""
        return plural(summary.get("prompts"), "held-out prompt")

    def compare(self, summary: Summary, policies: Sequence[str]) -> list[str]:
        """Sentences about baselines and image ablations.

        Args:
            policies: names of the evaluated ones, the final one last.
        """
        return compare_blind(summary, policies, {"_blank": "blank images"}, "it has")

    # Episodes.

    def read_action(self, turn: Turn) -> str | None:
        """What the environment understood of a response; None for nothing."""
        return turn.action

    def shorten_actions(self, turns: Sequence[Turn]) -> str:
        """All actions of an episode in one line."""
        return " → ".join(self.read_action(turn) or "–" for turn in turns)

    def last_image(self, image: bytes, actions: Sequence[str]) -> bytes | None:
        """PNG of the state after the last actions, which no episode stores; None where it cannot be drawn."""
        return None

    def is_lost(self, image: bytes) -> bool:
        """Whether a PNG shows a state from which the prompt cannot be solved any more."""
        return False

    # Data.

    def data_table(self, splits: Mapping[str, Mapping[str, Any]]) -> DataTable:
        """What the splits hold, without notes."""
        return DataTable(["prompts"], [(name, [count(split.get("prompts"))]) for name, split in splits.items()], [])

    # Studies.

    def study_entry(self, summary: Summary, data: Mapping[str, Any]) -> dict[str, Any]:
        """What a study keeps of what was played.

        Args:
            data: parameters of the data, as JSON.
        """
        return {"count": summary["prompts"]}

    def study_played(self, levels: Mapping[str, Any]) -> str:
        """What was played, of that entry."""
        return f"{count(levels['count'])} evaluation prompts"

    def study_brief(self, levels: Mapping[str, Any]) -> str:
        """The same in a few words, for one line among others."""
        return f"{count(levels['count'])} prompts"


def compare_blind(summary: Summary, policies: Sequence[str], ablations: Mapping[str, str], verb: str) -> list[str]:
    """What is left of the final policy where it does not see the image of its prompt.

    Args:
        ablations: what is shown instead, by the end of the row's name.
        verb: before the rate, where the row is not clearly below the policy's own.
    """
    found = []
    for suffix, shown in ablations.items() if policies else ():
        row = find_row(summary, f"{policies[-1]}{suffix}", "sampled")
        seeing = find_row(summary, policies[-1], "sampled")
        if row and seeing:
            rate, below = percent(row["solve_rate"]), row.get("high", 1.0) < seeing.get("low", 0.0)
            found.append(
                f"With {shown} it drops to {rate}, so it does use the image."
                if below
                else f"With {shown} {verb} {rate}."
            )
    return found
