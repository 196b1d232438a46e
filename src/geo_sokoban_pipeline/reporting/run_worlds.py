"""What the report of a run says differently in each world: what was played, whom it is compared with, which columns."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from geo_sokoban_pipeline.envs.base import Words
from geo_sokoban_pipeline.envs.geo3k.task import GEO3K
from geo_sokoban_pipeline.envs.sokoban.task import SOKOBAN
from geo_sokoban_pipeline.reporting.formats import (
    DASH,
    START,
    Row,
    World,
    find_player,
    find_row,
    number,
    percent,
    plural,
    write_rate,
)
from geo_sokoban_pipeline.tasks import TASKS

Summary = Mapping[str, Any]


@dataclass(frozen=True)
class Column:
    """A column of the evaluation table.

    Attributes:
        heading: its name.
        write: its cell of a row of the summary.
        several: only where an episode may have several responses.
        note: what it holds, where the heading does not say it all; of a summary, where it depends on what was played.
    """

    heading: str
    write: Callable[[Row], str]
    several: bool = False
    note: str | Callable[[Summary], str] = ""


@dataclass(frozen=True)
class Cut:
    """A table by the kind of prompt: heading of its first column, and the cells of a row, by label."""

    by: str
    cells: Callable[[Row], Mapping[Any, Mapping[str, Any]]]


@dataclass(frozen=True)
class RunWorld:
    """What differs.

    Attributes:
        world: its name.
        words: for people.
        where: what was played, of a summary.
        compare: sentences of the headline about other players, of a summary and the policies' names.
        tiles: players that get a tile.
        columns: of the evaluation table. replies: of a second one, about how was answered.
        rivals: players beside the policies in tables by kind.
        cuts: those tables.
        chosen: rule by which played episodes are shown.
        silent: what stands in for an action that could not be understood.
    """

    world: World
    words: Words
    where: Callable[[Summary], str]
    compare: Callable[[Summary, Sequence[str]], list[str]]
    tiles: tuple[str, ...]
    columns: tuple[Column, ...]
    replies: tuple[Column, ...]
    rivals: tuple[str, ...]
    cuts: tuple[Cut, ...]
    chosen: str
    silent: str


def run_world(task: Any) -> RunWorld:
    """The world of a task; names that are no task of ours are shown as the first world's."""
    known = TASKS.get(str(task), SOKOBAN)
    return _WORLDS[known.world]


def columns_of(summary: Summary, *, replies: bool = False) -> list[Column]:
    """Columns that are the world's own, of a summary's evaluation table or of the second one; none that is empty."""
    world, single, rows = run_world(summary.get("task")), summary.get("turn_limit") == 1, summary.get("rows") or []
    return [
        column
        for column in (world.replies if replies else world.columns)
        if not (single and column.several) and any(column.write(row) != DASH for row in rows)
    ]


def notes_of(summary: Summary) -> list[str]:
    """What the columns of a summary's tables hold."""
    shown = [*columns_of(summary), *columns_of(summary, replies=True)]
    notes = [(column, column.note(summary) if callable(column.note) else column.note) for column in shown]
    return [f"{column.heading.capitalize()}: {note}." for column, note in notes if note]


def _levels_played(summary: Summary) -> str:
    layouts = summary.get("layouts")
    on_layouts = f" ({plural(layouts, 'wall layout')})" if layouts else ""
    return f"{plural(summary.get('prompts'), 'held-out level')}{on_layouts}"


def _problems_played(summary: Summary) -> str:
    parts = [
        plural(summary[name], *words)
        for name, words in (("families", ("family", "families")), ("answers", ("distinct answer",)))
        if summary.get(name)
    ]
    kinds = f" ({', '.join(parts)})" if parts else ""
    return f"{plural(summary.get('prompts'), 'held-out problem')}{kinds}"


def _compare_moves(summary: Summary, names: Sequence[str]) -> list[str]:
    legal, solver = find_player(summary, "random_legal"), find_player(summary, "solver")
    parts = []
    if legal:
        parts.append(f"Random legal moves solve {write_rate(legal)}")
    if solver:
        parts.append(f"{'a' if parts else 'A'}n exact solver {percent(solver['solve_rate'])}")
    limit = summary.get("move_limit")
    within = f", all within {plural(limit, 'move')}" if limit else ""
    found = [f"{', '.join(parts)}{within}."] if parts else []
    row, seeing = _disguised(summary, names, "_blank")
    if row and seeing:
        found.append(_say_blind("blank images", "it solves", row, seeing))
    return found


def _compare_answers(summary: Summary, names: Sequence[str]) -> list[str]:
    found = _first_attempts(summary, names)
    most, teacher = find_player(summary, "most_frequent"), find_player(summary, "teacher")
    parts = []
    if most:
        parts.append(f"always the most frequent answer of training is correct for {write_rate(most)}")
    if teacher:
        parts.append(f"the teacher of the warm start for {write_rate(teacher)}")
    if parts:
        text = ", ".join(parts)
        found.append(f"{text[:1].upper()}{text[1:]}.")
    for suffix, shown in (("_blank", "blank images"), ("_shuffled", "images of other problems")):
        row, seeing = _disguised(summary, names, suffix)
        if row and seeing:
            found.append(_say_blind(shown, "it has", row, seeing))
    return found


