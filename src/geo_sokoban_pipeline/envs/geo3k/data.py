"""Geometry data: the schemas of the tables, and how a raw row becomes a problem, a split and a prompt.

Everything about a row is checked here and nowhere later. A row that is not a problem raises a `ValueError` whose
message is the reason kept in `rejected`.
"""

from __future__ import annotations

import json
import logging
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import chain, combinations, count
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from PIL import Image

from geo_sokoban_pipeline.config.data import SplitCounts, SplitShares
from geo_sokoban_pipeline.envs.geo3k.config import QUESTION_MARK, Geo3kDataOptions
from geo_sokoban_pipeline.envs.geo3k.figures.exact import answer_form
from geo_sokoban_pipeline.envs.images import (
    base64_bytes,
    data_uri_bytes,
    decode_image,
    encode_png,
    is_data_uri,
    png_data_uri,
)
from geo_sokoban_pipeline.envs.rows import (
    SPLITS,
    BadRow,
    DataError,
    RejectedRow,
    check_unicode,
    json_columns,
    overlaps,
    row_as_text,
    share_out,
)
from geo_sokoban_pipeline.formats import type_name
from geo_sokoban_pipeline.rewards.math_answer import decimal_text, label_text
from geo_sokoban_pipeline.runs.row_stream import Row
from geo_sokoban_pipeline.seeding import content_hash, derive_seed, python_generator

IMAGES_AS_READ = pa.list_(pa.struct([("bytes", pa.binary()), ("path", pa.string())]))
CANDIDATES = pa.list_(pa.struct([("rule", pa.string()), ("label", pa.string())]))

RAW_PROBLEMS = pa.schema(
    [
        pa.field("row_id", pa.string(), nullable=False),
        pa.field("source", pa.string(), nullable=False),  # generate, a hub id, or a file's name
        pa.field("source_split", pa.string(), nullable=False),  # train, validation or eval, as published or generated
        pa.field("images", IMAGES_AS_READ, nullable=False),  # a text (data URI, URL, path) is in `path`
        pa.field("problem", pa.string()),  # null in invalid rows
        pa.field("answer", pa.string()),
        pa.field("columns", pa.string(), nullable=False),  # JSON object of all other columns
        pa.field("error", pa.string()),  # why the row could not be read; null for all others
    ]
)

PROBLEM_INDEX = pa.schema(
    [
        pa.field("row_id", pa.string(), nullable=False),
        pa.field("source_split", pa.string(), nullable=False),
        pa.field("status", pa.string(), nullable=False),  # kept, rejected, excluded (overlap), left_out (counts)
        pa.field("split", pa.string()),  # null for rows that are not kept
        pa.field("image_hashes", pa.list_(pa.string()), nullable=False),  # of the pixels in RGB
        pa.field("problem_hash", pa.string()),  # of images and question together; null for rejected rows
        pa.field("answer", pa.string()),
        pa.field("answer_form", pa.string()),  # integer, decimal, surd, fraction, pi, other
        pa.field("family", pa.string()),  # null for problems of a file or the hub
        pa.field("difficulty", pa.string()),
        pa.field("repaired", pa.bool_(), nullable=False),  # whether control characters were replaced
        pa.field("images_first", pa.bool_(), nullable=False),  # whether placeholders were put before the text
        pa.field("sizes", pa.list_(pa.list_(pa.int32())), nullable=False),  # width and height of each image
    ]
)

PROMPTS = pa.schema(
    [
        pa.field("id", pa.string(), nullable=False),
        pa.field("prompt", pa.string(), nullable=False),  # text of the prompt; equals `problem`
        pa.field("problem", pa.string(), nullable=False),
        pa.field("answer", pa.string(), nullable=False),
        pa.field("images", pa.list_(pa.string()), nullable=False),
        pa.field("question", pa.string(), nullable=False),  # without instruction and placeholders
        pa.field("data_source", pa.string(), nullable=False),
        pa.field("problem_hash", pa.string(), nullable=False),
        pa.field("image_hashes", pa.list_(pa.string()), nullable=False),
        pa.field("answer_form", pa.string(), nullable=False),
        pa.field("family", pa.string()),
        pa.field("difficulty", pa.string()),
        pa.field("candidates", CANDIDATES, nullable=False),  # answers of plausible rules; empty where none are known
        pa.field("columns", pa.string(), nullable=False),  # JSON object of the source's other columns
        pa.field("split", pa.string(), nullable=False),
    ]
)

