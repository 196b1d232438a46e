"""Numbers and Markdown tables of a study: rates and criteria of each seed.

Everything is a pure function of a study's results, so a test compares the committed text with them. A difference is
taken within a seed, never between means. Intervals are "apart" if they do not touch.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any, cast

from geo_sokoban_pipeline.envs.base import Task
from geo_sokoban_pipeline.envs.metrics import wilson_interval
from geo_sokoban_pipeline.envs.report import TaskReport
from geo_sokoban_pipeline.formats import DASH, PERCENT, count, in_percent, number, percent, signed
from geo_sokoban_pipeline.tasks import task_of

Results = Mapping[str, Any]
Row = Mapping[str, Any]
CONTROLS = ("control_teacher", "control_optimal")
MODES = ("sampled", "greedy")
_CAPTION = (
    "Faint lines are the seeds. Full lines are their means at equal CPU-seconds, over the span that all seeds cover. "
    "Both are rates on validation {units}; dashed lines are baselines on the evaluation {units}."
)
_STAGES = ("warm_start", "grpo", "control_teacher", "control_optimal")
_ROUNDING = 1e-9  # of differences of shares


@dataclass(frozen=True)
class Rate:
    """A solve rate with its counts, and the ends of its 95 % interval over clusters where the results have them."""

    solved: int
    episodes: int
    low: float | None = None
    high: float | None = None

    @property
    def share(self) -> float:
        """Solved episodes, of all."""
        return self.solved / self.episodes

    @property
    def ends(self) -> tuple[float, float]:
        """The interval: over clusters where the results have it, else that of Wilson over rows."""
        if self.low is None or self.high is None:
            return wilson_interval(self.solved, self.episodes)
        return self.low, self.high

    def write(self, digits: int = 1) -> str:
        """`59.1 % [55.2–62.8]`."""
        low, high = (in_percent(end, digits) for end in self.ends)
        return f"{percent(self.share, digits)} [{low}–{high}]"


@dataclass(frozen=True)
class Verdict:
    """One criterion for one seed: the measured value as text, and whether it is met (None: not measured)."""

    text: str
    met: bool | None

    def write(self) -> str:
        """`+24.1: met`."""
        return self.text if self.met is None else f"{self.text}: {'met' if self.met else '**not met**'}"


def find_rate(rows: Iterable[Row], agent: str, mode: str, measure: str = "solved") -> Rate | None:
    """Rate of an agent (a policy or baseline) in a mode; a row without modes counts for both.

    Args:
        measure: `solved`, or `first_attempt` if the rows have it.
    """
    counted, low, high = {
        "solved": ("solved", "low", "high"),
        "first_attempt": ("first_attempts", "first_low", "first_high"),
    }[measure]
    for row in _rows_of(rows, agent, mode):
        if row["episodes"] and row.get(counted) is not None:
            return Rate(row[counted], row["episodes"], row.get(low), row.get(high))
    return None


def _rows_of(rows: Iterable[Row], agent: str, mode: str) -> Iterator[Row]:
    return (row for row in rows if row["player"] == agent and row["mode"] in (mode, "-"))


def find_share(rows: Iterable[Row], agent: str, mode: str, name: str) -> float | None:
    """A further share of a row, in [0, 1], such as `plausible_share`; None if the row lacks it."""
    return cast("float | None", next((row.get(name) for row in _rows_of(rows, agent, mode)), None))


def rates_by(seeds: Sequence[Mapping[str, Any]], agent: str, mode: str, column: str) -> dict[Any, list[Rate | None]]:
    """Rates by the kind of prompt, one for each seed; None where it lacks the row.

    All seeds have the same prompts, so their episodes together are not a larger sample of prompts.

    Args:
        column: `by_length`, or a column of the row's `breakdowns`.
    """
    rates: dict[Any, list[Rate | None]] = {}
    for at, row in ((at, row) for at, seed in enumerate(seeds) for row in _rows_of(seed["rows"], agent, mode)):
        for label, solved, episodes, *ends in row.get(column, row.get("breakdowns", {}).get(column, [])):
            if episodes:
                rates.setdefault(label, [None] * len(seeds))[at] = Rate(solved, episodes, *ends)
    return dict(sorted(rates.items()))


def mean_share(rates: Iterable[Rate | None]) -> float | None:
    """Mean of the seeds' rates; None if one of them is missing."""
    known = list(rates)
    return fmean(rate.share for rate in known if rate) if known and all(known) else None