def _say_blind(shown: str, verb: str, row: Row, seeing: Row) -> str:
    """What is left of a policy that is shown nothing of the prompt."""
    if _is_below(row, seeing):
        return f"With {shown} it drops to {percent(row['solve_rate'])}, so it does use the image."
    return f"With {shown} {verb} {percent(row['solve_rate'])}."


def _first_attempts(summary: Summary, names: Sequence[str]) -> list[str]:
    """What the policies' first attempts are worth, where an episode may have several."""
    if (summary.get("turn_limit") or 1) == 1 or not names:
        return []
    rows = [find_row(summary, name, "sampled") for name in dict.fromkeys((names[0], names[-1]))]
    rates = [write_rate(row["first_attempt"]) if row.get("first_attempt") else None for row in rows if row]
    if not rates or None in rates:  # an environment that does not report them
        return []
    start = "before GRPO" if names[0] == START else "after the warm start"
    before = f"; {rates[0]} {start}" if len(rates) > 1 else ""
    what = "first attempts, before the scoring tool has said anything" if _has_tool(summary) else "first responses"
    return [f"Of its {what}, {rates[-1]} are correct{before}."]


def _has_tool(summary: Summary) -> bool:
    """Whether anybody called a scoring tool; an environment of one's own may have turns without one."""
    return any(_part("tools", "calls")(row) for row in summary.get("rows") or [])


def _disguised(summary: Summary, names: Sequence[str], suffix: str) -> tuple[Row | None, Row | None]:
    if not names:
        return None, None
    return find_row(summary, f"{names[-1]}{suffix}", "sampled"), find_row(summary, names[-1], "sampled")


def _is_below(row: Row, other: Row) -> bool:
    below: bool = row.get("high", 1.0) < other.get("low", 0.0)
    return below


def _by_length(row: Row) -> Mapping[Any, Mapping[str, Any]]:
    return {cell["length"]: cell for cell in row.get("by_length") or []}


def _by_column(column: str) -> Callable[[Row], Mapping[Any, Mapping[str, Any]]]:
    return lambda row: {cell["label"]: cell for cell in (row.get("breakdowns") or {}).get(column) or []}


def _part(section: str, name: str) -> Callable[[Row], float | None]:
    return lambda row: (row.get(section) or {}).get(name)


def _invalid(note: str) -> Column:
    return Column("invalid responses", lambda row: percent(row.get("invalid_share")), note=note)


_WORLDS: Mapping[World, RunWorld] = {
    "sokoban": RunWorld(
        world="sokoban",
        words=SOKOBAN.words,
        where=_levels_played,
        compare=_compare_moves,
        tiles=("random_legal", "solver"),
        columns=(
            Column(
                "moves ÷ fewest",
                lambda row: number(row.get("steps_over_optimal")),
                note="mean over solved episodes whose fewest moves are known",
            ),
            _invalid("share of the responses without a move; those that the token limit cut off are not counted"),
        ),
        replies=(),
        rivals=("random_legal",),
        cuts=(Cut("fewest moves", _by_length),),
        chosen="For each number of fewest moves: the first solved level, and the first unsolved one while there is "
        "room.",
        silent="no valid move",
    ),
    "geometry": RunWorld(
        world="geometry",
        words=GEO3K.words,
        where=_problems_played,
        compare=_compare_answers,
        tiles=("most_frequent", "teacher"),
        columns=(
            Column(
                "first attempt",
                lambda row: percent(_part("first_attempt", "solve_rate")(row)),
                several=True,
                note=lambda summary: (
                    "correct before the scoring tool has said anything"
                    if _has_tool(summary)
                    else "correct with the first response"
                ),
            ),
            Column(
                "plausible",
                lambda row: percent(row.get("plausible_share")),
                note="the answer is one of the problem's candidates, those of rules that one might apply, which tells "
                "reading from choosing",
            ),
        ),
        replies=(
            _invalid("share of the responses with neither an answer nor a call that could be scored"),
            Column(
                "tool calls",
                lambda row: number(_part("tools", "calls")(row)),
                several=True,
                note="mean per episode",
            ),
            Column(
                "valid calls",
                lambda row: percent(_part("tools", "valid_share")(row)),
                several=True,
                note="share of the calls whose answer was scored",
            ),
            Column("tokens", lambda row: number(_part("responses", "tokens_mean")(row), 1), note="mean per episode"),
            Column("truncated", lambda row: percent(_part("responses", "truncated_share")(row))),
            Column("repetition", lambda row: percent(_part("responses", "repetition_share")(row))),
        ),
        rivals=("teacher",),
        cuts=(
            Cut("family", _by_column("family")),
            Cut("form of the answer", _by_column("answer_form")),
            Cut("difficulty", _by_column("difficulty")),
        ),
        chosen="For each family: the first problem that is answered correctly, and the first one that is not while "
        "there is room.",
        silent="no answer",
    ),
}
