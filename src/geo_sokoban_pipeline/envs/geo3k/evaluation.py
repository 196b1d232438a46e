"""Evaluation of geometry: records of answers, and their entries in the summary.

Accuracy is of the last answer of an episode. First attempts are counted apart, because later ones use the scoring
tool's feedback. Every share stands beside its counts, or is None where there are none.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from geo_sokoban_pipeline.envs.metrics import (
    EpisodeRecord,
    FinishedEpisode,
    clusters_of,
    count_solved,
    mean_of,
    read_record,
)
from geo_sokoban_pipeline.rewards.math_answer.default import extract_answer
from geo_sokoban_pipeline.rewards.text import assistant_text

BREAKDOWNS = ("family", "answer_form", "difficulty")  # columns of the prompts
_UNKNOWN = "unknown"  # label of rows without the column


@dataclass(frozen=True)
class AnswerRecord(EpisodeRecord):
    """Record of one episode in the evaluation.

    Attributes:
        first_attempt: the first answer is correct; in episodes with one response the same as the last. None: there were
            several, and the environment does not report `first_attempt_correct`.
        answered: whether there is an answer at all.
        tool_calls, valid_tool_calls: responses that try a call, and those whose answer was scored.
        plausible: whether the last answer is that of one of the problem's plausible rules; None where none are known.
        tokens: number of sampled tokens; None for baselines.
        truncated: cut off at a limit.
        repetition: ends in repetition.
        labels: of the problem, by the columns of `BREAKDOWNS`.
    """

    first_attempt: bool | None
    answered: bool
    tool_calls: int
    valid_tool_calls: int
    plausible: bool | None
    tokens: int | None
    truncated: bool
    repetition: bool
    labels: Mapping[str, str]


def record_answer(episode: FinishedEpisode) -> AnswerRecord:
    """Record of an episode for the summary."""
    metrics, row = episode.metrics, episode.row
    return AnswerRecord(
        **read_record(episode),
        first_attempt=_first_attempt(episode),
        answered=metrics.get("has_answer", 0.0) >= 0.5,
        tool_calls=int(metrics.get("tool_calls", 0.0)),
        valid_tool_calls=int(metrics.get("valid_tool_calls", 0.0)),
        plausible=_is_plausible(episode),
        tokens=episode.tokens,
        truncated=episode.truncated,
        repetition=metrics.get("repetition", 0.0) >= 0.5,
        labels={column: str(row.get(column) or _UNKNOWN) for column in BREAKDOWNS},
    )


def summarise_answers(records: Sequence[AnswerRecord]) -> dict[str, Any]:
    """Entries of a row of the summary about answers.

    Returns:
        `first_attempt` (the entries of `count_solved`; None where an episode's is unknown),
        `answered_share`, `plausible_share` (of the episodes whose rules are known), `tools` (`called_share` of the
        episodes, `calls` per episode, `valid_share` of the calls), `responses` (`tokens_mean`, `tokens_median`,
        `tokens_max`, `truncated_share`, `repetition_share`; None for baselines), and `breakdowns`: by column a
        list of `label`, the entries of `count_solved`, `first_attempts` (correct ones).
    """
    judged = [record.plausible for record in records if record.plausible is not None]
    first = [record.first_attempt for record in records]
    return {
        "first_attempt": None if None in first else count_solved([bool(one) for one in first], clusters_of(records)),
        "answered_share": mean_of([float(record.answered) for record in records]),
        "plausible_share": mean_of([float(value) for value in judged]),
        "tools": _describe_tools(records),
        "responses": _describe_responses(records),
        "breakdowns": _break_down(records),
    }


def _first_attempt(episode: FinishedEpisode) -> bool | None:
    metrics = episode.metrics
    if "first_attempt_correct" not in metrics and metrics.get("success") and len(episode.responses) > 1:
        return None  # solved, but by an unknown response
    return metrics.get("first_attempt_correct", metrics.get("success", 0.0)) >= 0.5


def _is_plausible(episode: FinishedEpisode) -> bool | None:
    candidates = episode.row.get("candidates")
    labels = {_plain(one["label"]) for one in candidates} if candidates is not None else set()
    if not labels:
        return None
    answer = extract_answer(assistant_text(episode.responses))
    return answer is not None and _plain(answer) in labels


def _plain(label: str) -> str:
    return label.replace(" ", "")


def _describe_tools(records: Sequence[AnswerRecord]) -> dict[str, float | None]:
    calls = sum(record.tool_calls for record in records)
    valid = sum(record.valid_tool_calls for record in records)
    return {
        "called_share": mean_of([float(record.tool_calls > 0) for record in records]),
        "calls": calls / len(records) if records else None,
        "valid_share": valid / calls if calls else None,
    }


def _describe_responses(records: Sequence[AnswerRecord]) -> dict[str, float | None] | None:
    if not (tokens := [record.tokens for record in records if record.tokens is not None]):
        return None
    return {
        "tokens_mean": mean_of(tokens),
        "tokens_median": float(median(tokens)),
        "tokens_max": float(max(tokens)),
        "truncated_share": mean_of([float(record.truncated) for record in records]),
        "repetition_share": mean_of([float(record.repetition) for record in records]),
    }


def _break_down(records: Sequence[AnswerRecord]) -> dict[str, list[dict[str, Any]]]:
    """By column, the labels in alphabetic order."""
    groups: dict[str, dict[str, list[AnswerRecord]]] = defaultdict(lambda: defaultdict(list))
    for record in records:
        for column, label in record.labels.items():
            groups[column][label].append(record)
    return {column: [_cell(label, members) for label, members in sorted(by.items())] for column, by in groups.items()}


def _cell(label: str, members: Sequence[AnswerRecord]) -> dict[str, Any]:
    counts = count_solved([record.success for record in members], clusters_of(members))
    return {"label": label, **counts, "first_attempts": sum(bool(record.first_attempt) for record in members)}