def write_rates(rates: Sequence[Rate | None], digits: int = 1) -> str:
    """Rate of one seed, or the mean of several with the lowest and the highest; a dash where one is missing."""
    known = [rate for rate in rates if rate]
    if not known or len(known) < len(rates):
        return DASH
    if len(known) == 1:
        return known[0].write(digits)
    shares = [100 * rate.share for rate in known]  # of these the mean, which ties decide
    return f"{fmean(shares):.{digits}f}{PERCENT} ({min(shares):.{digits}f}–{max(shares):.{digits}f})"


def judge_criterion(criterion: Mapping[str, Any], rows: Sequence[Row]) -> Verdict:
    """Whether one seed's rows meet a criterion (`CriterionOptions` as JSON)."""
    how = criterion.get("mode", "sampled"), criterion.get("measure", "solved")
    rate = find_rate(rows, criterion["player"], *how)
    other = find_rate(rows, criterion["over"], *how) if criterion.get("over") else None
    if rate is None or (criterion.get("over") and other is None):
        return Verdict(DASH, None)
    value = 100 * (rate.share - (other.share if other else 0.0))
    low, high = criterion.get("at_least", -math.inf), criterion.get("at_most", math.inf)
    met = low - _ROUNDING <= value <= high + _ROUNDING
    text = signed(value, 1) if other else number(value, 1)
    if criterion.get("apart") and other is not None:
        upper, lower = (rate, other) if value >= 0 else (other, rate)
        apart = upper.ends[0] > lower.ends[1]
        met = met and apart
        text += ", apart" if apart else ", intervals overlap"
    return Verdict(text, met)


def judge_minutes(minutes: float | None, most: float, workers: int = 1) -> Verdict:
    """Whether a whole run stayed within its time; None for runs that were interrupted, or not alone on the machine.

    Args:
        workers: runs side by side.
    """
    if workers > 1 or minutes is None:
        return Verdict(f"{DASH} ({'not alone' if workers > 1 else 'was interrupted'})", None)
    return Verdict(number(minutes, 1), minutes <= most)


def judge_growth(memory: Sequence[Sequence[float]], most: float = math.inf) -> Verdict:
    """Whether the memory of a run grew by at most `most` percent: `+1.4 % (1.91 to 1.93 GB)`.

    Args:
        memory: at two iterations, [iteration, GB] each; empty if the run is too short.
    """
    if not memory:
        return Verdict(f"{DASH} (too few iterations)", None)
    (_, early), (_, late) = memory
    growth = 100 * (late / early - 1)
    return Verdict(f"{signed(growth, 1)} % ({early:.2f} to {late:.2f} GB)", growth <= most + _ROUNDING)


def judge_spent(seed: Mapping[str, Any], control: str, least: float) -> Verdict:
    """Whether an SFT control had at least the share `least` of GRPO's CPU-seconds."""
    spent, grpo = seed["cpu_seconds"].get(control), seed["cpu_seconds"].get("grpo")
    return Verdict(DASH, None) if spent is None or not grpo else Verdict(number(spent / grpo), spent / grpo >= least)


def describe_criterion(criterion: Mapping[str, Any], report: TaskReport) -> str:
    """A criterion in words."""
    mode = criterion.get("mode", "sampled")
    first = ", first attempt" if criterion.get("measure") == "first_attempt" else ""
    name = report.row_label(criterion["player"], mode) + first
    bound = f"at least {criterion['at_least']:g}" if "at_least" in criterion else f"at most {criterion['at_most']:g}"
    if not criterion.get("over"):
        return f"{name}: {bound} %"
    apart = ", intervals apart" if criterion.get("apart") else ""
    return f"{name}: {bound} points above {report.row_label(criterion['over'], '-')}{apart}"


# Tables.


def render_summary(results: Results) -> str:
    """The section of a study in `docs/learning.md`, without heading: its rates, its figure, its criteria in a line."""
    name, task, seeds = results["study"], task_of(results["task"]), results["seeds"]
    units, rate = task.words.units, task.words.rate.capitalize()
    image = f"![{rate} on validation {units} over CPU-seconds](img/learning_{name}.svg)"
    judged = _judge(results, task)
    met = _count_met([verdicts for _, verdicts in judged]) if judged else ""
    parts = [
        " ".join(filter(None, [describe_prompts(results["levels"], task, results), _describe_choice(results)])),
        _rates_table(seeds, task),
        describe_beside(results, task),
        f"{image}\n\n{_CAPTION.format(units=units)}",
        f"{met} [All tables of this study](studies/{name}.md).".strip(),
    ]
    return "\n\n".join(part for part in parts if part)


