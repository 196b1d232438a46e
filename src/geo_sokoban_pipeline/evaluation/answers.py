"""Evaluation of geometry: records of answers, and rows of the summary made from them.

Accuracy is of the last answer of an episode; what the first attempt was worth stands apart, so that nobody takes what a
scoring tool has told for what a policy has seen. Every share stands beside its counts, or is None where there are none.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from geo_sokoban_pipeline.config.grpo import TrainOptions
from geo_sokoban_pipeline.evaluation.metrics import Disguise, Ending, Rows, count_solved, mean_of, pass_at_k_by_prompt
from geo_sokoban_pipeline.rewards.geo3k import assistant_text
from geo_sokoban_pipeline.rewards.math_answer.default import extract_answer
from geo_sokoban_pipeline.seeding import python_generator
from geo_sokoban_pipeline.tasks import GEO3K

_UNKNOWN = "unknown"  # label of rows that do not say


@dataclass(frozen=True)
class AnswerRecord:
    """What the evaluation keeps of one episode.

    Attributes:
        prompt_id: of the problem; episodes of one problem share it.
        success: the last answer is correct; failed and aborted episodes count as not correct.
        first_attempt: the first one is; in episodes with one reply the same. None: there were several, and the
            environment does not report `first_attempt_correct`.
        ret: episode reward; None where it was not graded.
        turns: replies of the policy, 0 or more.
        invalid_turns: replies with neither an answer nor a call that could be scored.
        answered: whether there is an answer at all.
        tool_calls, valid_tool_calls: replies that try a call, and those whose answer was scored.
        plausible: whether the last answer is that of one of the problem's plausible rules; None where none are known.
        tokens: that the policy wrote; None where none played.
        truncated: cut off at a limit. repetition: ends in repetition.
        labels: of the problem, by the columns that the tasks of this world are broken down by.
    """

    prompt_id: str
    success: bool
    first_attempt: bool | None
    ret: float | None
    turns: int
    invalid_turns: int
    answered: bool
    tool_calls: int
    valid_tool_calls: int
    plausible: bool | None
    tokens: int | None
    truncated: bool
    repetition: bool
    labels: Mapping[str, str]


def record_answer(ending: Ending) -> AnswerRecord:
    """What the summary keeps of an episode."""
    metrics, row = ending.metrics, ending.row
    success = metrics.get("success", 0.0) >= 0.5
    return AnswerRecord(
        prompt_id=str(row["id"]),
        success=success,
        first_attempt=_first_attempt(ending),
        ret=ending.ret,
        turns=int(ending.metrics.get("turns", len(ending.replies))),
        invalid_turns=int(metrics.get("invalid_turns", 0.0)),
        answered=metrics.get("has_answer", 0.0) >= 0.5,
        tool_calls=int(metrics.get("tool_calls", 0.0)),
        valid_tool_calls=int(metrics.get("valid_tool_calls", 0.0)),
        plausible=_is_plausible(ending),
        tokens=ending.tokens,
        truncated=ending.truncated,
        repetition=metrics.get("repetition", 0.0) >= 0.5,
        labels={column: str(row.get(column) or _UNKNOWN) for column in GEO3K.breakdowns},
    )


def summarise_answers(
    records: Sequence[AnswerRecord], *, policy: str = "final", mode: str = "sampled"
) -> dict[str, Any]:
    """One row of the evaluation summary.

    Returns:
        As of all worlds `policy`, `mode`, `episodes`, `solved`, `solve_rate`, `low`, `high`, `mean_return`,
        `invalid_share` (of turns) and `pass_at_k`. Then `first_attempt` (`episodes`, `solved`, `solve_rate`, `low`,
        `high`; None where an episode's is unknown), `answered_share`, `plausible_share` (of the episodes whose rules
        are known), `tools` (`called_share` of the episodes, `calls` per episode, `valid_share` of the calls),
        `responses` (`tokens_mean`, `tokens_median`, `tokens_max`, `truncated_share`, `repetition_share`; None where no
        policy played), and `breakdowns`: by column a list of `label`, `episodes`, `solved`, `solve_rate`, `low`,
        `high`, `first_attempts` (correct ones).
    """
    turns = sum(record.turns for record in records)
    judged = [record.plausible for record in records if record.plausible is not None]
    first = [record.first_attempt for record in records]
    return {
        "policy": policy,
        "mode": mode,
        **count_solved([record.success for record in records]),
        "mean_return": mean_of([record.ret for record in records if record.ret is not None]),
        "invalid_share": sum(record.invalid_turns for record in records) / turns if turns else None,
        "pass_at_k": pass_at_k_by_prompt(records),
        "first_attempt": None if None in first else count_solved([bool(one) for one in first]),
        "answered_share": mean_of([float(record.answered) for record in records]),
        "plausible_share": mean_of([float(value) for value in judged]),
        "tools": _describe_tools(records),
        "responses": _describe_responses(records),
        "breakdowns": _break_down(records),
    }


def answer_numbers(row: Mapping[str, Any]) -> dict[str, float | None]:
    """Numbers of a row that a validation reports."""
    responses = row["responses"] or {}
    return {
        **{name: row[name] for name in ("solve_rate", "low", "high", "mean_return", "invalid_share")},
        "first_attempt_rate": (row["first_attempt"] or {}).get("solve_rate"),
        "answered_share": row["answered_share"],
        "plausible_share": row["plausible_share"],
        "called_share": row["tools"]["called_share"],
        "response_tokens": responses.get("tokens_mean"),
        "truncated_share": responses.get("truncated_share"),
    }


def describe_problems(prompts: Rows, options: TrainOptions) -> dict[str, Any]:
    """What was played: `families` and distinct `answers` among the problems, and `turn_limit`."""
    return {
        "families": len({row.get("family") for row in prompts} - {None}),
        "answers": len({row.get("answer") for row in prompts}),
        "turn_limit": options.rollout.max_turns,
    }


def answer_disguises(prompts: Rows, options: TrainOptions, seed: int) -> list[Disguise]:
    """Blank pictures and other problems' pictures, where the options say so."""
    evaluation = options.evaluation
    blank = [Disguise("_blank", True, prompts)] if evaluation.blank_images else []
    shuffled = getattr(evaluation, "shuffled_images", False)
    return [*blank, Disguise("_shuffled", False, shuffle_pictures(prompts, seed))] if shuffled else blank


