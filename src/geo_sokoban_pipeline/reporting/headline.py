"""The headline: what was trained and how well it does, in sentences that a reader can check against the table.

Whether a gain is real is said by the Wilson intervals, never by the difference of two rates alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from geo_sokoban_pipeline.reporting.formats import count, percent, percent_range
from geo_sokoban_pipeline.reporting.labels import policy_colour, policy_label

Row = dict[str, Any]


@dataclass(frozen=True)
class Tile:
    """One big number: its name, the number, what stands below it, the class of its colour."""

    name: str
    value: str
    detail: str
    colour: str


@dataclass(frozen=True)
class Headline:
    """Main sentence, further sentences, tiles."""

    main: str
    further: list[str]
    tiles: list[Tile]


def write_headline(summary: Mapping[str, Any]) -> Headline:
    """Headline of an evaluation summary, which may lack policies, baselines, or everything."""
    names = [str(name) for name in summary.get("policies") or []]
    last = find_row(summary, names[-1], "sampled") if names else None
    if last is None:
        return Headline("No evaluation is stored for this run.", [], [])
    first = find_row(summary, names[0], "sampled") if len(names) > 1 else None
    where = _describe_levels(summary)
    if first is None:
        main = f"On {where} {policy_label(names[-1])} solves {_rate(last)}."
    else:
        gain = last["solve_rate"] - first["solve_rate"]
        verb = "raised" if gain > 0 else "lowered" if gain < 0 else "did not change"
        main = f"On {where} GRPO {verb} the solve rate from {_rate(first)} after the warm start to {_rate(last)}."
    further = [*_compare(first, last), *_greedy(summary, names), *_baselines(summary), *_blank(summary, names)]
    tiles = [_tile(row) for row in (first, last, _player(summary, "random_legal"), _player(summary, "solver")) if row]
    return Headline(main, further, tiles)


def find_row(summary: Mapping[str, Any], policy: str, mode: str) -> Row | None:
    """Row of a policy in a mode, if it was evaluated and played any episode."""
    for row in summary.get("rows") or []:
        if row.get("policy") == policy and row.get("mode") == mode and row.get("solve_rate") is not None:
            found: Row = row
            return found
    return None


def _player(summary: Mapping[str, Any], name: str) -> Row | None:
    return find_row(summary, name, "-")


def _describe_levels(summary: Mapping[str, Any]) -> str:
    layouts = summary.get("layouts")
    on_layouts = f" ({count(layouts)} wall layouts)" if layouts else ""
    return f"{count(summary.get('prompts'))} held-out levels{on_layouts}"


def _rate(row: Row) -> str:
    return f"{percent(row['solve_rate'])} [{percent_range(row.get('low'), row.get('high'))}]"


def _compare(first: Row | None, last: Row) -> list[str]:
    if first is None or first.get("high") is None or last.get("low") is None:
        return []
    if last["low"] > first["high"]:
        return ["The two intervals (95 %, Wilson) do not overlap: chance in these episodes does not explain the gain."]
    if last["high"] < first["low"]:
        return ["The two intervals (95 %, Wilson) do not overlap: the policy got worse."]
    return ["The two intervals (95 %, Wilson) overlap, so this evaluation does not prove a change."]


def _greedy(summary: Mapping[str, Any], names: list[str]) -> list[str]:
    rows = [find_row(summary, name, "greedy") for name in (names[0], names[-1])]
    rates = [percent(row["solve_rate"]) for row in rows if row]
    if not rates:
        return []
    return [f"Playing greedily it solves {rates[-1]}{f', before {rates[0]}' if len(rates) > 1 < len(names) else ''}."]


def _baselines(summary: Mapping[str, Any]) -> list[str]:
    legal, solver = _player(summary, "random_legal"), _player(summary, "solver")
    parts = []
    if legal:
        parts.append(f"Random legal moves solve {_rate(legal)}")
    if solver:
        parts.append(f"{'a' if parts else 'A'}n exact solver {percent(solver['solve_rate'])}")
    limit = summary.get("move_limit")
    return [f"{', '.join(parts)}{f', all within {limit} turns' if limit else ''}."] if parts else []


def _blank(summary: Mapping[str, Any], names: list[str]) -> list[str]:
    row, seeing = (find_row(summary, name, "sampled") for name in (f"{names[-1]}_blank", names[-1]))
    if not row or not seeing:
        return []
    verdict = ": it plays by sight" if row.get("high", 1.0) < seeing.get("low", 0.0) else ""
    return [f"With blank pictures the same policy solves {percent(row['solve_rate'])}{verdict}."]


def _tile(row: Row) -> Tile:
    name = policy_label(row["policy"]) + (", sampled" if row.get("mode") == "sampled" else "")
    detail = (
        f"{percent_range(row.get('low'), row.get('high'))} · {count(row.get('solved'))} of {count(row.get('episodes'))}"
    )
    return Tile(name, percent(row["solve_rate"]), detail, policy_colour(row["policy"]))
