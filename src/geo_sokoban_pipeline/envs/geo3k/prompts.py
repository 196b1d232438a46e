"""Rows of the prompts tables: the published columns and our own, made from raw rows that the index keeps.

A prompts table read as a source gives the same prompts again: questions lose their instruction and get it back, and
pictures of equal pixels have equal data URIs.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from geo_sokoban_pipeline.envs.geo3k.checking import check_problem, text_or_none
from geo_sokoban_pipeline.envs.geo3k.pictures import picture_uri
from geo_sokoban_pipeline.envs.geo3k.texts import instruct, plain_question
from geo_sokoban_pipeline.options.geo3k import Geo3kDataOptions
from geo_sokoban_pipeline.row_stream import Row

# Columns of a source that have a column of their own in the prompts.
_OWN = ("id", "data_source", "family", "difficulty", "candidates")


def prompt_rows(
    raw: Iterable[Mapping[str, Any]], index: Mapping[str, Row], split: str, options: Geo3kDataOptions
) -> Callable[[], Iterator[Row]]:
    """Prompts of a split, made one by one in the order of the raw rows.

    Args:
        raw: raw rows; walked through each time.
        index: settled rows of the index by row id.
        split: train, validation or eval.
    """

    def rows() -> Iterator[Row]:
        for row in raw:
            found = index[row["row_id"]]
            if found["split"] == split:
                yield prompt_row(row, found, options)

    return rows


def prompt_row(raw: Mapping[str, Any], found: Mapping[str, Any], options: Geo3kDataOptions) -> Row:
    """Processed row of a raw row.

    Args:
        found: its row of the index.
    """
    problem = check_problem(raw, options)
    given = json.loads(raw["columns"])
    text = instruct(problem.text, options.instruction)
    return {
        "id": raw["row_id"],
        "prompt": text,
        "problem": text,
        "answer": problem.answer,
        "images": [picture_uri(picture) for picture in problem.pictures],
        "question": plain_question(problem.question),
        "data_source": text_or_none(given.get("data_source")) or raw["source"],
        "problem_hash": found["problem_hash"],
        "image_hashes": list(found["image_hashes"]),
        "answer_form": found["answer_form"],
        "family": found["family"],
        "difficulty": found["difficulty"],
        "candidates": _candidates(given.get("candidates")),
        "columns": json.dumps({name: value for name, value in given.items() if name not in _OWN}, ensure_ascii=False),
        "split": found["split"],
    }


def _candidates(value: Any) -> list[dict[str, str]]:
    """Candidates of a generated row; a foreign column of that name has none."""
    if not isinstance(value, list):
        return []
    pairs = (one for one in value if isinstance(one, dict))
    return [
        {"rule": one["rule"], "label": one["label"]}
        for one in pairs
        if isinstance(one.get("rule"), str) and isinstance(one.get("label"), str)
    ]