REJECTED = pa.schema(
    [
        pa.field("row_id", pa.string(), nullable=False),
        pa.field("reason", pa.string(), nullable=False),
        pa.field("raw", pa.string(), nullable=False),  # long texts cut; the whole row is in the raw table
        pa.field("source", pa.string(), nullable=False),
    ]
)

# Raw rows of a source in one schema, before any check.


_KNOWN = ("images", "problem", "answer")
# Columns of our own prompts table about a problem, and those that are new each time it is made.
_KEPT = ("id", "data_source", "family", "difficulty", "candidates")
_OWN_MARK = "problem_hash"


def new_id(own: Any, split: str, number: int, taken: set[str]) -> str:
    """An id that no other row has: the row's own, else split and number; a repeated one gets `_2`, `_3`, …

    Args:
        taken: ids of earlier rows; the new one is added.
    """
    base = f"{split}_{number:05d}" if own is None else str(own).encode("utf-8", "replace").decode("utf-8")
    names = chain([base], (f"{base}_{times}" for times in count(2)))
    name = next(name for name in names if name not in taken)
    taken.add(name)
    return name


def raw_rows(
    rows: Iterable[tuple[int, Mapping[str, Any] | BadRow]], source: str, split: str, taken: set[str]
) -> Iterator[Row]:
    """Rows of `geo3k.raw_problems`.

    Args:
        rows: number and row, as they were read.
        source: hub id or file name, for the record.
        split: train, validation or eval.
        taken: ids of the rows of earlier splits; those of this one are added.
    """
    for number, row in rows:
        own = None if isinstance(row, BadRow) else row.get("id")
        head = {"row_id": new_id(own, split, number, taken), "source": source, "source_split": split}
        try:
            yield head | _read_row(row)
        except ValueError as error:
            raw = row.raw if isinstance(row, BadRow) else row_as_text(row)
            yield head | {
                "images": [],
                "problem": None,
                "answer": None,
                "columns": json.dumps({"row": raw}, ensure_ascii=False),
                "error": str(error),
            }


def _read_row(row: Mapping[str, Any] | BadRow) -> Row:
    if isinstance(row, BadRow):
        raise ValueError(row.reason)
    name = "image" if _is_blank(row.get("images")) and not _is_blank(row.get("image")) else "images"
    return {
        "images": _read_images(row.get(name)),
        "problem": _read_text(row, "problem"),
        "answer": _read_text(row, "answer"),
        "columns": json.dumps(json_columns(_read_columns(row, name)), ensure_ascii=False),
        "error": None,
    }


def _read_columns(row: Mapping[str, Any], images: str) -> dict[str, Any]:
    """All other columns; of our own prompts those of the original problem, so that they stay unchanged.

    Args:
        images: name of the column with the images.
    """
    if _OWN_MARK not in row or not isinstance(row.get("columns"), str):
        return {name: value for name, value in row.items() if name not in (*_KNOWN, images)}
    return {**json.loads(row["columns"]), **{name: row[name] for name in _KEPT if row.get(name) is not None}}


def _read_text(row: Mapping[str, Any], name: str) -> str:
    value = row.get(name)
    # Labels of other sets may be numbers.
    if name == "answer":
        try:
            digits = decimal_text(value)
        except ValueError as error:
            raise ValueError(f"answer is {value}; a text or a finite number is expected") from error
        if digits is not None:
            return digits
    if not isinstance(value, str):
        raise ValueError(f"{name} is {'missing' if value is None else type_name(value)}; a text is expected")
    return check_unicode(value)