def render_tables(results: Results) -> str:
    """The page of a study: every table but the one of its summary."""
    task, seeds = task_of(results["task"]), results["seeds"]
    parts = [
        f"# {results['title']}: all tables",
        "A study writes this page. [What is learnt](../learning.md) has its rates, its figure and its story.",
        describe_prompts(results["levels"], task, results),
        _first_attempts(results, task),
        *_shares(results, task),
        _criteria(results, task),
        *_breakdowns(seeds, task),
        "**Cost.** CPU-seconds are those of training alone: rollouts, updates and writing, without validations "
        "and evaluation. Minutes are the wall time of the whole command, from data to report.",
        _time_table(results, task),
        describe_machine(results["machine"]),
        *_sets(results, task),
    ]
    return "\n\n".join(part for part in parts if part)


def describe_prompts(levels: Mapping[str, Any], task: Task, results: Results) -> str:
    """The evaluation prompts and the kind of the intervals, in two sentences."""
    prompts, unit = task.report.study_prompts(levels), task.words.unit
    return f"Evaluated on {prompts}; one episode per {unit} and mode. Brackets are {name_intervals(results, task)}."


def name_intervals(results: Results, task: Task) -> str:
    """The kind of a study's intervals; results from before intervals were over clusters have those of their rows."""
    if results.get("intervals") == "clusters":
        one = task.report.cluster[0] if task.report.cluster else f"distinct {task.words.unit}"
        return f"95 % intervals over clusters: all episodes of a {one} are one piece of evidence"
    return "95 % Wilson intervals over rows, as if every episode were evidence of its own"


def name_seeds(seeds: Sequence[int]) -> str:
    """`seed 0`, `seeds 0 and 1`, `seeds 3 to 5`, `seeds 0, 1 and 4`."""
    if len(seeds) > 2 and list(seeds) == list(range(seeds[0], seeds[-1] + 1)):
        return f"seeds {seeds[0]} to {seeds[-1]}"
    *first, last = map(str, seeds)
    return f"seeds {', '.join(first)} and {last}" if first else f"seed {last}"


def describe_choice(results: Results) -> str:
    """Clause after the names of a study's seeds: whether they took part in choosing its recipe.

    Empty if the study does not name the seeds that it was chosen with.
    """
    chosen, seeds = results["chosen_on"], [seed["seed"] for seed in results["seeds"]]
    both = [seed for seed in seeds if seed in chosen]
    if not chosen or not seeds:
        return ""
    if len(both) == len(seeds):
        return "with which the recipe was also chosen"
    if both:
        return f"of which {name_seeds(both)} took part in choosing the recipe"
    return f"{'none of which took' if len(seeds) > 1 else 'which took no'} part in choosing the recipe"


def describe_beside(results: Results, task: Task) -> str:
    """Rates of the final policy of the seeds beside the others, `make run`'s among them; empty without any."""
    sentences = []
    for seed in results.get("beside") or []:
        rates = [(mode, find_rate(seed["rows"], "final", mode)) for mode in MODES]
        shown = " and ".join(f"{rate.write()} {mode}" for mode, rate in rates if rate)
        name = "`make run` is seed 0" if seed["seed"] == 0 else f"Seed {seed['seed']}"
        sentences.append(f"{name}, which is in no mean here: {shown} {task.report.label('final')}.")
    return " ".join(sentences)


def _describe_choice(results: Results) -> str:
    """The same as a sentence, with the seeds that the recipe was chosen with."""
    clause, seeds = describe_choice(results), [seed["seed"] for seed in results["seeds"]]
    if not clause:
        return ""
    where, chosen = f"on validation {task_of(results['task']).words.units}.", results["chosen_on"]
    if set(seeds) <= set(chosen):
        return f"{name_seeds(seeds).capitalize()}, {clause}, {where}"
    return f"{name_seeds(seeds).capitalize()}, {clause}. It was chosen with {name_seeds(chosen)}, {where}"


