"""The headline: what was trained and how well it does, in sentences that a reader can check against the table.

Whether a gain is real is said by the Wilson intervals, never by the difference of two rates alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from geo_sokoban_pipeline.reporting.formats import count, percent, percent_range
from geo_sokoban_pipeline.reporting.labels import policy_colour, policy_label
from geo_sokoban_pipeline.reporting.run_worlds import RunWorld, run_world
from geo_sokoban_pipeline.reporting.summaries import Row, find_player, find_row, write_rate


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
    world = run_world(summary.get("task"))
    names = [str(name) for name in summary.get("policies") or []]
    last = find_row(summary, names[-1], "sampled") if names else None
    if last is None:
        return Headline("No evaluation is stored for this run.", [], [])
    first = find_row(summary, names[0], "sampled") if len(names) > 1 else None
    main = _say_what_happened(world, names, first, last, world.where(summary))
    further = [*_compare(first, last), *_greedy(summary, names, world), *world.compare(summary, names)]
    if summary.get("better"):
        further.append(str(summary["better"]))
    others = [find_player(summary, name) for name in world.tiles]
    return Headline(main, further, [_tile(row, world) for row in (first, last, *others) if row])


def _say_what_happened(world: RunWorld, names: list[str], first: Row | None, last: Row, where: str) -> str:
    if first is None:
        verb = "solves" if world.world == "sokoban" else "has"
        return f"On {where} {policy_label(names[-1], world.world)} {verb} {write_rate(last)}."
    gain = last["solve_rate"] - first["solve_rate"]
    verb = "raised" if gain > 0 else "lowered" if gain < 0 else "did not change"
    rates = f"from {write_rate(first)} after the warm start to {write_rate(last)}"
    return f"On {where} GRPO {verb} the {world.words.rate} {rates}."


def _compare(first: Row | None, last: Row) -> list[str]:
    if first is None or first.get("high") is None or last.get("low") is None:
        return []
    if last["low"] > first["high"]:
        return ["The two intervals (95 %, Wilson) do not overlap: chance in these episodes does not explain the gain."]
    if last["high"] < first["low"]:
        return ["The two intervals (95 %, Wilson) do not overlap: the policy got worse."]
    return ["The two intervals (95 %, Wilson) overlap, so this evaluation does not prove a change."]


def _greedy(summary: Mapping[str, Any], names: list[str], world: RunWorld) -> list[str]:
    rows = [find_row(summary, name, "greedy") for name in (names[0], names[-1])]
    rates = [percent(row["solve_rate"]) for row in rows if row]
    if not rates:
        return []
    start = "Playing greedily it solves" if world.world == "sokoban" else "Answering greedily it has"
    return [f"{start} {rates[-1]}{f', before {rates[0]}' if len(rates) > 1 < len(names) else ''}."]


def _tile(row: Row, world: RunWorld) -> Tile:
    name = policy_label(row["policy"], world.world) + (", sampled" if row.get("mode") == "sampled" else "")
    detail = (
        f"{percent_range(row.get('low'), row.get('high'))} · {count(row.get('solved'))} of {count(row.get('episodes'))}"
    )
    return Tile(name, percent(row["solve_rate"]), detail, policy_colour(row["policy"]))
