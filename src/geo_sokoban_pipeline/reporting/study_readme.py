"""What the README says of a study: one short table for the default run, one line for each other study."""

from __future__ import annotations

from collections.abc import Sequence

from geo_sokoban_pipeline.reporting.formats import DASH, number, percent
from geo_sokoban_pipeline.reporting.study_rates import Rate, find_rate, mean_share
from geo_sokoban_pipeline.reporting.study_tables import MODES, Results, describe_played, markdown_table
from geo_sokoban_pipeline.reporting.study_worlds import world_of

# Rows of the table; everything else that was measured is in docs/learning.md.
_ROWS = {
    "final": "**after GRPO**",
    "warm_start": "warm start: SFT on a weak expert",
    "control_teacher": "more of this SFT, for the CPU time of GRPO",
    "control_optimal": "SFT on optimal play, for the CPU time of GRPO",
    "final_blank": "after GRPO, with blank images",
    "random_legal": "random legal moves",
}
# What a line compares with, by world.
_COMPARED = {
    "sokoban": {"warm_start": "warm start", "random_legal": "random legal moves"},
    "geometry": {"warm_start": "warm start", "control_optimal": "SFT on the labels for the CPU time of GRPO"},
}


def render_readme_line(results: Results) -> str:
    """One entry of a list: what the study's policies reach, beside its warm start and one more comparison."""
    seeds = results["seeds"]
    sampled, greedy = (_spread([find_rate(seed["rows"], "final", mode) for seed in seeds]) for mode in MODES)
    rates = {
        name: _spread([find_rate(seed["rows"], player, MODES[0]) for seed in seeds])
        for player, name in _COMPARED[world_of(results).world].items()
    }
    compared = [f"{name} {rate}" for name, rate in rates.items() if rate != DASH]
    many = f"mean of {len(seeds)} seeds" if len(seeds) > 1 else "one seed"
    anchor = results["title"].lower().replace(" ", "-")
    return (
        f"- [{results['title']}](docs/learning.md#{anchor}), `study.name={results['study']}`, {many}: **{sampled}** "
        f"sampled and {greedy} greedy after GRPO; {', '.join(compared)}. {_describe_minutes(results)}"
    ).rstrip()


def render_readme(results: Results) -> str:
    """The short table of the README: means of the seeds, with the lowest and the highest."""
    seeds, world = results["seeds"], world_of(results)
    lines = []
    for player, name in _ROWS.items():
        sampled, greedy = (_spread([find_rate(seed["rows"], player, mode) for seed in seeds]) for mode in MODES)
        if sampled != DASH:
            lines.append([name, sampled, "" if player in world.baselines else greedy])
    where = f"{describe_played(results['levels'], len(seeds), world, short=True)} {_describe_minutes(results)}".strip()
    return "\n\n".join([where, markdown_table(["policy", "sampled", "greedy"], lines)])


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
