"""The docs of a study: results, figure and tables follow from one JSON value; prose around the markers stays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from geo_sokoban_pipeline.formats import DASH, number
from geo_sokoban_pipeline.reporting.charts import Series, Shape, draw_chart_file
from geo_sokoban_pipeline.reporting.recipe_tables import render_recipes
from geo_sokoban_pipeline.reporting.study_tables import (
    MODES,
    Results,
    describe_beside,
    describe_choice,
    find_rate,
    markdown_table,
    mean_share,
    name_seeds,
    render_summary,
    render_tables,
    write_rates,
)
from geo_sokoban_pipeline.runs.storage import to_json
from geo_sokoban_pipeline.tasks import TASKS, task_of

CHART_SIZE = (760, 360)
_GRID = 24  # points of a mean curve
# Stage and class of its colour.
_STAGES = (("warm_start", "warm"), ("control_optimal", "solver"), ("control_teacher", "greedy"), ("grpo", "final"))
# Studies in the README, with the name of their markers: a table, or one line.
_TABLES = {"default": "readme:results"}
_LINES = {name: f"readme:{name}" for task in TASKS.values() for name in task.studies if name != "default"}
README_MARKERS = {**_TABLES, **_LINES}
COMPARISONS = tuple(name for task in TASKS.values() for name in task.comparisons)  # of recipes; a page of their own
Points = list[tuple[float, float]]


class MarkerError(ValueError):
    """A document does not have exactly one pair of the markers; the message names them and what to write."""


def replace_section(text: str, name: str, content: str, place: Path) -> str:
    """Put new content between `<!-- name:begin -->` and `<!-- name:end -->`.

    Args:
        place: the document's path, for the message.

    Raises:
        MarkerError: a marker is missing, repeated, or the end comes first.
    """
    before, _, after = _split(text, name, place)
    return f"{before}{content.strip()}{after}"


def read_section(text: str, name: str, place: Path) -> str:
    """Text between the markers, without surrounding blank lines.

    Raises:
        MarkerError: as in `replace_section`.
    """
    return _split(text, name, place)[1].strip()


def _split(text: str, name: str, place: Path) -> tuple[str, str, str]:
    begin, end = f"<!-- {name}:begin -->", f"<!-- {name}:end -->"
    start, stop = text.find(begin) + len(begin), text.find(end)
    if text.count(begin) != 1 or text.count(end) != 1 or stop < start:
        raise MarkerError(
            f"{place}: there must be one line `{begin}` and, below it, one line `{end}`. The program "
            "writes the text between them; add the two lines where it should appear."
        )
    return text[:start] + "\n\n", text[start:stop], "\n\n" + text[stop:]


# The figure of a study: the rate on validation prompts over CPU-seconds, as a self-contained SVG file.


def draw_study(results: Mapping[str, Any]) -> str:
    """SVG of a study's curves: lines are means over the seeds, faint lines the seeds.

    Dashed lines are baselines on the evaluation prompts.
    """
    seeds, task = results["seeds"], task_of(results["task"])
    series = []
    for stage, colour in _STAGES:
        name = "GRPO" if stage == "grpo" else task.report.label(stage)
        curves = [curve for seed in seeds if len(curve := stage_curve(seed, stage)) > 1]
        if curves:
            series += [Series(name, colour, curve, style="faint") for curve in curves if len(curves) > 1]
            series += [Series(name, colour, mean)] if (mean := mean_curve(curves)) else []
    end = max((x for line in series for x, _ in line.points), default=1.0)
    for agent, colour in task.report.study_lines:
        if (share := mean_share([find_rate(seed["rows"], agent, "-") for seed in seeds])) is not None:
            series.append(Series(task.report.label(agent), colour, [(0.0, share), (end, share)], style="dashed"))
    top = max((y for line in series for _, y in line.points), default=1.0)
    shape = Shape("CPU-seconds of training", *CHART_SIZE, (0.0, min(1.0, top + 0.08)), shares=True)
    words = task.words
    prompts = f"{results['levels']['validation_count']} validation {words.units}"
    return draw_chart_file(f"{results['title']}: {words.rate} on {prompts}, sampled", series, shape)


def stage_curve(seed: Mapping[str, Any], stage: str) -> Points:
    """(CPU-seconds since the start of the warm start, sampled solve rate) of one stage of a seed.

    Loop and controls begin at the end of the warm start, in time and in rate.
    """
    warm: Points = [(row[0], row[1]) for row in seed["curves"].get("warm_start", [])]
    if stage == "warm_start":
        return warm
    offset = seed["cpu_seconds"]["warm_start"]
    curve: Points = [(offset + row[0], row[1]) for row in seed["curves"].get(stage, [])]
    return [*warm[-1:], *curve] if curve and curve[0][0] > offset else curve


def mean_curve(curves: Sequence[Points]) -> Points:
    """Mean of curves at equal x, over the span that all of them cover; `[]` if there is none."""
    if len(curves) == 1:
        return list(curves[0])
    begin, end = max(curve[0][0] for curve in curves), min(curve[-1][0] for curve in curves)
    if begin >= end:
        return []
    spots = np.linspace(begin, end, _GRID + 1)
    heights = [np.interp(spots, curve[:, 0], curve[:, 1]) for curve in map(np.array, curves)]
    return list(zip(spots.tolist(), np.mean(heights, axis=0).tolist(), strict=True))


# A study in the README: one short table for the default run, one line for each other study.


def render_readme_line(results: Results) -> str:
    """One entry of a list: the sampled rate of the final policy, the seeds, and where everything else stands.

    The text above the list says that seeds took no part in choosing the recipe, so an entry names only those that did.
    """
    link = f"[{results['title']}](docs/learning.md#{results['title'].lower().replace(' ', '-')})"
    rate, final = task_of(results["task"]).words.rate, _spread(results["seeds"], "final", MODES[0])
    chosen = any(seed["seed"] in results["chosen_on"] for seed in results["seeds"])
    seeds = _describe_seeds(results, describe_choice(results) if chosen else "")
    over = "clusters" if results.get("intervals") == "clusters" else "rows"
    kind = f" (95 % interval over {over})" if len(results["seeds"]) == 1 else ""
    return f"- {link}: {rate} **{final}**{kind} after GRPO, {seeds}."


def render_readme(results: Results) -> str:
    """The short table of the README (`render_summary` has all rows): means, lowest and highest of the seeds."""
    seeds, task = results["seeds"], task_of(results["task"])
    lines = []
    for agent, name in task.report.study_rows.items():
        sampled, greedy = (_spread(seeds, agent, mode) for mode in MODES)
        if sampled != DASH:
            lines.append([name, sampled, "" if agent in task.report.study_baselines else greedy])
    many = _describe_seeds(results, describe_choice(results))
    many += " (lowest–highest in brackets)" if len(seeds) > 1 else ""
    what = f"{task.words.rate.capitalize()}, {many}: {task.report.study_prompts(results['levels'])}."
    head = " ".join(filter(None, [what, _describe_minutes(results), describe_beside(results, task)]))
    return "\n\n".join([head, markdown_table(["policy", "sampled", "greedy"], lines)])


def _describe_seeds(results: Results, clause: str) -> str:
    """`mean of seeds 3 to 5`, and a clause about them behind a comma."""
    seeds = [seed["seed"] for seed in results["seeds"]]
    return ", ".join(filter(None, [f"{'mean of ' if len(seeds) > 1 else ''}{name_seeds(seeds)}", clause]))


def _describe_minutes(results: Results) -> str:
    """Duration of whole runs if each of them had the machine to itself; else nothing."""
    minutes = [seed["minutes"] for seed in results["seeds"]]
    if results["machine"]["workers"] > 1 or None in minutes:
        return ""
    cores = " and ".join(map(str, results["machine"]["cores"]))
    low, high = number(min(minutes), 1), number(max(minutes), 1)
    return f"A whole run takes {low if low == high else f'{low} to {high}'} minutes on {cores} cores."


def _spread(seeds: Sequence[Mapping[str, Any]], agent: str, mode: str) -> str:
    return write_rates([find_rate(seed["rows"], agent, mode) for seed in seeds])


# The files of the docs.


def study_marker(name: str) -> str:
    """Name of the markers around a study's section."""
    return f"study:{name}"


