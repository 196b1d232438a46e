"""Raw rows become problems, or a `ValueError` whose message is the reason kept in `rejected`. Checked here, and nowhere
later.

Both passes over the rows (first the index of all, then the prompts of each split) read a row through the same function.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from PIL import Image

from geo_sokoban_pipeline.envs.geo3k.pictures import picture_hash, read_pictures
from geo_sokoban_pipeline.envs.geo3k.problems.exact import answer_form
from geo_sokoban_pipeline.envs.geo3k.texts import (
    check_placeholders,
    check_text,
    plain_question,
    question_of,
    repair_controls,
)
from geo_sokoban_pipeline.envs.row_values import RejectedRow, row_as_text
from geo_sokoban_pipeline.options.geo3k import Geo3kDataOptions
from geo_sokoban_pipeline.seeding import content_hash

# Characters of one text in `rejected`; the raw table holds the whole row.
_SHOWN = 2000


@dataclass(frozen=True)
class CheckedProblem:
    """A row that can be played.

    Attributes:
        text: the row's own text with placeholders, repaired.
        question: the text without an instruction.
        answer: label, repaired, without white space around it.
        pictures: in RGB, in the order of the placeholders.
        repaired: control characters that were replaced.
    """

    text: str
    question: str
    answer: str
    pictures: list[Image.Image]
    repaired: int


def check_problem(raw: Mapping[str, Any], options: Geo3kDataOptions) -> CheckedProblem:
    """The problem in a raw row.

    Raises:
        ValueError: no text or answer, characters that break a prompt, placeholders without pictures, or pictures that
            are remote, too large or unreadable.
    """
    if raw["error"] is not None:
        raise ValueError(raw["error"])
    text, answer, repaired = raw["problem"], raw["answer"], 0
    if options.repair_control_characters:
        (text, in_text), (answer, in_answer) = repair_controls(text), repair_controls(answer)
        repaired = in_text + in_answer
    for name, value in (("problem", text), ("answer", answer)):
        check_text(name, value, controls=options.repair_control_characters)
    question = question_of(text, options.instruction)
    check_placeholders(question, len(raw["images"]))
    return CheckedProblem(text, question, answer.strip(" \t\r\n"), read_pictures(raw["images"], options), repaired)


def index_rows(
    rows: Iterable[Mapping[str, Any]], options: Geo3kDataOptions, rejected: list[RejectedRow]
) -> Iterator[dict[str, Any]]:
    """Rows of `geo3k.problem_index`, still without splits.

    Args:
        rows: raw rows.
        rejected: what is no problem is added here.
    """
    for raw in rows:
        head = {"row_id": raw["row_id"], "source_split": raw["source_split"], "split": None}
        try:
            problem = check_problem(raw, options)
        except ValueError as error:
            rejected.append(RejectedRow(raw["row_id"], str(error), _shown(raw), raw["source"]))
            yield head | _REJECTED
            continue
        hashes = [picture_hash(picture) for picture in problem.pictures]
        columns = json.loads(raw["columns"])
        yield head | {
            "status": "kept",
            "image_hashes": hashes,
            "problem_hash": content_hash(plain_question(problem.question), *hashes),
            "answer": problem.answer,
            "answer_form": answer_form(problem.answer),
            "family": text_or_none(columns.get("family")),
            "difficulty": text_or_none(columns.get("difficulty")),
            "repaired": problem.repaired > 0,
            "sizes": [list(picture.size) for picture in problem.pictures],
        }


def text_or_none(value: Any) -> str | None:
    """A value of a foreign column, if it is a text."""
    return value if isinstance(value, str) else None


_REJECTED: dict[str, Any] = {
    "status": "rejected",
    "image_hashes": [],
    "problem_hash": None,
    "answer": None,
    "answer_form": None,
    "family": None,
    "difficulty": None,
    "repaired": False,
    "sizes": [],
}


def _shown(raw: Mapping[str, Any]) -> str:
    values = {name: raw[name] for name in ("images", "problem", "answer", "columns")}
    return row_as_text(_cut(values))


def _cut(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _cut(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_cut(item) for item in value]
    if isinstance(value, str) and len(value) > _SHOWN:
        return f"{value[:_SHOWN]}… ({len(value)} characters)"
    return value[: _SHOWN // 2] if isinstance(value, bytes) else value