def _read_images(images: Any) -> list[Row]:
    """Images as `{bytes, path}`.

    Raises:
        ValueError: something that is neither bytes, text, nor such a pair.
    """
    if _is_blank(images):
        return []
    single = isinstance(images, str | bytes | Mapping)
    if not single and not isinstance(images, list | tuple):
        raise ValueError(f"images is {type_name(images)}; a list of images is expected")
    return [_read_image(image) for image in ([images] if single else images)]


def _is_blank(value: Any) -> bool:
    """Whether a value stands for no image: null, an empty text, list or pair, or one of nothing else."""
    if isinstance(value, Mapping | list | tuple):
        return all(map(_is_blank, value.values() if isinstance(value, Mapping) else value))
    return value is None or (isinstance(value, str | bytes) and not value)


def _read_image(image: Any) -> Row:
    if isinstance(image, Mapping) and {"bytes", "path"} & image.keys():
        raw, path = image.get("bytes"), image.get("path")
        if isinstance(raw, str) and _is_encoded(raw):  # JSON has no bytes
            return {"bytes": None, "path": raw}
        if (raw is None or isinstance(raw, bytes)) and (path is None or isinstance(path, str)):
            return {"bytes": raw, "path": path if path is None else check_unicode(path)}
    if isinstance(image, bytes):
        return {"bytes": image, "path": None}
    if isinstance(image, str):
        return {"bytes": None, "path": check_unicode(image)}
    raise ValueError(f"image is {type_name(image)}; bytes, a data: URI, or both as bytes and path are expected")


# Columns of a prompts row that the environments read.


logger = logging.getLogger(__name__)


def read_ground_truth(sample: Mapping[str, Any]) -> str | None:
    """The reference of a row as text; None, with one warning per row, if it has none."""
    if not (text := label_text(sample.get("answer"))):
        _warn(str(sample.get("id")))
    return text or None


@cache  # once per row: an environment is built for every episode
def _warn(row: str) -> None:
    logger.warning("row %s has no answer: every response to it is graded as wrong", row)


# Images of rows: whatever form they come in, out come RGB pixels, and from equal pixels equal PNG data URIs.


_ADDRESS = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
_FILE_NAME = re.compile(r"\S+\.(?:png|jpe?g|webp|gif|bmp)", re.IGNORECASE)
# Shorter texts of these characters are names of files, unless they begin as PNG, JPEG, GIF or WebP do.
_BASE64 = re.compile(r"(?:[A-Za-z0-9+/_-]{200,}|(?:iVBORw0KGg|[/_]9j[/_]|R0lGOD|UklGR)[A-Za-z0-9+/_-]+)={0,2}")


def read_images(images: Sequence[Mapping[str, Any]], options: Geo3kDataOptions) -> list[Image.Image]:
    """RGB images of a raw row, checked against the limits.

    Args:
        images: `bytes` and `path` of each; a data URI stands in `path`.

    Raises:
        ValueError: too many images, or one that is remote, outside the allowed folder, too large or unreadable.
    """
    if len(images) > options.limits.max_images:
        raise ValueError(f"{len(images)} images, more than limits.max_images={options.limits.max_images}")
    return [
        decode_image(
            _image_bytes(image, options),
            max_pixels=options.limits.max_pixels,
            max_aspect=options.limits.max_aspect,
            transparency=options.transparency,
        )
        for image in images
    ]


def _is_encoded(text: str) -> bool:
    return text[:11].lower() == "data:image/" or _BASE64.fullmatch("".join(text.split())) is not None


def holds_image(value: Any) -> bool:
    """Whether a value of a column, bytes as base64, looks like an image, its file's name, or a list of them."""
    if isinstance(value, str):
        return _is_encoded(value) or _FILE_NAME.fullmatch(value) is not None
    inner = value.values() if isinstance(value, Mapping) else value if isinstance(value, list) else ()
    return any(map(holds_image, inner))


def image_hash(image: Image.Image) -> str:
    """Hash of an RGB image's pixels and size, independent of its file format."""
    return content_hash(f"{image.width}x{image.height}", image.tobytes())