def _rates_table(seeds: Sequence[Mapping[str, Any]], task: Task, measure: str = "solved") -> str:
    rows = [(agent, mode) for agent in task.report.study_policies for mode in MODES]
    rows += [(agent, "-") for agent in task.report.study_baselines]
    lines = []
    for agent, mode in rows:
        if any(rates := [find_rate(seed["rows"], agent, mode, measure) for seed in seeds]):
            cells = [rate.write() if rate else DASH for rate in rates]
            mean = [percent(mean_share(rates))] if len(seeds) > 1 else []
            mark = "**" if agent == "final" else ""
            lines.append([f"{mark}{task.report.row_label(agent, mode)}{mark}", *cells, *mean])
    return markdown_table(["policy or baseline", *_seed_names(seeds), *(["mean"] if len(seeds) > 1 else [])], lines)


def _first_attempts(results: Results, task: Task) -> str:
    """The rates of first attempts, for tasks that tell them apart, in evaluations of several turns."""
    if not task.report.first_attempts or results["levels"].get("turn_limit", 1) == 1:
        return ""
    return f"{task.report.first_attempts}\n\n{_rates_table(results['seeds'], task, 'first_attempt')}"


def _shares(results: Results, task: Task) -> list[str]:
    """Tables of further shares of the rows; a share that is 0 everywhere is left out."""
    seeds, parts = results["seeds"], []
    for name, head in task.report.study_shares:
        lines = []
        for agent, mode in [(agent, mode) for agent in task.report.study_policies for mode in MODES]:
            shares = [find_share(seed["rows"], agent, mode, name) for seed in seeds]
            if any(share is not None for share in shares):
                mean = fmean(share for share in shares if share is not None) if None not in shares else None
                cells = [*map(percent, shares), *([percent(mean)] if len(seeds) > 1 else [])]
                lines.append((any(shares), [task.report.row_label(agent, mode), *cells]))
        if any(above_zero for above_zero, _ in lines):
            columns = ["policy or baseline", *_seed_names(seeds), *(["mean"] if len(seeds) > 1 else [])]
            parts.append(f"{head}\n\n{markdown_table(columns, [line for _, line in lines])}")
    return parts


def _judge(results: Results, task: Task) -> list[tuple[str, list[Verdict]]]:
    """Each criterion in words, with the verdict of each seed."""
    seeds = results["seeds"]
    judged = [
        (describe_criterion(criterion, task.report), [judge_criterion(criterion, seed["rows"]) for seed in seeds])
        for criterion in results["bars"]
    ]
    if results["max_minutes"] is not None:
        most, workers = results["max_minutes"], results["machine"]["workers"]
        verdicts = [judge_minutes(seed["minutes"], most, workers) for seed in seeds]
        judged.append((f"whole run: at most {most:g} minutes", verdicts))
    if (growth := results["max_growth"]) is not None:
        verdicts = [judge_growth(seed["memory_gb"], growth) for seed in seeds]
        judged.append((f"memory after 200 iterations: at most {growth:g} % above that after 20", verdicts))
    if results["least_spent"] is not None:
        least = results["least_spent"]
        judged += [
            (f"{task.report.label(name)}: spent at least {least:g} of GRPO's CPU-seconds", verdicts)
            for name in CONTROLS
            if any(name in seed["cpu_seconds"] for seed in seeds)
            for verdicts in [[judge_spent(seed, name, least) for seed in seeds]]
        ]
    return judged


def _criteria(results: Results, task: Task) -> str:
    """Criteria with the value of each seed."""
    lines = [[text, *(verdict.write() for verdict in verdicts)] for text, verdicts in _judge(results, task)]
    if not lines:
        return ""
    return f"**Criteria**\n\n{markdown_table(['criterion', *_seed_names(results['seeds'])], lines)}"


def _count_met(judged: Sequence[Sequence[Verdict]]) -> str:
    met = sum(all(verdict.met for verdict in verdicts) for verdicts in judged)
    failed = sum(any(verdict.met is False for verdict in verdicts) for verdicts in judged)
    who = "every seed" if len(judged[0]) > 1 else "the seed"
    rest = [("missed", failed), ("not measured", len(judged) - met - failed)]
    further = "".join(f", {what}: {number}" for what, number in rest if number)
    return f"**Criteria** met by {who}: {met} of {len(judged)}{further}."


def _breakdowns(seeds: Sequence[Mapping[str, Any]], task: Task) -> list[str]:
    """Tables by the kind of prompt; the first kind for each seed, too."""
    what = f"mean of the seeds (lowest–highest); all seeds have the same {task.words.units}"
    what = "with the 95 % interval" if len(seeds) == 1 else what
    parts = []
    for breakdown in task.report.study_breakdowns:
        parts.append(f"**By {breakdown[0]}**: percent {task.words.solved}, {what}.")
        parts.append(_breakdown_table(seeds, breakdown, task))
        if breakdown == task.report.study_breakdowns[0] and len(seeds) > 1:
            tables = [f"Seed {seed['seed']}:\n\n{_breakdown_table([seed], breakdown, task)}" for seed in seeds]
            parts += ["<details><summary>The same for each seed</summary>", *tables, "</details>"]
    return parts


