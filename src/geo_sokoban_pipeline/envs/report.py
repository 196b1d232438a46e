"""Words and tables of one task in reports, comparisons and docs of studies: plain data and pure functions.

`TaskReport` holds the defaults and names no task; a task overrides them in a subclass.
"""

from __future__ import annotations

import re
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
    "control_teacher": ("SFT control: more of the warm start", "final"),
    "control_optimal": ("SFT control: optimal play", "final"),
    "teacher": ("expert", "legal"),
    "teacher_patient": ("expert, never gives up", "legal"),
}
# Suffixes of rows of image ablations. Where observations carry images, shuffled prompts replace the first ones alone.
BLANK, SHUFFLED, FIRST_SHUFFLED = "_blank", "_shuffled", "_shuffled_first"
_ABLATIONS = {
    BLANK: "blank images",
    SHUFFLED: "shuffled images",
    FIRST_SHUFFLED: "first image from another problem",
}
# The same in a sentence, and whether every image is replaced, so that the result says something about their use.
_SHOWN = {
    BLANK: ("blank images", True),
    SHUFFLED: ("images of other problems", True),
    FIRST_SHUFFLED: ("the first image from another problem", False),
}


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
    """Words of one task for readers.

    Attributes:
        agents: (label, colour) by the name of a row, beside those of all tasks.
        solves: verb before a rate.
        tiles: baselines with a number in the headline.
        rivals: baselines beside the policies in tables by the kind of prompt.
        difficulty: name of the difficulty of a prompt.
        unit: of the difficulty, at the axis of a chart; empty: none.
        cluster: one of the values of `Task.apart`, and several; None: the prompts that are distinct.
        equal: when two prompts of different splits count as one, after `Counted again for this report`.
        step: an action, where one response may hold several.
        lost: state of an episode whose prompt can no longer be solved.
        curves: small charts of metrics of training, as (metric, title, note); a note that begins with `share` gives the
            axis of a share.
        no_action: text for a response without a valid action.
        chosen: rule by which the evaluation episodes of a page are chosen.
        study_policies, study_baselines: rows of a study's tables, in their order.
        study_lines: baselines whose rates are lines of a study's figure, with their colours.
        study_breakdowns: tables by the kind of prompt, as (heading, column); the first one is also shown by seed.
        study_shares: further shares of a row, as (name, text above their table).
        study_rows: rows of the README's table of a study, and their names there.
        first_attempts: text above a study's table of first attempts; empty: attempts are not told apart.
    """

    agents: Mapping[str, tuple[str, str]] = MappingProxyType({})
    cluster: tuple[str, str] | None = None
    solves: str = "has"
    tiles: Sequence[str] = ()
    rivals: Sequence[str] = ()
    difficulty: str = "difficulty"
    unit: str = ""
    equal: str = ""
    step: str = "action"
    lost: str = "lost"
    curves: Sequence[tuple[str, str, str]] = ()
    no_action: str = "no valid action"
    chosen: str = "For each kind of prompt: the first solved one, and the first unsolved one while there is room."
    study_policies: Sequence[str] = ("warm_start", "final", "control_teacher", "control_optimal", "final_blank")
    study_baselines: Sequence[str] = ("teacher",)
    study_lines: Sequence[tuple[str, str]] = (("teacher", "training"),)
    study_breakdowns: Sequence[tuple[str, str]] = ()
    study_shares: Sequence[tuple[str, str]] = ()
    study_rows: Mapping[str, str] = MappingProxyType(
        {
            "final": "**after GRPO**",
            "warm_start": "warm start: SFT on a weak expert",
            "control_teacher": "more of this SFT, for the CPU time of GRPO",
            "control_optimal": "SFT on optimal play, for the CPU time of GRPO",
            "final_blank": "after GRPO, with blank images",
        }
    )
    first_attempts: str = ""

    # Rows of an evaluation.

    def label(self, name: str) -> str:
        """Name of a policy or baseline for readers; unknown ones keep theirs."""
        for suffix, words in _ABLATIONS.items():
            if name.endswith(suffix):
                return f"{self.label(name.removesuffix(suffix))}, {words}"
        known = {**_AGENTS, **self.agents}.get(name)
        # Rows of experts have stored names such as `teacher (direct)`.
        return known[0] if known else re.sub("^teacher ", "expert ", name)

    def row_label(self, name: str, mode: str) -> str:
        """Name of a row: the agent, and the decoding mode if there is one."""
        return self.label(name) if mode == "-" else f"{self.label(name)}, {mode}"

    def colour(self, name: str) -> str:
        """Colour of a row; policies without their own share the main colour."""
        if name.endswith(tuple(_ABLATIONS)):
            return "random"
        return {**_AGENTS, **self.agents}.get(name, ("", "legal" if name.startswith("teacher") else "final"))[1]

    # The headline.

    def name_clusters(self, prompts: str, number: int | None, clusters: int | None) -> str:
        """Prompts in words, with how many are evidence of their own where these are fewer: `283 problems, 24 distinct`.

        Args:
            prompts: such as `283 problems`.
            number: of the prompts; None: not known.
            clusters: of the prompts; None: not known.
        """
        if self.cluster and clusters:
            return f"{prompts} of {plural(clusters, *self.cluster)}"
        fewer = number is not None and clusters is not None and clusters < number
        return f"{prompts}, {count(clusters)} distinct" if fewer else prompts

    def evaluated_on(self, summary: Summary) -> str:
        """The evaluation prompts, in a few words."""
        number = summary.get("prompts")
        return self.name_clusters(plural(number, "held-out prompt"), number, summary.get("clusters"))

    def compare(self, summary: Summary, policies: Sequence[str]) -> list[str]:
        """Sentences about baselines and image ablations.

        Args:
            policies: names of the evaluated ones, the final one last.
        """
        return compare_blind(summary, policies, "it has")

    # Episodes.

    def read_action(self, turn: Turn) -> str | None:
        """Parsed action of a response; None if there is none."""
        return turn.action

    def shorten_actions(self, turns: Sequence[Turn]) -> str:
        """All actions of an episode in one line."""
        return " → ".join(self.read_action(turn) or "–" for turn in turns)

    def last_image(self, image: bytes, turn: Turn) -> bytes | None:
        """PNG of the state after the last turn, which no episode stores; None if it cannot be drawn."""
        return None

    def is_lost(self, image: bytes) -> bool:
        """Whether a PNG shows a state from which the prompt cannot be solved any more."""
        return False

    def name_kind(self, difficulty: str) -> str:
        """A difficulty as the name of a group of prompts."""
        return difficulty.replace("_", " ")

    def reward_parts(self, names: Sequence[str], args: Mapping[str, Any]) -> list[str]:
        """Which parts of the reward a chart shows.

        Args:
            names: of all entries that are stored with rewards.
            args: of the reward.
        """
        return list(names)

    # Data.

    def data_notes(self, report: Mapping[str, Any]) -> Sequence[str]:
        """Further sentences about the data, from the dataset `data_report`."""
        return ()

    def data_table(self, splits: Mapping[str, Mapping[str, Any]]) -> DataTable:
        """Counts of the splits, without notes."""
        return DataTable(["prompts"], [(name, [count(split.get("prompts"))]) for name, split in splits.items()], [])

    # Studies.

    def study_entry(self, summary: Summary, data: Mapping[str, Any]) -> dict[str, Any]:
        """The evaluation prompts as a study stores them.

        Args:
            data: parameters of the data, as JSON.
        """
        return {"count": summary["prompts"]}

    def study_counts(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """Further entries of a study's row, from that of an evaluation, for `study_breakdowns` and `study_shares`."""
        return {}

    def study_prompts(self, levels: Mapping[str, Any]) -> str:
        """The evaluation prompts in words, from that entry."""
        return f"{count(levels['count'])} evaluation prompts"


def study_cell(cell: Mapping[str, Any]) -> list[float]:
    """Counts of a cell of a breakdown as a study stores them: solved, episodes, and the ends of the interval."""
    return [cell["solved"], cell["episodes"], *(cell[end] for end in ("low", "high") if end in cell)]


def compare_blind(summary: Summary, policies: Sequence[str], verb: str) -> list[str]:
    """Sentences about the image ablations of the final policy.

    Args:
        verb: before the rate, if it proves no use of the images.
    """
    found = []
    for suffix, (shown, replaces_all) in _SHOWN.items() if policies else ():
        row = find_row(summary, f"{policies[-1]}{suffix}", "sampled")
        seeing = find_row(summary, policies[-1], "sampled")
        if row and seeing:
            rate = percent(row["solve_rate"])
            found.append(
                f"With {shown} it drops to {rate}, so it does use the image."
                if replaces_all and _is_below(row, seeing)
                else f"With {shown} {verb} {rate}."
            )
    return found


def _is_below(row: Mapping[str, Any], seeing: Mapping[str, Any]) -> bool:
    """Whether an ablation loses: by the paired test on the same prompts, else by the intervals of both rates."""
    if (change := row.get("change")) is not None:
        return bool(change["is_change"] and change["difference"] < 0)
    return bool(row.get("high", 1.0) < seeing.get("low", 0.0))