def image_uri(image: Image.Image) -> str:
    """PNG data URI of an RGB image."""
    return png_data_uri(encode_png(np.asarray(image)))


def _image_bytes(image: Mapping[str, Any], options: Geo3kDataOptions) -> bytes:
    raw, text = image["bytes"], image["path"]
    limit = options.limits.max_bytes
    if raw:
        if len(raw) > limit:
            raise ValueError(f"image has {len(raw)} bytes, more than limits.max_bytes={limit}")
        return bytes(raw)
    if not text:
        raise ValueError("image is empty")
    if is_data_uri(text):
        return data_uri_bytes(text, limit)
    if _ADDRESS.match(text):
        raise ValueError(f"image {text[:60]!r} is remote; only bytes and data: URIs are read")
    if _is_encoded(text):
        return base64_bytes(text, limit)
    return _file_bytes(text, options.image_folder, limit)


def _file_bytes(name: str, folder: str | None, limit: int) -> bytes:
    """Bytes of an image below the allowed folder; links that lead out of it are not followed."""
    if folder is None:
        raise ValueError(f"image {name[:60]!r} is a path; set image_folder to read images below it")
    root = Path(folder).resolve()
    try:
        path = (root / name).resolve()
        if not path.is_relative_to(root):
            raise ValueError(f"image {name[:60]!r} lies outside image_folder")
        if path.stat().st_size > limit:
            raise ValueError(f"image has {path.stat().st_size} bytes, more than limits.max_bytes={limit}")
        return path.read_bytes()
    except OSError as error:
        raise ValueError(f"image {name[:60]!r} cannot be read: {error.strerror or error}") from error


# Texts of problems: damaged escapes repaired, instructions put around a question and taken off again.


PLACEHOLDER = "<image>"

_CALL = '<tool_call>{"name": "calc_score", "arguments": {"answer": "<digits>"}}</tool_call>'

TOOL = f"""You are an expert in geometry, and you check your results before you hand them in. You have a scoring tool, \
calc_score, which compares an answer with the reference. Solve the problem below in these steps:
1. Think inside <think> and </think> until you have an answer.
2. Call calc_score at least once, with your answer as a number. The call is JSON between its tags, which must be there:
{_CALL}
In the same message, also write Answer: \\boxed{{$Answer}} with that answer.
3. Read the result of the call. If the answer is wrong, look for the mistake, and try another way.
4. Write your last message in the same form and end it with Answer: \\boxed{{$Answer}}

{QUESTION_MARK}"""

TEMPLATES = {
    "question": QUESTION_MARK,
    "boxed": f"{QUESTION_MARK}\nThink step by step, then write the answer inside \\boxed{{}}.",
    "tool_brief": f'{QUESTION_MARK}\n<tool_call>{{"name": "calc_score", "arguments": {{"answer": }}}}</tool_call>'
    " \\boxed{}",
    "tool": TOOL,
}

# What Python makes of \a, \b, \v and \f in a text that should have been raw; before a letter it was LaTeX.
_ESCAPES = {"\a": "\\a", "\b": "\\b", "\v": "\\v", "\f": "\\f"}
_DAMAGED_ESCAPE = re.compile("[\a\b\v\f](?=[A-Za-z])")
_CONTROL = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]")
_CHAT_MARK = re.compile(r"<\|[a-z_]+\|>")
# Words that the block of published multi-turn rows holds and no question does.
_TOOL_WORDS = re.compile(r"calc_score|calc_geo3k_reward|</?tool_call>|(\\b|\x08)oxed")


def repair_controls(text: str) -> tuple[str, int]:
    """The text with LaTeX where control characters stand for it, and how many there were."""
    return _DAMAGED_ESCAPE.subn(lambda found: _ESCAPES[found[0]], text)