def shuffle_pictures(prompts: Rows, seed: int) -> list[dict[str, Any]]:
    """Prompts with the pictures of another problem, which has as many of them; a lone one keeps its own.

    The pictures are the same in number and kind, so a policy that does without them loses nothing.
    """
    groups: dict[int, list[int]] = defaultdict(list)
    for index, row in enumerate(prompts):
        groups[len(row.get("images") or [])].append(index)
    shown = list(prompts)
    for members in groups.values():
        order = list(members)
        python_generator(seed, "shuffled pictures", len(order)).shuffle(order)
        for index, other in zip(order, order[1:] + order[:1], strict=True):
            shown[index] = {**prompts[index], "images": prompts[other].get("images")}
    return shown


def _first_attempt(ending: Ending) -> bool | None:
    metrics = ending.metrics
    if "first_attempt_correct" not in metrics and metrics.get("success") and len(ending.replies) > 1:
        return None  # solved, and nobody says with which reply
    return metrics.get("first_attempt_correct", metrics.get("success", 0.0)) >= 0.5


def _is_plausible(ending: Ending) -> bool | None:
    candidates = ending.row.get("candidates")
    labels = {_plain(one["label"]) for one in candidates} if candidates is not None else set()
    if not labels:
        return None
    answer = extract_answer(assistant_text(ending.replies))
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
    tokens = [record.tokens for record in records if record.tokens is not None]
    if not tokens:
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
    counts = count_solved([record.success for record in members])
    return {"label": label, **counts, "first_attempts": sum(bool(record.first_attempt) for record in members)}
