"""Evaluation of geometry: records of answers, their entries in the summary, and tags of how a response goes wrong.

Accuracy is of the last answer of an episode. First attempts are counted apart, because later ones use the scoring
tool's feedback. Every share stands beside its counts, or is None where there are none.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Any

from geo_sokoban_pipeline.envs.geo3k.tool_call import CALL_MARK, call_answers, without_calls
from geo_sokoban_pipeline.envs.metrics import (
    EpisodeRecord,
    FinishedEpisode,
    clusters_of,
    count_solved,
    mean_of,
    read_record,
)
from geo_sokoban_pipeline.rewards.math_answer.default import (
    MalformedError,
    extract_answer,
    is_hedge,
    normalise,
)
from geo_sokoban_pipeline.rewards.math_answer.exact_numbers import NoNumberError, NoValueError, Surd, read_number
from geo_sokoban_pipeline.rewards.text import assistant_text, visible_text

if TYPE_CHECKING:
    from geo_sokoban_pipeline.trajectories.index import StoredEpisode

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
    calls = sum(record.tool_calls for record in records)
    judged = [record.plausible for record in records if record.plausible is not None]
    first = [record.first_attempt for record in records]
    return {
        "first_attempt": None if None in first else count_solved([bool(one) for one in first], clusters_of(records)),
        "answered_share": mean_of([float(record.answered) for record in records]),
        "plausible_share": mean_of([float(value) for value in judged]),
        "tools": {
            "called_share": mean_of([float(record.tool_calls > 0) for record in records]),
            "calls": calls / len(records) if records else None,
            "valid_share": sum(record.valid_tool_calls for record in records) / calls if calls else None,
        },
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


# Possessive: a long run of digits is read once, not again from each of its digits.
_NUMBER = r"(?<![\d.])\d++(?:\.\d++)?+"
_BRACE = re.compile(r"\\boxed\s*\{|\\.|[{}]", re.DOTALL)  # an escaped brace is a character
_GIVEN = re.compile(rf"(?<![A-Za-z\\])([A-Za-z])\s*+=\s*+(-?{_NUMBER})")
# Degenerate responses must not cost time: characters of a response that are read, of a box; expressions.
_LONGEST, _LONGEST_BOX, _MOST_EXPRESSIONS = 4000, 200, 64


def tag_answer(episode: StoredEpisode) -> dict[str, int]:
    """Tags of an episode.

    Returns:
        `malformed_call`: responses with a tool call that the tool could not score. `no_answer`: 1, no response has a
        box. `hedge`: responses that give several answers, in boxes, calls or one box. `right_rule_wrong_arithmetic`:
        responses of an unsolved episode with another answer than an expression of theirs, which has the value of the
        reference.
    """
    texts = [visible_text(said.text)[-_LONGEST:] for said in episode.responses]
    unsolved = episode.success is False and episode.label is not None
    found = {
        "malformed_call": sum(
            said.info.get("tool_executed") is False and CALL_MARK in text
            for said, text in zip(episode.responses, texts, strict=True)
        ),
        "no_answer": int(episode.metrics.get("has_answer", 1.0) < 0.5),
        "hedge": sum(_names_several(text, episode.label) for text in texts),
        "right_rule_wrong_arithmetic": sum(_miscalculates(text, episode.label) for text in texts)
        if unsolved and episode.label
        else 0,
    }
    return {name: count for name, count in found.items() if count}


def last_answer(episode: StoredEpisode) -> str | None:
    """The last box of an episode, else its last scored answer, without spaces."""
    if (found := extract_answer(assistant_text(said.text for said in episode.responses))) is None:
        found = next((said.action for said in reversed(episode.responses) if said.action), None)
    return None if found is None else found.replace(" ", "") or None


def _names_several(text: str, label: str | None) -> bool:
    boxes = [box for _, _, box in _boxes(text) if len(box) <= _LONGEST_BOX]
    answers = {answer.replace(" ", "") for answer in (*boxes, *call_answers(text))}
    return len(answers) > 1 or (label is not None and any(_is_choice(box, label) for box in boxes))


def _is_choice(box: str, label: str) -> bool:
    try:
        return is_hedge(normalise(box), normalise(label))
    except MalformedError:
        return False


def _boxes(text: str) -> list[tuple[int, int, str]]:
    """(start, end, content) of each closed box without another box in it, in time linear in the text."""
    found: list[tuple[int, int, str]] = []
    open_braces: list[tuple[int, int, bool]] = []
    for token in _BRACE.finditer(text):
        if token[0] == "}" and open_braces:
            start, inside, is_box = open_braces.pop()
            if is_box:
                found.append((start, token.end(), text[inside : token.start()]))
        elif token[0].endswith("{") and token[0] != "\\{":
            is_box = len(token[0]) > 1
            if is_box:
                # A box around this one is not the innermost.
                open_braces = [(start, inside, False) for start, inside, _ in open_braces]
            open_braces.append((token.start(), token.end(), is_box))
    return found


def _miscalculates(text: str, label: str) -> bool:
    """Whether a response writes an expression of the reference's value, and another answer."""
    wanted, boxes = _value(label), _boxes(text)
    given = [_value(answer) for answer in (*(box for _, _, box in boxes), *call_answers(text))]
    if wanted is None or not given or wanted in given:
        return False
    for start, end, _ in reversed(boxes):
        text = f"{text[:start]} ; {text[end:]}"
    return any(_value(expression) == wanted for expression in _expressions(without_calls(text)))


def _value(text: str) -> Surd | None:
    try:
        return read_number(normalise(text))
    except (MalformedError, NoNumberError, NoValueError):
        return None


def _expressions(text: str) -> list[str]:
    """Expressions of a text, with the numbers that it gives to letters in their place.

    Two operands or more, or a number beside a letter. A letter alone is one only at the end of the working: elsewhere
    it may be a word.
    """
    given = dict(_GIVEN.findall(text))
    text = _GIVEN.sub(" ; ", text)
    letter = f"(?<![A-Za-z\\\\])[{''.join(given)}](?![A-Za-z])" if given else r"(?!)"
    group, bracket = r"\{[^{}]*\}", r"\([^()]*\)"
    macro = rf"\\sqrt\s*{group}|\\frac\s*{group}\s*{group}|\\pi"
    atom = rf"(?:{_NUMBER}(?:\s*{letter})?|{letter}|{macro}|{bracket})"
    sign = r"\s*(?:[-+*/]|\\times|\\cdot|\\div)\s*"
    pattern = rf"{atom}(?:{sign}{atom}|\s*{bracket})+|{_NUMBER}\s*{letter}|{letter}(?=[\s;.]*$)"
    found = list(dict.fromkeys(match[0] for match in re.finditer(pattern, text.rstrip())))[-_MOST_EXPRESSIONS:]
    return [re.sub(letter, lambda name: f"({given[name[0]]})", expression) for expression in found]