def check_text(name: str, text: str, *, controls: bool) -> None:
    """Check that a text can be part of a prompt.

    Args:
        name: of the column, for the message.
        controls: refuse control characters other than tabs and line ends.

    Raises:
        ValueError: blank, or it holds a control character or a mark of the chat markup, which would break the prompt.
    """
    if not text.strip():
        raise ValueError(f"{name} is blank")
    if found := _CHAT_MARK.search(text):
        raise ValueError(f"{name} holds the chat mark {found[0]}")
    if controls and (found := _CONTROL.search(text)):
        raise ValueError(f"{name} holds the control character U+{ord(found[0]):04X}")


def instruct(own: str, instruction: str) -> str:
    """Text of a prompt: the question with the instruction around it.

    Args:
        own: the row's text, with or without an instruction; one with the tool's protocol stays for `tool`.
        instruction: name of a template, or a text that holds `{question}`.
    """
    if instruction == "tool" and has_tool_block(own):
        return own
    return TEMPLATES.get(instruction, instruction).replace(QUESTION_MARK, question_of(own, instruction))


def question_of(text: str, instruction: str = "question") -> str:
    """The question in a row's text: without instructions of our own, and without the block of published rows.

    Args:
        instruction: a text of your own, to be recognised like the named ones.
    """
    while (less := _without_one(text, instruction)) != text:
        text = less
    return text


def _without_one(text: str, instruction: str) -> str:
    for template in [*TEMPLATES.values(), TEMPLATES.get(instruction, instruction)]:
        before, _, after = template.partition(QUESTION_MARK)
        around = len(before) + len(after)
        if 0 < around <= len(text) and text.startswith(before) and text.endswith(after):
            return text[len(before) : len(text) - len(after)]
    end = _block_end(text)
    return text[end:] if end else text


def has_tool_block(text: str) -> bool:
    """Whether a text begins with a block that explains the scoring tool, ours or a published one."""
    return _block_end(text) > 0


def plain_question(question: str) -> str:
    """A question as splits compare it: without placeholders, any white space one blank."""
    return " ".join(question.replace(PLACEHOLDER, " ").split())


def _block_end(text: str) -> int:
    """End of a block about the tool: after the blank line that follows its last mention; 0 without one.

    Placeholders belong to the question, so a text with one before that line has no such block.
    """
    if "calc_score" not in text and "calc_geo3k_reward" not in text:
        return 0
    blank = text.find("\n\n", max(found.end() for found in _TOOL_WORDS.finditer(text)))
    if blank < 0 or PLACEHOLDER in text[:blank] or not text[blank:].strip():
        return 0
    return blank + 2


# Raw rows become problems, or a `ValueError` whose message is the reason kept in `rejected`.


# Characters of one text in `rejected`; the raw table holds the whole row.
_SHOWN = 2000


@dataclass(frozen=True)
class CheckedProblem:
    """A valid row.

    Attributes:
        text: the row's own text with placeholders, repaired.
        question: the text without an instruction.
        answer: label, repaired, without white space around it.
        images: in RGB, in the order of the placeholders.
        repaired: control characters that were replaced.
        images_first: whether the text had no placeholder, and got one for each image before the question.
    """

    text: str
    question: str
    answer: str
    images: list[Image.Image]
    repaired: int
    images_first: bool


