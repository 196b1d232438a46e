"""Curves of a run: its metrics as charts. A metric that was not recorded leaves its chart out and is never an error."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from geo_sokoban_pipeline.envs.base import Words
from geo_sokoban_pipeline.formats import count, duration, is_number, number, percent, plural, significant
from geo_sokoban_pipeline.reporting.charts import Chart, Series, Shape, draw_chart, smooth

Rows = Sequence[dict[str, Any]]
SMOOTHED_FROM = 40  # iterations; shorter curves are readable as they are
_TRAINED = "iterations trained"  # equals the policy version
# Metric, title, note; one that begins with `share` gives the axis of a share.
_HEALTH = (
    ("train/entropy_loss", "Entropy", "nats per token; 0: no exploration is left"),
    ("train/ppo_kl", "KL to the rollout policy", "mean |log-ratio| per token, in the update"),
    ("train/kl_loss", "KL to the reference policy", "nats per token"),
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
_PARTS = ("final", "warm", "greedy", "legal", "solver", "random")  # colours of the parts of a reward
_LENGTH = "rollout/response_len/"
_DRAWN = {
    "solve_rate": "Training samples {units} by the solve rate of their kind, so training and validation curves differ.",
    "prompt_solve_rate": "Training samples {units} by their solve rates, so training and validation curves differ.",
}


def points_of(rows: Rows, metric: str, x: str = "iteration") -> list[tuple[float, float]]:
    """(x, value) of the rows that have both."""
    return [(float(row[x]), float(row[metric])) for row in rows if is_number(row.get(x)) and is_number(row.get(metric))]


def success_chart(rows: Rows, words: Words, order: str = "shuffle") -> Chart | None:
    """Training success and validation rates by iteration, with 95 % intervals of the sampled one; first attempts too,
    where episodes have several.

    Args:
        order: rule by which training draws its prompts, `prompts.order`.
    """
    series = [
        *_with_mean(points_of(rows, "rollout/success_rate"), "training", "training"),
        validation_series(rows, "greedy", "validation, greedy", "greedy"),
        validation_series(rows, "sampled", "validation, sampled", "final"),
    ]
    if points_of(rows, "rollout/first_attempt_rate"):
        name = "validation, sampled, first attempt"
        series.append(validation_series(rows, "sampled", name, "warm", metric="first_attempt_rate"))
    note = _DRAWN.get(order, "").format(units=words.units)
    shape = Shape(_TRAINED, y_range=(0.0, 1.0), shares=True)
    return draw_chart(words.rate.capitalize(), series, shape, note)


def reward_chart(rows: Rows) -> Chart | None:
    """Mean reward of training and validation episodes by iteration."""
    validation = validation_series(rows, "sampled", "validation, sampled", "final", metric="mean_return")
    series = [*_with_mean(points_of(rows, "rollout/raw_reward"), "training", "training"), validation]
    return draw_chart("Reward", series, Shape(_TRAINED), "Mean per episode.")


def kind_chart(kinds: Mapping[Any, Rows], words: Words, by: str) -> Chart | None:
    """Training success by difficulty over the iterations, for the easiest, the hardest and some between.

    Args:
        kinds: rows `iteration`, `success` by difficulty, in its order.
        by: what the difficulty is.
    """
    shown = list(kinds)
    if len(shown) > len(_PARTS):
        shown = [shown[round(at * (len(shown) - 1) / (len(_PARTS) - 1))] for at in range(len(_PARTS))]
    series = []
    for colour, kind in zip(_PARTS, shown, strict=False):
        line = points_of(kinds[kind], "success")
        window = min(9, len(line) // 4 * 2 + 1)
        series.append(Series(str(kind).replace("_", " "), colour, smooth(line, window)))
    shape = Shape(_TRAINED, y_range=(0.0, 1.0), shares=True)
    title = f"Training {words.rate} by {by}"
    return draw_chart(title, series, shape, "Running means.") if len(series) > 1 else None


def parts_chart(rows: Rows, parts: Sequence[str]) -> Chart | None:
    """Parts of the training reward by iteration, mean per episode."""
    lines = [(name, points_of(rows, f"part/{name}")) for name in parts]
    lines = [(name, line) for name, line in lines if any(y for _, y in line)]
    series = [
        Series(name.replace("_", " "), colour, _smoothed(line))
        for colour, (name, line) in zip(_PARTS, lines, strict=False)
    ]
    return draw_chart("Parts of the training reward", series, Shape(_TRAINED), "Mean per episode, before weights.")


def tags_chart(rows: Rows) -> Chart | None:
    """Shares of the training episodes with the most frequent tags, by iteration.

    Args:
        rows: see `training_episodes.tag_shares`.
    """
    totals = {name: sum(row[name] for row in rows) for name in (rows[0] if rows else ()) if name != "iteration"}
    shown = sorted(totals, key=lambda name: (-totals[name], name))[: len(_PARTS)]
    series = [
        Series(name.removeprefix("tag/").replace("_", " "), colour, _smoothed(points_of(rows, name)))
        for colour, name in zip(_PARTS, shown, strict=False)
    ]
    note = "Shares of the episodes; an episode may have several."
    if len(totals) > len(shown):
        note = f"The {len(shown)} most frequent of {len(totals)}. {note}"
    return draw_chart("What goes wrong", series, Shape(_TRAINED, shares=True), note)


def length_chart(rows: Rows) -> Chart | None:
    """Response tokens of an episode by iteration: longest, mean, median, shortest."""
    spread = {name: points_of(rows, f"{_LENGTH}{name}") for name in ("max", "mean", "median", "min")}
    series = [
        Series("longest", "random", spread["max"], style="faint"),
        Series("shortest", "random", spread["min"], style="faint"),
        Series("median", "greedy", spread["median"]),
        Series("mean", "final", spread["mean"]),
    ]
    return draw_chart("Response tokens", series, Shape(_TRAINED), "Sampled tokens of an episode.")


def small_shape(shares: bool) -> Shape:
    """Shape of a small chart over the iterations."""
    return Shape("iteration", width=300, height=150, y_ticks=3, x_ticks=5, shares=shares)


def health_charts(rows: Rows, further: Iterable[tuple[str, str, str]] = ()) -> list[Chart]:
    """Small charts of the training diagnostics: metrics that were recorded and are not always 0.

    Args:
        further: of the task, `TaskReport.curves`.
    """
    charts = []
    for metric, title, note in (*_HEALTH, *further):
        points = points_of(rows, metric)
        if not any(y for _, y in points):
            continue
        # A schedule has no noise to average out.
        smooth_it = metric != "train/lr-pg_0"
        series = _with_mean(points, title, "final") if smooth_it else [Series(title, "final", points)]
        charts.append(draw_chart(title, series, small_shape(note.startswith("share")), note))
    return [chart for chart in charts if chart is not None]


def warm_start_chart(history: Rows) -> Chart | None:
    """SFT loss by step, on training and held-out demonstrations."""
    series = [
        Series("training demonstrations", "warm", points_of(history, "loss", "step")),
        Series("held-out demonstrations", "final", points_of(history, "validation_loss", "step"), style="dots"),
    ]
    return draw_chart("Warm start: SFT loss", series, Shape("step"), "Nats per response token.")


def run_facts(rows: Rows, history: Rows, seconds: float | None = None) -> list[tuple[str, str]]:
    """The run in a few (name, number) pairs; unrecorded ones are left out.

    Args:
        seconds: of all its commands together.
    """
    facts: list[tuple[str, str | None]] = []
    if history:
        last = history[-1]
        facts.append(("warm start", f"{plural(last.get('step'), 'step')}, {duration(last.get('seconds'))}"))
        facts.append(("its held-out loss at the end", number(last.get("validation_loss"), 3)))
    if rows:
        facts += [
            ("iterations", count(len(rows))),
            ("training episodes", _total(rows, "rollout/episodes", count)),
            ("optimizer steps", _total(rows, "train/steps", count)),
        ]
        facts += _episode_costs(rows)
        best = max(validation_series(rows, "sampled", "", "").points, key=lambda point: point[1], default=None)
        trained = best and plural(best[0], "iteration")
        facts.append(("best validation, sampled", best and f"{percent(best[1])} after {trained}"))
    if seconds is not None:
        facts.append(("total time", duration(seconds)))
    return [(name, value) for name, value in facts if value]


def _episode_costs(rows: Rows) -> list[tuple[str, str]]:
    """Mean cost of a training episode: time of rollout and update, and tokens."""

    def mean(cost: Callable[[Mapping[str, Any]], float]) -> float | None:
        try:
            return sum(cost(row) for row in rows) / sum(row["rollout/episodes"] for row in rows)
        except (KeyError, TypeError, ZeroDivisionError):  # a row lacks a number, as those of older versions may
            return None

    cpu = mean(lambda row: row["perf/cpu_time"])
    wall = mean(lambda row: row["perf/rollout_time"] + row["perf/update_time"])
    sampled = mean(lambda row: row["rollout/response_len/mean"] * row["rollout/episodes"])
    seen = mean(lambda row: row["perf/tokens_per_second"] * row["perf/rollout_time"])
    time, unit = (wall, "seconds") if cpu is None else (cpu, "CPU-seconds")
    costs = (
        []
        if time is None
        else [("an episode, rollout and update", f"{significant(time, 2) if time < 10 else count(time)} {unit}")]
    )
    if sampled is not None and seen is not None:
        costs.append(("its tokens", f"{number(seen, 1)}, of them {number(sampled, 1)} sampled"))
    return costs


def _total(rows: Rows, metric: str, write: Callable[[float | None], str]) -> str | None:
    values = [row[metric] for row in rows if is_number(row.get(metric))]
    return write(sum(values)) if values else None


def validation_series(rows: Rows, mode: str, name: str, colour: str, metric: str = "solve_rate") -> Series:
    """One validation metric by the number of iterations trained."""
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


def _smoothed(line: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """A running mean of 9 of long curves."""
    return smooth(line, 9) if len(line) >= SMOOTHED_FROM else line


def _with_mean(points: list[tuple[float, float]], name: str, colour: str) -> list[Series]:
    """One line; of long curves the raw values as a faint line, and their running mean."""
    if len(points) < SMOOTHED_FROM:
        return [Series(name, colour, points)]
    return [Series(name, colour, points, style="faint"), Series(f"{name} (mean of 9)", colour, smooth(points, 9))]
