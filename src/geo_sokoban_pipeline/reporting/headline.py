"""The headline: what was trained and how well it does, in sentences that a reader can check against the table.

Whether a gain is real is said by a paired test over the same prompts, or, where their episodes are not at hand, by the
Wilson intervals; never by the difference of two rates alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from geo_sokoban_pipeline.evaluation.paired import PairedTest
from geo_sokoban_pipeline.reporting.formats import count, p_value, percent, percent_range, plural, points
from geo_sokoban_pipeline.reporting.labels import START, policy_colour, policy_label
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


def write_headline(summary: Mapping[str, Any], change: PairedTest | None = None) -> Headline:
    """Headline of an evaluation summary, which may lack policies, baselines, or everything.

    Args:
        change: the first policy against the last one, on the same prompts; None: only their intervals are known.
    """
    world = run_world(summary.get("task"))
    names = [str(name) for name in summary.get("policies") or []]
    last = find_row(summary, names[-1], "sampled") if names else None
    if last is None:
        return Headline("No evaluation is stored for this run.", [], [])
    first = find_row(summary, names[0], "sampled") if len(names) > 1 else None
    main = _say_what_happened(world, names, first, last, world.where(summary), change)
    further = [*_compare(first, last, change, world), *_greedy(summary, names), *world.compare(summary, names)]
    if summary.get("better"):
        further.append(str(summary["better"]))
    others = [find_player(summary, name) for name in world.tiles]
    return Headline(main, further, [_tile(row, world) for row in (first, last, *others) if row])


def _say_what_happened(
    world: RunWorld, names: list[str], first: Row | None, last: Row, where: str, change: PairedTest | None
) -> str:
    if first is None:
        verb = "solves" if world.world == "sokoban" else "has"
        return f"On {where} {policy_label(names[-1], world.world)} {verb} {write_rate(last)}."
    rate, start = world.words.rate, "before GRPO" if names[0] == START else "after the warm start"
    if not _has_changed(first, last, change):
        rates = f"{write_rate(first)} {start}, {write_rate(last)} after GRPO"
        return f"On {where} GRPO made no significant change to the {rate}: {rates}."
    verb = "raised" if last["solve_rate"] > first["solve_rate"] else "lowered"
    return f"On {where} GRPO {verb} the {rate} from {write_rate(first)} {start} to {write_rate(last)}."


def _has_changed(first: Row, last: Row, change: PairedTest | None) -> bool:
    return change.is_change if change is not None else _are_apart(first, last)


def _are_apart(first: Row, last: Row) -> bool:
    low, high = last.get("low"), last.get("high")
    apart: bool = (low is not None and low > first.get("high", 1.0)) or (
        high is not None and high < first.get("low", 0.0)
    )
    return apart


def _compare(first: Row | None, last: Row, change: PairedTest | None, world: RunWorld) -> list[str]:
    if first is None:
        return []
    if change is not None:
        played = plural(change.prompts, world.words.unit, world.words.units)
        test = f"Over the same {played} the difference is {points(change.difference, change.low, change.high)}"
        if change.p_value is None:
            return [f"{test} (95 %, paired bootstrap)."]
        counts = f"{count(change.gained)} gained, {count(change.lost)} lost"
        return [f"{test}: {counts} (McNemar's test, {p_value(change.p_value)})."]
    if first.get("high") is None or last.get("low") is None:
        return []
    if _are_apart(first, last):
        return ["The two intervals (95 %, Wilson) do not overlap, so chance in these episodes is no explanation."]
    return ["The two intervals (95 %, Wilson) overlap, so this evaluation does not prove a change."]


def _greedy(summary: Mapping[str, Any], names: list[str]) -> list[str]:
    rows = [find_row(summary, name, "greedy") for name in dict.fromkeys((names[0], names[-1]))]
    rates = [percent(row["solve_rate"]) for row in rows if row]
    if not rates:
        return []
    before = f" (was {rates[0]})" if len(rates) > 1 else ""
    return [f"Greedy decoding: {rates[-1]}{before}."]


def _tile(row: Row, world: RunWorld) -> Tile:
    name = policy_label(row["policy"], world.world) + (", sampled" if row.get("mode") == "sampled" else "")
    detail = (
        f"{percent_range(row.get('low'), row.get('high'))} · {count(row.get('solved'))} of {count(row.get('episodes'))}"
    )
    return Tile(name, percent(row["solve_rate"]), detail, policy_colour(row["policy"]))