def check_problem(raw: Mapping[str, Any], options: Geo3kDataOptions) -> CheckedProblem:
    """The problem in a raw row.

    Raises:
        ValueError: no text, answer or image, characters that break a prompt, placeholders that do not match the
            images, or images that are remote, too large or unreadable.
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
    images_first = bool(raw["images"]) and PLACEHOLDER not in question
    if images_first:
        shown = PLACEHOLDER * len(raw["images"]) + question
        text, question = (text.removesuffix(question) if text.endswith(question) else "") + shown, shown
    if (times := question.count(PLACEHOLDER)) != len(raw["images"]):
        raise ValueError(
            f"{len(raw['images'])} images, but problem holds {PLACEHOLDER} {times} times; it stands for one each"
            f"{_likely_image(raw)}"
        )
    if not raw["images"] and options.rows_without_image == "reject":
        raise ValueError(
            f"images and image are missing{_likely_image(raw)}; rows_without_image=keep takes rows of text alone"
        )
    images = read_images(raw["images"], options)
    return CheckedProblem(text, question, answer.strip(" \t\r\n"), images, repaired, images_first)


def _likely_image(raw: Mapping[str, Any]) -> str:
    """The column of a row without images that looks like one, as the end of a message."""
    columns = {} if raw["images"] else json.loads(raw["columns"])
    found = [name for name, value in columns.items() if holds_image(value)]
    return f"; the column {found[0]} looks like an image: rename it to image" if found else ""


def index_rows(
    rows: Iterable[Mapping[str, Any]], options: Geo3kDataOptions, rejected: list[RejectedRow]
) -> Iterator[dict[str, Any]]:
    """Rows of `geo3k.problem_index`, still without splits.

    Args:
        rows: raw rows.
        rejected: rows that are no problems are added here.
    """
    for raw in rows:
        head = {"row_id": raw["row_id"], "source_split": raw["source_split"], "split": None}
        try:
            problem = check_problem(raw, options)
        except ValueError as error:
            rejected.append(RejectedRow(raw["row_id"], str(error), _shown(raw), raw["source"]))
            yield head | _REJECTED
            continue
        hashes = [image_hash(image) for image in problem.images]
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
            "images_first": problem.images_first,
            "sizes": [list(image.size) for image in problem.images],
        }


def index_problems(
    raw: Iterable[Mapping[str, Any]], options: Geo3kDataOptions, section: str
) -> tuple[list[IndexRow], list[RejectedRow]]:
    """The whole index of raw rows, with splits, and the rows that are no problems.

    Args:
        section: name of the parameters.

    Raises:
        DataError: there is not one problem; the message has the reasons.
    """
    rejected: list[RejectedRow] = []
    found = list(index_rows(raw, options, rejected))
    where = f"{section}.source={options.source}"
    reasons = "; ".join(f"{n} × {reason}" for reason, n in Counter(row.reason for row in rejected).most_common(3))
    if not found:
        raise DataError(f"{where}: there are no rows; check the source, its splits and slices.")
    if len(rejected) == len(found):
        raise DataError(
            f"{where}: none of {len(rejected)} rows is a problem: {reasons}. Rows need the columns images (or image), "
            "problem and answer; see docs/geometry_data.md."
        )
    published = SPLITS if options.source == "generate" else {row["source_split"] for row in found}
    return settle_splits(found, published, options), rejected


def text_or_none(value: Any) -> str | None:
    """A value of a foreign column if it is a text, else None."""
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
    "images_first": False,
    "sizes": [],
}


def _shown(raw: Mapping[str, Any]) -> str:
    return row_as_text(_cut({name: raw[name] for name in ("images", "problem", "answer", "columns")}))


def _cut(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _cut(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_cut(item) for item in value]
    if isinstance(value, str) and len(value) > _SHOWN:
        return f"{value[:_SHOWN]}… ({len(value)} characters)"
    return value[: _SHOWN // 2] if isinstance(value, bytes) else value


# Which problem goes to training, validation and evaluation, and what splits share.


IndexRow = Mapping[str, Any]
# Overlaps that are named one by one in the report; all of them are in the index.
_NAMED = 20


def settle_splits(rows: Sequence[IndexRow], published: Iterable[str], options: Geo3kDataOptions) -> list[IndexRow]:
    """The index with `split` and `status` of every row.

    Args:
        rows: rows of the index, kept ones without a split.
        published: splits that the source itself has; the others are taken from its training rows.
        options: shares, counts, seed, and what splits may share.
    """
    kept = _exclude(_assign(rows, set(published), options), options.exclude_overlaps)
    return _limit(kept, options.counts, options.seed)


def find_overlaps(rows: Iterable[IndexRow]) -> dict[str, Any]:
    """Images and problems (image and question) in several splits, counted, with row ids.

    Args:
        rows: rows with a split.

    Returns:
        `{"images": …, "problems": …}`, each `{"train+eval": {"shared": 3, "rows": {"train": 4, "eval": 3}, "examples":
        [{"train": [ids], "eval": [ids]}, …]}}` for every two splits.
    """
    members = [row for row in rows if row["split"] is not None]
    return {
        "images": _shared(members, lambda row: row["image_hashes"]),
        "problems": _shared(members, lambda row: [row["problem_hash"]]),
    }


def count_repeats(rows: Iterable[IndexRow]) -> dict[str, int]:
    """Rows of a split that repeat an earlier problem of it, and problems whose rows have several answers."""
    answers: dict[str, set[str]] = {}
    repeated = 0
    for row in rows:
        known = answers.setdefault(row["problem_hash"], set())
        repeated += bool(known)
        known.add(row["answer"])
    return {"repeated": repeated, "with_several_answers": sum(len(found) > 1 for found in answers.values())}


def _assign(rows: Sequence[IndexRow], published: set[str], options: Geo3kDataOptions) -> list[IndexRow]:
    shares = _remaining_shares(options.shares, published)
    open_rows = [row for row in rows if row["status"] == "kept" and row["source_split"] == "train"]
    leads = _link_images(open_rows)
    pool = sorted({_split_key(row, leads) for row in open_rows})
    assigned = share_out(pool, shares, python_generator(options.seed, "geo3k", "splits"))
    split_of = {key: split for split, keys in assigned.items() for key in keys}

    def split_for(row: IndexRow) -> str | None:
        if row["status"] != "kept":
            return None
        return row["source_split"] if row["source_split"] != "train" else split_of[_split_key(row, leads)]

    return [{**row, "split": split_for(row)} for row in rows]


def _link_images(rows: Iterable[IndexRow]) -> dict[str, str]:
    """The least image of each image's connected group; rows with several images connect them."""
    leads: dict[str, str] = {}

    def lead(image: str) -> str:
        while (above := leads.setdefault(image, image)) != image:
            image = above
        return image

    for row in rows:
        found = sorted({lead(image) for image in row["image_hashes"]})
        leads.update(dict.fromkeys(found, found[0]) if found else {})
    return {image: lead(image) for image in leads}


