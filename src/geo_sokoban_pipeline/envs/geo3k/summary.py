"""What the geometry data hold, in numbers: rows, splits, answers, pictures, and what published splits share."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from geo_sokoban_pipeline.envs.geo3k.splits import count_forms, count_repeats, find_overlaps
from geo_sokoban_pipeline.envs.splits import SPLITS, overlaps
from geo_sokoban_pipeline.options.geo3k import Geo3kDataOptions

IndexRow = Mapping[str, Any]


def summarise_data(index: Sequence[IndexRow], reasons: Sequence[str], options: Geo3kDataOptions) -> dict[str, Any]:
    """The data report.

    Args:
        index: settled rows of the index.
        reasons: of the rejected rows.
    """
    by_split = {split: [row for row in index if row["split"] == split] for split in SPLITS}
    status = Counter(row["status"] for row in index)
    dealt = sorted({row["split"] for row in index if row["split"] not in (None, row["source_split"])})
    return {
        "source": options.source,
        "rows_read": len(index),
        "rows_rejected": status["rejected"],
        "rejected_reasons": dict(Counter(reasons).most_common(20)),
        "rows_excluded": status["excluded"],
        "rows_left_out": status["left_out"],
        "rows_repaired": sum(row["repaired"] for row in index),
        "problems": status["kept"],
        "split_note": _split_note(options.exclude_overlaps, dealt),
        "splits": {split: describe_split(rows) for split, rows in by_split.items()},
        # Of the splits as they are used.
        "overlaps": {
            "images": overlaps({split: _hashes(rows) for split, rows in by_split.items()}),
            "problems": overlaps({split: [row["problem_hash"] for row in rows] for split, rows in by_split.items()}),
        },
        # Of the splits as they were published: everything readable, before anything was excluded or dealt out.
        "published_overlaps": find_overlaps(
            [{**row, "split": row["source_split"]} for row in index if row["status"] != "rejected"]
        ),
    }


def describe_split(rows: Sequence[IndexRow]) -> dict[str, Any]:
    """Problems of one split: distinct ones, pictures, repeated rows, answers by form, families, sizes of pictures."""
    answers = Counter(row["answer"] for row in rows)
    pixels = sorted(width * height for row in rows for width, height in row["sizes"])
    return {
        "problems": len(rows),
        "distinct_problems": len({row["problem_hash"] for row in rows}),
        "images": len(set(_hashes(rows))),
        "without_image": sum(not row["image_hashes"] for row in rows),
        **count_repeats(rows),
        "distinct_answers": len(answers),
        "most_frequent_answer": _most_frequent(answers, len(rows)),
        "by_answer_form": count_forms(rows, "answer_form"),
        "by_family": count_forms(rows, "family"),
        "by_difficulty": count_forms(rows, "difficulty"),
        "pixels": {"least": pixels[0], "median": pixels[len(pixels) // 2], "most": pixels[-1]} if pixels else None,
    }


def _most_frequent(answers: Counter[str], rows: int) -> dict[str, Any] | None:
    """Answer and share of the rows: what a policy gets by always saying it."""
    if not answers:
        return None
    answer, times = answers.most_common(1)[0]
    return {"answer": answer, "share": times / rows}


def _hashes(rows: Sequence[IndexRow]) -> list[str]:
    return [name for row in rows for name in row["image_hashes"]]


def _split_note(rule: str, dealt: Sequence[str]) -> str:
    notes = {
        "none": "Splits may share pictures and problems.",
        "pairs": "No (picture, question) pair occurs in two splits; pictures may.",
        "images": "No picture occurs in two splits.",
    }
    made = f" Dealt out of the training rows by picture: {', '.join(dealt)}." if dealt else ""
    return notes[rule] + made
