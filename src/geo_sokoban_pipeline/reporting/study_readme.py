"""What the README says of a study: the short table of a recipe that has a command of its own, else one line."""

from __future__ import annotations

from collections.abc import Sequence

from geo_sokoban_pipeline.reporting.formats import DASH, number, percent
from geo_sokoban_pipeline.reporting.labels import policy_label
from geo_sokoban_pipeline.reporting.study_rates import Rate, find_rate, mean_share
from geo_sokoban_pipeline.reporting.study_tables import CONTROLS, MODES, Results, describe_played, markdown_table
from geo_sokoban_pipeline.reporting.study_worlds import world_of


def render_readme_line(results: Results) -> str:
    """One entry of a list: what the study's policies reach, beside warm start and random legal moves."""
    seeds = results["seeds"]
    sampled, greedy = (_spread([find_rate(seed["rows"], "final", mode) for seed in seeds]) for mode in MODES)
    warm = _spread([find_rate(seed["rows"], "warm_start", MODES[0]) for seed in seeds])
    legal = _spread([find_rate(seed["rows"], "random_legal", "-") for seed in seeds])
    many = f"mean of {len(seeds)} seeds" if len(seeds) > 1 else "one seed"
    anchor = results["title"].lower().replace(" ", "-")
    return (
        f"- [{results['title']}](docs/learning.md#{anchor}), `study.name={results['study']}`, {many}: **{sampled}** "
        f"sampled and {greedy} greedy after GRPO; warm start {warm}, random legal moves {legal}. "
        f"{_describe_minutes(results)}"
    ).rstrip()


def render_readme(results: Results) -> str:
    """The short table of the README: means of the seeds, with the lowest and the highest."""
    seeds, world = results["seeds"], world_of(results)
    several = results["levels"].get("turn_limit", 1) > 1
    lines = []
    for player in ("final", "warm_start", *CONTROLS, *world.disguised, *reversed(world.baselines)):
        sampled, greedy = (_spread([find_rate(seed["rows"], player, mode) for seed in seeds]) for mode in MODES)
        if sampled != DASH:
            first = [_spread([find_rate(seed["rows"], player, MODES[0], "first_attempt") for seed in seeds])]
            name = policy_label(player, world.world)
            cells = [sampled, "" if player in world.baselines else greedy, *(first if several else [])]
            lines.append([f"**{name}**" if player == "final" else name, *cells])
    where = f"{describe_played(results['levels'], len(seeds), world, short=True)} {_describe_minutes(results)}".strip()
    head = ["player", "sampled", "greedy", *(["first attempt, sampled"] if several else [])]
    return "\n\n".join([where, markdown_table(head, lines)])


def _describe_minutes(results: Results) -> str:
    """How long whole runs took, where each of them had the machine for itself; else nothing."""
    minutes = [seed["minutes"] for seed in results["seeds"]]
    if results["machine"]["workers"] > 1 or None in minutes:
        return ""
    cores = " and ".join(map(str, results["machine"]["cores"]))
    low, high = number(min(minutes), 1), number(max(minutes), 1)
    return f"A whole run takes {low if low == high else f'{low} to {high}'} minutes on {cores} cores."


def _spread(rates: Sequence[Rate | None]) -> str:
    shares = [rate.share for rate in rates if rate]
    if not shares or len(shares) < len(rates):
        return DASH
    if len(shares) == 1:
        return rates[0].write() if rates[0] else DASH
    return f"{percent(mean_share(rates))} ({100 * min(shares):.1f}–{100 * max(shares):.1f})"
