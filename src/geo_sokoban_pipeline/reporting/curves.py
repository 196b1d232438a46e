"""Curves of a run: its metrics as charts. A metric that was not recorded leaves its chart out, never an error."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from geo_sokoban_pipeline.reporting.charts import Chart, Series, Shape, draw_chart, smooth
from geo_sokoban_pipeline.reporting.formats import count, duration, is_number, number, percent
from geo_sokoban_pipeline.tasks import SOKOBAN, Words

Rows = Sequence[dict[str, Any]]
_SMOOTHED_FROM = 40  # iterations; shorter curves are readable as they are
_SMALL = {"width": 300, "height": 150, "left": 44, "bottom": 34, "y_ticks": 3, "x_ticks": 5}
# Metric, title, and what a reader looks for.
_HEALTH = (
    ("train/entropy_loss", "Entropy", "nats per token; 0 means that exploring has ended"),
    ("train/ppo_kl", "Change per step", "mean |log ratio| to the policy that played"),
    ("train/pg_clipfrac", "Clipped tokens", "share of the tokens trained"),
    ("train/grad_norm", "Gradient norm", "before clipping"),
    ("train/kl_loss", "KL to the warm start", "nats per token"),
    ("rollout/trained_ratio", "Episodes trained", "share that the filter of groups let through"),
    ("rollout/response_len/mean", "Reply tokens", "mean per episode"),
    ("rollout/truncated_ratio", "Truncated episodes", "share"),
    ("rollout/answered", "Episodes with an answer", "share"),
    ("rollout/tool_calls/mean", "Tool calls", "replies that try one, mean per episode"),
    ("rollout/grading_timeouts", "Gradings out of time", "share of the episodes"),
    (
        "train/train_rollout_logprob_abs_diff",
        "Trainer − engine",
        "mean gap of log-probs; later optimizer steps widen it",
    ),
    ("perf/tokens_per_second", "Rollout speed", "tokens per second, pictures included"),
    ("perf/memory_gb", "Memory", "GB, of the run and its helping processes"),
)
_SHARES = (
    "train/pg_clipfrac",
    "rollout/trained_ratio",
    "rollout/truncated_ratio",
    "rollout/answered",
    "rollout/grading_timeouts",
)


def points_of(rows: Rows, metric: str, x: str = "iteration") -> list[tuple[float, float]]:
    """(x, value) of the rows that have both."""
    return [(float(row[x]), float(row[metric])) for row in rows if is_number(row.get(x)) and is_number(row.get(metric))]


def success_chart(rows: Rows, words: Words = SOKOBAN.words) -> Chart | None:
    """Training success and validation rates by iteration, with Wilson intervals of the sampled one; first attempts too,
    where episodes have several.
    """
    series = [
        *_with_mean(points_of(rows, "rollout/success_rate"), "training", "training"),
        validation_series(rows, "greedy", "validation, greedy", "greedy"),
        validation_series(rows, "sampled", "validation, sampled", "final"),
    ]
    if points_of(rows, "rollout/first_attempt_rate"):
        name = "validation, sampled, first attempt"
        series.append(validation_series(rows, "sampled", name, "warm", metric="first_attempt_rate"))
    note = f"Training draws its {words.units} by difficulty, so the two kinds of curve differ."
    shape = Shape("iteration", y_range=(0.0, 1.0), shares=True)
    return draw_chart(words.rate.capitalize(), series, shape, note)


def reward_chart(rows: Rows) -> Chart | None:
    """Mean reward of training and validation episodes by iteration."""
    validation = validation_series(rows, "sampled", "validation, sampled", "final", metric="mean_return")
    series = [*_with_mean(points_of(rows, "rollout/raw_reward"), "training", "training"), validation]
    return draw_chart("Reward", series, Shape("iteration"), "Mean per episode.")


def health_charts(rows: Rows) -> list[Chart]:
    """Small charts that tell a healthy run from a sick one: metrics that were recorded and ever differ from 0."""
    charts = []
    for metric, title, note in _HEALTH:
        points = points_of(rows, metric)
        if not any(y for _, y in points):
            continue
        series = _with_mean(points, title, "final")
        shape = Shape("iteration", shares=metric in _SHARES, **_SMALL)  # type: ignore[arg-type]
        charts.append(draw_chart(title, series, shape, note))
    return [chart for chart in charts if chart is not None]


def warm_start_chart(history: Rows) -> Chart | None:
    """Imitation loss by step, on demonstrations that were trained and on held-out levels."""
    series = [
        Series("training demonstrations", "warm", points_of(history, "loss", "step")),
        Series("held-out demonstrations", "final", points_of(history, "validation_loss", "step"), style="dots"),
    ]
    return draw_chart("Warm start: imitation loss", series, Shape("step"), "Nats per reply token.")


def run_facts(rows: Rows, history: Rows) -> list[tuple[str, str]]:
    """The run in a few (name, number) pairs; those that were not recorded are left out."""
    facts: list[tuple[str, str | None]] = []
    if history:
        last = history[-1]
        facts.append(("warm start", f"{count(last.get('step'))} steps, {duration(last.get('seconds'))}"))
        facts.append(("imitation loss at its end", number(last.get("validation_loss"), 3)))
    if rows:
        facts += [
            ("iterations", count(len(rows))),
            ("training episodes", _total(rows, "rollout/episodes", count)),
            ("optimizer steps", _total(rows, "train/steps", count)),
            ("time in iterations", _total(rows, "perf/step_time", duration)),
        ]
        best = max(validation_series(rows, "sampled", "", "").points, key=lambda point: point[1], default=None)
        facts.append(("best validation, sampled", best and f"{percent(best[1])} at iteration {best[0]:.0f}"))
    return [(name, value) for name, value in facts if value]


def _total(rows: Rows, metric: str, write: Callable[[float | None], str]) -> str | None:
    values = [row[metric] for row in rows if is_number(row.get(metric))]
    return write(sum(values)) if values else None


def validation_series(rows: Rows, mode: str, name: str, colour: str, metric: str = "solve_rate") -> Series:
    """One validation metric over the iterations trained before it."""
    points: list[tuple[float, float]] = []
    spread: list[tuple[float, float]] = []
    # The row of iteration 0 holds the validation before training under names of its own.
    for prefix, trained in ((f"eval/start/{mode}", 0), (f"eval/validation/{mode}", 1)):
        value, low, high = (f"{prefix}_{part}" for part in (metric, "low", "high"))
        for row in rows:
            if is_number(row.get(value)) and is_number(row.get("iteration")):
                points.append((float(row["iteration"]) + trained, float(row[value])))
                if is_number(row.get(low)) and is_number(row.get(high)):
                    spread.append((float(row[low]), float(row[high])))
    if metric != "solve_rate" or mode != "sampled" or len(spread) < len(points):
        spread = []
    return Series(name, colour, points, spread, "dots")


def _with_mean(points: list[tuple[float, float]], name: str, colour: str) -> list[Series]:
    """One line; for long curves the raw values faintly, and their running mean."""
    if len(points) < _SMOOTHED_FROM:
        return [Series(name, colour, points)]
    return [Series(name, colour, points, style="faint"), Series(f"{name} (mean of 9)", colour, smooth(points, 9))]
