"""Solve rates of a study: counts in, rates, intervals, differences and verdicts on criteria out.

A difference is taken within a seed, never between means, and "apart" is said of intervals that do not touch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any, cast

from geo_sokoban_pipeline.envs.metrics import wilson_interval
from geo_sokoban_pipeline.envs.report import TaskReport
from geo_sokoban_pipeline.formats import DASH, number, percent, signed

Row = Mapping[str, Any]
_ROUNDING = 1e-9  # of differences of shares


@dataclass(frozen=True)
class Rate:
    """A solve rate with its counts and 95 % Wilson interval, all shares."""

    solved: int
    episodes: int

    @property
    def share(self) -> float:
        """Solved episodes of all."""
        return self.solved / self.episodes

    @property
    def ends(self) -> tuple[float, float]:
        """The interval."""
        return wilson_interval(self.solved, self.episodes)

    def write(self, digits: int = 1) -> str:
        """`59.1 % [55.2–62.8]`."""
        low, high = (f"{end * 100:.{digits}f}" for end in self.ends)
        return f"{percent(self.share, digits)} [{low}–{high}]"


@dataclass(frozen=True)
class Verdict:
    """One criterion for one seed: the measured value as text, and whether it is met (None: not measured)."""

    text: str
    met: bool | None

    def write(self) -> str:
        """`+24.1: met`."""
        return self.text if self.met is None else f"{self.text}: {'met' if self.met else '**not met**'}"


def find_rate(rows: Iterable[Row], player: str, mode: str, measure: str = "solved") -> Rate | None:
    """Rate of a player in a mode; players without modes have the same in both.

    Args:
        measure: `solved`, or `first_attempt` where the rows know it.
    """
    counted = {"solved": "solved", "first_attempt": "first_attempts"}[measure]
    for row in rows:
        if row["player"] == player and row["mode"] in (mode, "-") and row["episodes"] and row.get(counted) is not None:
            return Rate(row[counted], row["episodes"])
    return None


def find_share(rows: Iterable[Row], player: str, mode: str, name: str) -> float | None:
    """A share in [0, 1] that a row has besides its counts, such as `plausible_share`; None where it has none."""
    found = (row.get(name) for row in rows if row["player"] == player and row["mode"] in (mode, "-"))
    return cast("float | None", next(found, None))


def rates_by(seeds: Sequence[Mapping[str, Any]], player: str, mode: str, column: str) -> dict[Any, list[Rate]]:
    """Rates by the kind of prompt, one for each seed that has the row.

    The seeds play the same prompts: their episodes together would be no larger sample of prompts.

    Args:
        column: `by_length`, or a column of the row's `breakdowns`.
    """
    rates: dict[Any, list[Rate]] = {}
    for row in (row for seed in seeds for row in seed["rows"]):
        if row["player"] == player and row["mode"] in (mode, "-"):
            for label, solved, episodes in row[column] if column in row else row["breakdowns"].get(column, []):
                if episodes:
                    rates.setdefault(label, []).append(Rate(solved, episodes))
    return dict(sorted(rates.items()))


def mean_share(rates: Iterable[Rate | None]) -> float | None:
    """Mean of the seeds' rates; None where one of them is missing."""
    known = list(rates)
    return fmean(rate.share for rate in known if rate) if known and all(known) else None


def judge_criterion(bar: Mapping[str, Any], rows: Sequence[Row]) -> Verdict:
    """Whether one seed's rows meet a criterion (`BarOptions` as JSON)."""
    mode = bar.get("mode", "sampled")
    measure = bar.get("measure", "solved")
    rate = find_rate(rows, bar["player"], mode, measure)
    other = find_rate(rows, bar["over"], mode, measure) if bar.get("over") else None
    if rate is None or (bar.get("over") and other is None):
        return Verdict(DASH, None)
    value = 100 * (rate.share - (other.share if other else 0.0))
    met = _within(value, bar)
    text = signed(value, 1) if other else number(value, 1)
    if bar.get("apart") and other is not None:
        upper, lower = (rate, other) if value >= 0 else (other, rate)
        apart = upper.ends[0] > lower.ends[1]
        met = met and apart
        text += ", apart" if apart else ", intervals overlap"
    return Verdict(text, met)


def judge_minutes(minutes: float | None, most: float, workers: int = 1) -> Verdict:
    """Whether a whole run stayed within its budget; one that was interrupted, or not alone, has no time of its own.

    Args:
        workers: runs side by side.
    """
    if workers > 1:
        return Verdict(f"{DASH} (not alone)", None)
    if minutes is None:
        return Verdict(f"{DASH} (was interrupted)", None)
    return Verdict(number(minutes, 1), minutes <= most)


def find_growth(memory: Sequence[Sequence[float]]) -> float | None:
    """Percent by which a run's memory grew between two iterations, [iteration, GB] each; None where it has fewer."""
    return 100 * (memory[1][1] / memory[0][1] - 1) if memory else None


def describe_growth(memory: Sequence[Sequence[float]]) -> str:
    """The same as text: `+1.4 % (1.91 to 1.93 GB)`."""
    if not memory:
        return f"{DASH} (too few iterations)"
    (_, early), (_, late) = memory
    return f"{signed(find_growth(memory), 1)} % ({early:.2f} to {late:.2f} GB)"


def judge_growth(memory: Sequence[Sequence[float]], most: float) -> Verdict:
    """Whether the memory of a run grew by so many percent at most."""
    growth = find_growth(memory)
    return Verdict(describe_growth(memory), None if growth is None else growth <= most + _ROUNDING)


def judge_spent(seed: Mapping[str, Any], control: str, least: float) -> Verdict:
    """Whether a control has had the CPU-seconds of GRPO, as a share of them."""
    spent, grpo = seed["cpu_seconds"].get(control), seed["cpu_seconds"].get("grpo")
    return Verdict(DASH, None) if spent is None or not grpo else Verdict(number(spent / grpo), spent / grpo >= least)


def describe_criterion(bar: Mapping[str, Any], report: TaskReport) -> str:
    """A criterion in words."""
    mode = bar.get("mode", "sampled")
    first = ", first attempt" if bar.get("measure") == "first_attempt" else ""
    name = report.row_label(bar["player"], mode) + first
    bound = f"at least {bar['at_least']:g}" if "at_least" in bar else f"at most {bar['at_most']:g}"
    if not bar.get("over"):
        return f"{name}: {bound} %"
    apart = ", intervals apart" if bar.get("apart") else ""
    return f"{name}: {bound} points above {report.row_label(bar['over'], '-')}{apart}"


def _within(value: float, bar: Mapping[str, Any]) -> bool:
    low, high = bar.get("at_least"), bar.get("at_most")
    return (low is None or value >= low - _ROUNDING) and (high is None or value <= high + _ROUNDING)