def _breakdown_table(seeds: Sequence[Mapping[str, Any]], breakdown: tuple[str, str], task: Task) -> str:
    """One seed with its intervals, or several with their spread."""
    rows = [(agent, "-") for agent in task.report.study_baselines]
    rows += [(agent, mode) for agent in task.report.study_policies for mode in MODES]
    found = [(agent, mode, rates_by(seeds, agent, mode, breakdown[1])) for agent, mode in rows]
    labels = sorted({label for _, _, rates in found for label in rates})
    lines = [
        [task.report.row_label(agent, mode), *(write_rates(rates.get(label, []), 0) for label in labels)]
        for agent, mode, rates in found
        if rates
    ]
    lines = [[cell.replace(PERCENT, "") for cell in line] for line in lines]
    return markdown_table(["policy or baseline", *(str(label).replace("_", " ") for label in labels)], lines)


def _time_table(results: Results, task: Task) -> str:
    stages = [stage for stage in _STAGES if any(stage in seed["cpu_seconds"] for seed in results["seeds"])]
    # Growth is shown wherever it was measured, even without a criterion for it.
    measured = any(seed["memory_gb"] for seed in results["seeds"])
    lines = [
        [
            str(seed["seed"]),
            *(_describe_spent(seed, stage) for stage in stages),
            number(seed["minutes"], 1),
            *([judge_growth(seed["memory_gb"]).text] if measured else []),
        ]
        for seed in results["seeds"]
    ]
    names = ["GRPO" if stage == "grpo" else task.report.label(stage) for stage in stages]
    heads = ["seed", *(f"{name}, CPU-seconds" for name in names), "whole run, minutes"]
    return markdown_table(
        [*heads, *(["memory after 200 iterations, against that after 20"] if measured else [])], lines
    )


def _describe_spent(seed: Mapping[str, Any], stage: str) -> str:
    """`200 (140 iterations)`; of a control `201 (2,000 steps, 1.01 of GRPO)`."""
    spent, grpo = seed["cpu_seconds"].get(stage), seed["cpu_seconds"].get("grpo")
    units = "iterations" if stage == "grpo" else "steps"
    share = f", {number(spent / grpo)} of GRPO" if stage in CONTROLS and spent is not None and grpo else ""
    return f"{count(spent)} ({count(seed['steps'].get(stage))} {units}{share})"


def describe_machine(machine: Mapping[str, Any]) -> str:
    """Machine and versions of a study; where its runs differ, all values are listed."""

    def name(what: str, unknown: str = "unknown") -> str:
        return " and ".join(unknown if value is None else str(value) for value in machine[what])

    workers, others = machine["workers"], machine["other_workers"]
    beside = f"{workers} runs side by side, one thread each" if workers > 1 else "one run at a time on all of them"
    if workers == 1 < others:
        beside = f"one training run at a time on all of them, {others} others side by side"
    return (
        f"Measured on {name('cores')} cores ({name('processor', 'processor not named by the system')}, "
        f"{name('machine')}), {beside}; this package {name('version')} (commit "
        f"{name('commit')}), Python {name('python')}, torch {name('torch')}, transformers {name('transformers')}."
    )


def _sets(results: Results, task: Task) -> list[str]:
    parts = []
    for further in results["sets"]:
        parts += [
            f"**{further['title']}.** {describe_prompts(further['levels'], task, results)}",
            _rates_table(further["seeds"], task),
        ]
        for breakdown in task.report.study_breakdowns[:1]:
            parts.append(f"By {breakdown[0]}:\n\n{_breakdown_table(further['seeds'], breakdown, task)}")
    return parts


def _seed_names(seeds: Sequence[Mapping[str, Any]]) -> list[str]:
    return [f"seed {seed['seed']}" for seed in seeds]


def markdown_table(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """A Markdown table: the first column is text, the others are numbers.

    pandas' `to_markdown` needs a further package, tabulate, and pads cells: one changed number would touch each line.
    """
    rows = [head, ["---", *["---:"] * (len(head) - 1)], *lines]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)
