"""What the README says of a study: one short table for the default run, one line for each other study."""

from __future__ import annotations

from collections.abc import Sequence

from geo_sokoban_pipeline.reporting.formats import DASH, number, percent, signed
from geo_sokoban_pipeline.reporting.study_rates import Rate, find_growth, find_rate, mean_share
from geo_sokoban_pipeline.reporting.study_tables import MODES, Results, describe_choice, markdown_table, name_seeds
from geo_sokoban_pipeline.reporting.study_worlds import Seeds, world_of

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
    """One entry of a list: what the study's policies reach and on what, beside its warm start and one more comparison.

    Results that are less flattering stand in the same line: first attempts before a tool has answered, further levels.
    """
    seeds, world = results["seeds"], world_of(results)
    sampled, greedy = (_rate(seeds, "final", mode) for mode in MODES)
    rates = {name: _rate(seeds, player, MODES[0]) for player, name in _COMPARED[world.world].items()}
    compared = [f"{name} {rate}" for name, rate in rates.items() if rate != DASH]
    anchor = results["title"].lower().replace(" ", "-")
    sentences = [
        f"**{sampled}** sampled and {greedy} greedy after GRPO on {world.brief(results['levels'])}; "
        f"{', '.join(compared)}.",
        _describe_first_attempts(results),
        *_describe_sets(results),
        _describe_minutes(results),
        _describe_memory(results),
    ]
    link = f"[{results['title']}](docs/learning.md#{anchor})"
    head = f"- {link}, `study.name={results['study']}`, {_describe_seeds(results)}:"
    return " ".join(filter(None, [head, *sentences]))


def render_readme(results: Results) -> str:
    """The short table of the README: means of the seeds, with the lowest and the highest."""
    seeds, world = results["seeds"], world_of(results)
    lines = []
    for player, name in _ROWS.items():
        sampled, greedy = (_rate(seeds, player, mode) for mode in MODES)
        if sampled != DASH:
            lines.append([name, sampled, "" if player in world.baselines else greedy])
    many = f"{_describe_seeds(results)}{' (lowest–highest in brackets)' if len(seeds) > 1 else ''}"
    played = f"{world.words.rate.capitalize()}, {many}: {world.describe(results['levels'])}."
    where = f"{played} {_describe_minutes(results)}".strip()
    return "\n\n".join([where, markdown_table(["policy", "sampled", "greedy"], lines)])


def _describe_seeds(results: Results) -> str:
    """`mean of seeds 3 to 5, none of which took part in choosing the recipe`."""
    seeds = [seed["seed"] for seed in results["seeds"]]
    parts = [f"{'mean of ' if len(seeds) > 1 else ''}{name_seeds(seeds)}", describe_choice(results)]
    return ", ".join(filter(None, parts))


def _describe_first_attempts(results: Results) -> str:
    """Rates before the scoring tool has answered, beside those of the control that was shown the labels."""
    if results["levels"].get("turn_limit", 1) == 1:
        return ""
    parts = []
    for player, name in (("final", "after GRPO"), ("control_optimal", "after SFT on the labels")):
        sampled, greedy = (_rate(results["seeds"], player, mode, "first_attempt") for mode in MODES)
        if sampled != DASH:
            parts.append(f"{sampled} sampled and {greedy} greedy {name}")
    return f"First attempts alone: {'; '.join(parts)}." if parts else ""


def _describe_sets(results: Results) -> list[str]:
    """Rates on each further set, on which no policy was trained, beside those of the expert of the warm start."""
    sentences = []
    for played in results["sets"]:
        sampled, expert = (_rate(played["seeds"], *row) for row in (("final", MODES[0]), ("teacher", "-")))
        compared = f", the expert of the warm start {expert}" if expert != DASH else ""
        sentences.append(f"On {played['title']}: {sampled} sampled{compared}.")
    return sentences


def _rate(seeds: Seeds, player: str, mode: str, measure: str = "solved") -> str:
    return _spread([find_rate(seed["rows"], player, mode, measure) for seed in seeds])


def _describe_minutes(results: Results) -> str:
    """How long whole runs took, where each of them had the machine for itself; else nothing."""
    minutes = [seed["minutes"] for seed in results["seeds"]]
    if results["machine"]["workers"] > 1 or None in minutes:
        return ""
    cores = " and ".join(map(str, results["machine"]["cores"]))
    low, high = number(min(minutes), 1), number(max(minutes), 1)
    return f"A whole run takes {low if low == high else f'{low} to {high}'} minutes on {cores} cores."


def _describe_memory(results: Results) -> str:
    """By how much memory grew in runs that are long enough to tell; else nothing."""
    growths = [find_growth(seed.get("memory_gb", [])) for seed in results["seeds"]]
    known = sorted(growth for growth in growths if growth is not None)
    if not known:
        return ""
    span = " to ".join(dict.fromkeys(signed(growth, 1) for growth in (known[0], known[-1])))
    return f"Memory after 200 iterations, against that after 20: {span} %."


def _spread(rates: Sequence[Rate | None]) -> str:
    shares = [rate.share for rate in rates if rate]
    if not shares or len(shares) < len(rates):
        return DASH
    if len(shares) == 1:
        return rates[0].write() if rates[0] else DASH
    return f"{percent(mean_share(rates))} ({100 * min(shares):.1f}–{100 * max(shares):.1f})"