def _split_key(row: IndexRow, leads: Mapping[str, str]) -> str:
    """Connected group of a row's images; for a problem without one the problem."""
    return leads[row["image_hashes"][0]] if row["image_hashes"] else str(row["problem_hash"])


def _remaining_shares(shares: SplitShares, published: set[str]) -> SplitShares:
    """Shares of training and of the unpublished splits."""
    open_shares = {split: getattr(shares, split) for split in SPLITS if split == "train" or split not in published}
    if not (total := sum(open_shares.values())):
        return SplitShares(train=1, validation=0, eval=0)
    return SplitShares(**{split: open_shares.get(split, 0) / total for split in SPLITS})


def _exclude(rows: Sequence[IndexRow], rule: str) -> list[IndexRow]:
    """Leave out training rows that overlap with a later split, and validation rows that overlap with evaluation."""
    if rule == "none":
        return list(rows)
    seen: set[str] = set()
    excluded: set[str] = set()
    for split in reversed(SPLITS):
        members = [row for row in rows if row["split"] == split]
        excluded.update(row["row_id"] for row in members if not seen.isdisjoint(_keys(row, rule)))
        seen.update(key for row in members for key in _keys(row, rule))
    return [{**row, "status": "excluded", "split": None} if row["row_id"] in excluded else row for row in rows]


def _keys(row: IndexRow, rule: str) -> list[str]:
    return [row["problem_hash"], *(row["image_hashes"] if rule == "images" else ())]


def _limit(rows: Sequence[IndexRow], counts: SplitCounts, seed: int) -> list[IndexRow]:
    """At most the wanted number of rows of each split; the choice depends on seed and row id alone."""
    left_out: set[str] = set()
    for split in SPLITS:
        members = [row["row_id"] for row in rows if row["split"] == split]
        if (count := getattr(counts, split)) is not None and count < len(members):
            left_out.update(sorted(members, key=lambda name: derive_seed(seed, "geo3k", "pick", name))[count:])
    return [{**row, "status": "left_out", "split": None} if row["row_id"] in left_out else row for row in rows]


