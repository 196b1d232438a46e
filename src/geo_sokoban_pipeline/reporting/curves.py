"""Curves of a run: its metrics as charts. A metric that was not recorded leaves its chart out and is never an error."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean
from typing import Any

from geo_sokoban_pipeline.envs.base import Words
from geo_sokoban_pipeline.formats import count, duration, is_number, number, percent, plural, significant
from geo_sokoban_pipeline.reporting.charts import Chart, Series, Shape, Style, make_chart
from geo_sokoban_pipeline.reporting.training_episodes import thin

Rows = Sequence[dict[str, Any]]
WINDOW = 9  # iterations of a running mean
_SMOOTHED_FROM = 40  # iterations; shorter curves are readable as they are
_TRAINED = "iterations trained"  # equals the policy version
# Metric, title, note; one that begins with `share` gives the axis of a share.
_HEALTH = (
    ("train/entropy_loss", "Entropy", "nats per token; 0: no exploration is left"),
    ("train/ppo_kl", "KL to the rollout policy", "mean |log-ratio| per token, in the update"),
    ("train/kl_loss", "KL to the reference policy", "nats per token"),
    ("train/reverse_kl", "KL to the teacher", "nats per token"),
    ("train/lr-pg_0", "Learning rate", "as scheduled"),
    ("train/grad_norm", "Gradient norm", "before clipping"),
    ("train/pg_clipfrac", "Clipped tokens", "share of the tokens trained on"),
    ("episodes/equal_groups", "Zero-variance groups", "share of the groups whose rewards are all equal"),
    ("rollout/trained_ratio", "Kept by the group filter", "share of the episodes"),
    ("rollout/truncated_ratio", "Truncated episodes", "share"),
    ("episodes/invalid", "Invalid responses", "share of the responses"),
    ("episodes/lost", "Lost episodes", "share that could no longer be solved"),
    (
        "train/train_rollout_logprob_abs_diff",
        "Trainer − engine",
        "mean gap of log-probs; later optimizer steps widen it",
    ),
    ("perf/tokens_per_second", "Rollout speed", "tokens per second, images included"),
    ("perf/memory_gb", "Memory", "GB, of all processes of the run"),
    ("perf/restarts", "Restarts", "times that ranks in a Ray cluster were lost and the iteration began again"),
    ("perf/worker_restarts", "Replaced rollout workers", "that ended or hung"),
    ("perf/server_restarts", "Restarted servers", "that ended or hung; sampling or since the iteration before"),
    ("perf/missing_ranks", "Missing ranks", "for which the Ray cluster had no place; the others do their work"),
)
COLOURS = ("final", "warm", "greedy", "legal", "solver", "random")  # of lines without a colour of their own
_DRAWN = {
    "solve_rate": "Training samples {units} by the solve rate of their kind, so training and validation curves differ.",
    "prompt_solve_rate": "Training samples {units} by their solve rates, so training and validation curves differ.",
}
# Name, colour, metric and style of the lengths of responses.
_LENGTHS: tuple[tuple[str, str, str, Style], ...] = (
    ("longest", "random", "max", "faint"),
    ("shortest", "random", "min", "faint"),
    ("median", "greedy", "median", "line"),
    ("mean", "final", "mean", "line"),
)


def points_of(rows: Rows, metric: str, x: str = "iteration") -> list[tuple[float, float]]:
    """(x, value) of the rows that have both."""
    return [(float(row[x]), float(row[metric])) for row in rows if is_number(row.get(x)) and is_number(row.get(metric))]


def smooth(points: Sequence[tuple[float, float]], window: int = WINDOW) -> list[tuple[float, float]]:
    """Running mean over `window` points, an odd number; at the ends over those that there are."""
    half = window // 2
    ys = [y for _, y in points]
    return [(x, fmean(ys[max(0, at - half) : at + half + 1])) for at, (x, _) in enumerate(points)]


def _is_long(points: Sequence[tuple[float, float]], metric: str) -> bool:
    """Whether a running mean is shown. A schedule has no noise to average out."""
    return len(points) >= _SMOOTHED_FROM and metric != "train/lr-pg_0"


def smoothed_points(rows: Rows, metric: str) -> list[tuple[float, float]]:
    """The points of a metric; of long curves their running mean."""
    points = points_of(rows, metric)
    return smooth(points) if _is_long(points, metric) else points


def with_mean(rows: Rows, metric: str, name: str, colour: str) -> list[Series]:
    """One line; of long curves the raw values as a faint line, and their running mean."""
    points = points_of(rows, metric)
    if not _is_long(points, metric):
        return [Series(name, colour, points)]
    return [Series(name, colour, points, style="faint"), Series(f"{name} (mean of {WINDOW})", colour, smooth(points))]


def success_chart(rows: Rows, words: Words, order: str = "shuffle") -> Chart | None:
    """Training success and validation rates by iteration, with 95 % intervals of the sampled one; first attempts too,
    where episodes have several.

    Args:
        order: rule by which training draws its prompts, `prompts.order`.
    """
    series = [
        *with_mean(rows, "rollout/success_rate", "training", "training"),
        validation_series(rows, "greedy", "validation, greedy", "greedy"),
        validation_series(rows, "sampled", "validation, sampled", "final"),
    ]
    if points_of(rows, "rollout/first_attempt_rate"):
        name = "validation, sampled, first attempt"
        series.append(validation_series(rows, "sampled", name, "warm", metric="first_attempt_rate"))
    note = _DRAWN.get(order, "").format(units=words.units)
    return make_chart(words.rate.capitalize(), series, Shape(_TRAINED, y_range=(0.0, 1.0), shares=True), note)


def reward_chart(rows: Rows) -> Chart | None:
    """Mean reward of training and validation episodes by iteration."""
    validation = validation_series(rows, "sampled", "validation, sampled", "final", metric="mean_return")
    series = [*with_mean(rows, "rollout/raw_reward", "training", "training"), validation]
    return make_chart("Reward", series, Shape(_TRAINED), "Mean per episode.")


def kind_chart(kinds: Mapping[Any, Rows], words: Words, by: str) -> Chart | None:
    """Training success by difficulty over the iterations, for the easiest, the hardest and some between.

    Args:
        kinds: rows `iteration`, `success` by difficulty, in its order.
        by: what the difficulty is.
    """
    lines = {str(kind).replace("_", " "): points_of(kinds[kind], "success") for kind in thin([*kinds], len(COLOURS))}
    series = [
        Series(name, colour, smooth(line, min(WINDOW, len(line) // 4 * 2 + 1)))
        for colour, (name, line) in zip(COLOURS, lines.items(), strict=False)
    ]
    shape = Shape(_TRAINED, y_range=(0.0, 1.0), shares=True)
    return make_chart(f"Training {words.rate} by {by}", series, shape, "Running means.") if len(series) > 1 else None


def parts_chart(rows: Rows, parts: Sequence[str]) -> Chart | None:
    """Parts of the training reward by iteration, mean per episode."""
    shown = [name for name in parts if any(y for _, y in points_of(rows, f"part/{name}"))]
    series = [
        Series(name.replace("_", " "), colour, smoothed_points(rows, f"part/{name}"))
        for colour, name in zip(COLOURS, shown, strict=False)
    ]
    return make_chart("Parts of the training reward", series, Shape(_TRAINED), "Mean per episode, before weights.")


def tags_chart(rows: Rows) -> Chart | None:
    """Shares of the training episodes with the most frequent tags, by iteration.

    Args:
        rows: see `training_episodes.tag_shares`.
    """
    totals = {name: sum(row[name] for row in rows) for name in (rows[0] if rows else ()) if name != "iteration"}
    shown = sorted(totals, key=lambda name: (-totals[name], name))[: len(COLOURS)]
    series = [
        Series(name.removeprefix("tag/").replace("_", " "), colour, smoothed_points(rows, name))
        for colour, name in zip(COLOURS, shown, strict=False)
    ]
    most = f"The {len(shown)} most frequent of {len(totals)}. " if len(totals) > len(shown) else ""
    note = f"{most}Shares of the episodes; an episode may have several."
    return make_chart("What goes wrong", series, Shape(_TRAINED, shares=True), note)


def length_chart(rows: Rows) -> Chart | None:
    """Response tokens of an episode by iteration: longest, mean, median, shortest."""
    series = [
        Series(name, colour, points_of(rows, f"rollout/response_len/{metric}"), style=style)
        for name, colour, metric, style in _LENGTHS
    ]
    return make_chart("Response tokens", series, Shape(_TRAINED), "Sampled tokens of an episode.")


def small_chart(title: str, series: Sequence[Series], note: str, shares: bool) -> Chart | None:
    """A small chart over the iterations; None where all values are 0."""
    shape = Shape("iteration", width=300, height=150, y_ticks=3, x_ticks=5, shares=shares)
    return make_chart(title, series, shape, note) if any(y for line in series for _, y in line.points) else None


def health_charts(rows: Rows, further: Iterable[tuple[str, str, str]] = ()) -> list[Chart]:
    """Small charts of the training diagnostics: metrics that were recorded and are not always 0.

    Args:
        further: of the task, `TaskReport.curves`.
    """
    charts = [
        small_chart(title, with_mean(rows, metric, title, "final"), note, note.startswith("share"))
        for metric, title, note in (*_HEALTH, *further)
    ]
    return [chart for chart in charts if chart is not None]


def warm_start_chart(history: Rows) -> Chart | None:
    """SFT loss by step, on training and held-out demonstrations."""
    series = [
        Series("training demonstrations", "warm", points_of(history, "loss", "step")),
        Series("held-out demonstrations", "final", points_of(history, "validation_loss", "step"), style="dots"),
    ]
    return make_chart("Warm start: SFT loss", series, Shape("step"), "Nats per response token.")


def run_facts(rows: Rows, history: Rows) -> list[tuple[str, str]]:
    """The run in a few (name, number) pairs; unrecorded ones are left out."""

    def total(*metrics: str, every: bool = False) -> float | None:
        """Sum over the iterations of a product of metrics; None where no iteration, or not every one, has them."""
        found = [[row[name] for name in metrics] for row in rows if all(is_number(row.get(name)) for name in metrics)]
        return sum(map(math.prod, found)) if found and (len(found) == len(rows) or not every) else None

    def each(*sums: float | None) -> float | None:
        """Cost of a training episode; None where it is not known."""
        return None if None in sums or not episodes else sum(filter(None, sums)) / episodes

    last = history[-1] if history else None
    start, episodes = last or {}, total("rollout/episodes", every=True)
    cpu = each(total("perf/cpu_time", every=True))
    wall = each(total("perf/rollout_time", every=True), total("perf/update_time", every=True))
    sampled = each(total("rollout/response_len/mean", "rollout/episodes", every=True))
    seen = each(total("perf/tokens_per_second", "perf/rollout_time", every=True))
    cost, unit = (wall, "seconds") if cpu is None else (cpu, "CPU-seconds")
    trained, steps = total("rollout/episodes"), total("train/steps")
    best = max(validation_series(rows, "sampled", "", "").points, key=lambda point: point[1], default=None)
    after, rate = best or (None, None)
    small = cost is not None and cost < 10
    facts: list[tuple[str, Any, str]] = [
        ("warm start", last, f"{plural(start.get('step'), 'step')}, {duration(start.get('seconds'))}"),
        ("its held-out loss at the end", last, number(start.get("validation_loss"), 3)),
        ("iterations", rows or None, count(len(rows))),
        ("training episodes", trained, count(trained)),
        ("optimizer steps", steps, count(steps)),
        ("an episode, rollout and update", cost, f"{significant(cost, 2) if small else count(cost)} {unit}"),
        ("its tokens", cost and seen and sampled, f"{number(seen, 1)}, of them {number(sampled, 1)} sampled"),
        ("best validation, sampled", best, f"{percent(rate)} after {plural(after, 'iteration')}"),
    ]
    return [(name, text) for name, known, text in facts if known is not None]


def validation_series(rows: Rows, mode: str, name: str, colour: str, metric: str = "solve_rate") -> Series:
    """One validation metric by the number of iterations trained."""

    def find(part: str) -> list[tuple[float, float]]:
        # The row of iteration 0 holds the validation before training under names of its own.
        later = points_of(rows, f"eval/validation/{mode}_{part}")
        return [*points_of(rows, f"eval/start/{mode}_{part}"), *((iteration + 1, value) for iteration, value in later)]

    points, lows, highs = find(metric), find("low"), find("high")
    spread: list[tuple[float, float]] = []
    if metric == "solve_rate" and mode == "sampled" and len(points) == len(lows) == len(highs):
        spread = [(low, high) for (_, low), (_, high) in zip(lows, highs, strict=True)]
    return Series(name, colour, points, spread, "dots")