def check_docs(docs: Path, name: str) -> None:
    """Check that the documents exist and have their markers, before the runs that take hours.

    Raises:
        MarkerError: a document is missing, or has no markers.
    """
    for path, marker in _documents(docs, name):
        if not path.is_file():
            raise MarkerError(f"study.docs={docs}: there is no {path}. Give the folder of the docs, or null.")
        read_section(path.read_text(encoding="utf-8"), marker, path)


def render_docs(docs: Path, results: Mapping[str, Any]) -> dict[str, str]:
    """Texts of all files that follow from a study's results, by their path below the folder that `docs` lies in.

    Raises:
        MarkerError: a document has no markers for this study.
    """
    name = results["study"]
    texts = {docs / "results" / f"{name}.json": to_json(results)}
    if name not in COMPARISONS:
        texts[docs / "img" / f"learning_{name}.svg"] = draw_study(results)
        texts[docs / "studies" / f"{name}.md"] = f"{render_tables(results)}\n"
    for (path, marker), content in zip(_documents(docs, name), render_sections(results), strict=True):
        texts[path] = replace_section(path.read_text(encoding="utf-8"), marker, content, path)
    return {path.relative_to(docs.parent).as_posix(): text for path, text in texts.items()}


def render_sections(results: Mapping[str, Any]) -> list[str]:
    """Text of each document's section, in the order of the documents."""
    name = results["study"]
    if name in COMPARISONS:
        return [render_recipes(results)]
    render = {**dict.fromkeys(_TABLES, render_readme), **dict.fromkeys(_LINES, render_readme_line)}
    return [render_summary(results), *([render[name](results)] if name in render else [])]


def _documents(docs: Path, name: str) -> list[tuple[Path, str]]:
    """(document, marker) of each section that a study fills."""
    readme = [(docs.parent / "README.md", README_MARKERS[name])] if name in README_MARKERS else []
    page = "estimators" if name in COMPARISONS else "learning"
    return [(docs / f"{page}.md", study_marker(name)), *readme]