def _shared(rows: Sequence[IndexRow], keys: Callable[[IndexRow], Iterable[str]]) -> dict[str, Any]:
    holders: dict[str, dict[str, list[str]]] = {}
    for row in rows:
        for key in dict.fromkeys(keys(row)):
            holders.setdefault(key, {}).setdefault(row["split"], []).append(row["row_id"])
    found = {}
    for first, second in combinations(SPLITS, 2):
        both = [by_split for by_split in holders.values() if first in by_split and second in by_split]
        found[f"{first}+{second}"] = {
            "shared": len(both),
            "rows": {split: len({name for by_split in both for name in by_split[split]}) for split in (first, second)},
            "examples": [{split: by_split[split] for split in (first, second)} for by_split in both[:_NAMED]],
        }
    return found


def count_forms(rows: Iterable[Mapping[str, Any]], column: str) -> dict[str, int]:
    """Rows by the value of a column, the most frequent first; null is `unknown`."""
    return dict(Counter(str(row[column] or "unknown") for row in rows).most_common())


# The geometry data in numbers: rows, splits, answers, images, and what published splits share.


def summarise_data(index: Sequence[IndexRow], reasons: Sequence[str], options: Geo3kDataOptions) -> dict[str, Any]:
    """The data report.

    Args:
        index: settled rows of the index.
        reasons: of the rejected rows.
    """
    by_split = {split: [row for row in index if row["split"] == split] for split in SPLITS}
    status = Counter(row["status"] for row in index)
    assigned = sorted({row["split"] for row in index if row["split"] not in (None, row["source_split"])})
    return {
        "source": options.source,
        "rows_read": len(index),
        "rows_rejected": status["rejected"],
        "rejected_reasons": dict(Counter(reasons).most_common(20)),
        "rows_excluded": status["excluded"],
        "rows_left_out": status["left_out"],
        "rows_repaired": sum(row["repaired"] for row in index),
        "rows_images_first": sum(row["images_first"] for row in index),
        "problems": status["kept"],
        "split_note": _split_note(options.exclude_overlaps, assigned),
        "splits": {split: describe_split(rows) for split, rows in by_split.items()},
        # Of the final splits.
        "overlaps": {
            "images": overlaps({split: _hashes(rows) for split, rows in by_split.items()}),
            "problems": overlaps({split: [row["problem_hash"] for row in rows] for split, rows in by_split.items()}),
        },
        # Of the published splits: all valid rows, before any is excluded or assigned.
        "published_overlaps": find_overlaps(
            [{**row, "split": row["source_split"]} for row in index if row["status"] != "rejected"]
        ),
    }


def describe_split(rows: Sequence[IndexRow]) -> dict[str, Any]:
    """Problems of one split: distinct ones, images, repeated rows, answers by form, families, sizes of images."""
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
    """Most frequent answer and its share of the rows."""
    if not answers:
        return None
    answer, times = answers.most_common(1)[0]
    return {"answer": answer, "share": times / rows}


def _hashes(rows: Sequence[IndexRow]) -> list[str]:
    return [name for row in rows for name in row["image_hashes"]]


def _split_note(rule: str, assigned: Sequence[str]) -> str:
    notes = {
        "none": "Splits may share images and problems.",
        "pairs": "No (image, question) pair occurs in two splits; images may.",
        "images": "No image occurs in two splits.",
    }
    made = f" Taken from the training rows by image: {', '.join(assigned)}." if assigned else ""
    return notes[rule] + made


# Rows of the prompts tables: the published columns and our own, made from raw rows that the index keeps.


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

    return lambda: (
        prompt_row(row, index[row["row_id"]], options) for row in raw if index[row["row_id"]]["split"] == split
    )


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
        "images": [image_uri(image) for image in problem.images],
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
    return [
        {"rule": one["rule"], "label": one["label"]}
        for one in value
        if isinstance(one, dict) and isinstance(one.get("rule"), str) and isinstance(one.get("label"), str)
    ]
