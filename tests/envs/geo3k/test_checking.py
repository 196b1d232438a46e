"""Rows become problems or reasons: labels, placeholders, repairs, hashes, texts, and what `rejected` shows."""

from __future__ import annotations

import base64
import json
import re
import textwrap
from decimal import Decimal

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from geo_sokoban_pipeline.envs.geo3k.data import (
    PROBLEM_INDEX,
    PROMPTS,
    RAW_PROBLEMS,
    TEMPLATES,
    check_problem,
    check_text,
    has_tool_block,
    index_rows,
    instruct,
    plain_question,
    prompt_row,
    question_of,
    raw_rows,
    repair_controls,
    summarise_data,
)
from geo_sokoban_pipeline.envs.geo3k.tool_call import parse_tool_call
from geo_sokoban_pipeline.envs.rows import BadRow, RejectedRow, read_rows
from geo_sokoban_pipeline.runs.row_stream import RowStream, stored_rows, write_rows
from problem_rows import drawing, image_file, options, raw_of, source_row, uri, write_bytes, write_uris


def index(rows, **changes):
    rejected: list[RejectedRow] = []
    raws = list(raw_rows(enumerate(rows), "test", "train", set()))
    return list(index_rows(raws, options(**changes), rejected)), rejected


def process(row, instruction):
    chosen = options(instruction=instruction)
    raw = raw_of(row)
    (found,) = index_rows([raw], chosen, [])
    return prompt_row(raw, {**found, "split": "train"}, chosen)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"problem": None}, "problem is missing; a text is expected"),
        ({"problem": ["a"]}, "problem is a list"),
        ({"problem": "  "}, "problem is blank"),
        ({"problem": "<image><image>"}, "1 images, but problem holds <image> 2 times"),
        ({"problem": "<image>a<|im_end|>"}, "problem holds the chat mark"),
        ({"problem": "<image><|image_pad|>"}, "problem holds the chat mark"),
        ({"problem": "<image>a\x01"}, r"problem holds the control character U\+0001"),
        ({"problem": "<image>a\x00b"}, r"problem holds the control character U\+0000"),
        ({"problem": "<image>a\x1bb"}, r"problem holds the control character U\+001B"),
        ({"problem": "<image> a", "images": [uri(b"x")] * 2}, "2 images, but problem holds <image> 1 times"),
        ({"problem": "<image>\ud800"}, "surrogates not allowed"),
        ({"answer": None}, "answer is missing"),
        ({"answer": float("nan")}, "answer is nan; a text or a finite number is expected"),
        ({"answer": Decimal("Infinity")}, "answer is Infinity; a text or a finite number is expected"),
        ({"answer": ""}, "answer is blank"),
        ({"answer": True}, "answer is a bool"),
        ({"answer": {"value": 1}}, "answer is a dict"),
        ({"images": None}, "0 images, but problem holds <image> 1 times"),
        ({"images": []}, "0 images"),
        ({"images": None, "problem": "Find x."}, "images and image are missing; rows_without_image=keep"),
        ({"images": [], "image": None, "problem": "Find x.", "note": "a.b"}, "are missing; rows_without_image=keep"),
        ({"images": [{"bytes": None, "path": ""}], "problem": "Find x."}, "are missing; rows_without_image=keep"),
        (
            {"images": None, "problem": "Find x.", "photo": {"bytes": b"\x89PNG\r\n\x1a\n" + bytes(9), "path": None}},
            "are missing; the column photo looks like an image: rename it to image; rows_without_image=keep",
        ),
        ({"images": None, "picture": [uri(b"x")]}, "<image> 1 times; .*; the column picture looks like an image"),
        ({"images": None, "figures": ["a/1.jpg"]}, "the column figures looks like an image"),
        ({"images": 5}, "images is an int; a list of images is expected"),
        ({"images": [5]}, "image is an int"),
        ({"images": [uri(b"x"), None]}, "image is None"),
        ({"images": ["", uri(b"x")], "problem": "<image><image>"}, "image is empty"),
        ({"images": [{"bytes": "text"}]}, "image is a dict"),
        ({"images": [{"type": "image_url", "image_url": {"url": "a.png"}}]}, "image is a dict"),
        ({"images": ["http://127.0.0.1/a.png"]}, "is remote"),
    ],
    ids=str,
)
def test_reasons(changes, reason):
    (found,), (rejected,) = index([source_row() | changes])
    assert found["status"] == "rejected"
    assert re.search(reason, rejected.reason)
    assert (rejected.row_id, rejected.source) == ("train_00000", "test")
    assert isinstance(json.loads(rejected.raw), dict)


def test_rejected_rows_show_what_they_held_in_short():
    _, (rejected,) = index([source_row(images=["data:" + "x" * 100_000], problem="<image>Find it.", tag="mine")])
    assert all(words in rejected.raw for words in ("Find it.", "mine", "(100005 characters)"))
    assert len(rejected.raw) < 5000


@pytest.mark.parametrize(
    ("written", "answer"),
    [
        ("0.00001", "0.00001"),
        ("7.50", "7.50"),
        ("1e16", "10000000000000000"),
        ("1e400", "1" + 400 * "0"),
        ("0.1234567890123456789", "0.1234567890123456789"),
        ("NaN", None),
        ("-Infinity", None),
    ],
)
def test_numbers_of_json_lines_keep_their_digits(tmp_path, written, answer):
    (tmp_path / "rows.jsonl").write_text(
        f'{{"problem": "Find x.", "answer": {written}, "ratio": [1.10, 0.1000000000000000055]}}\n'
    )
    (raw,) = raw_rows(read_rows(str(tmp_path / "rows.jsonl")), "test", "train", set())
    assert raw["answer"] == answer
    assert answer is None or json.loads(raw["columns"]) == {"ratio": [1.1, 0.1]}


@pytest.mark.parametrize(
    ("column", "labels"),
    [
        (pa.array([0.1, 1e-5, 1e16, None], pa.float64()), ["0.1", "0.00001", "10000000000000000", None]),
        (pa.array([0.1, 1e-5, 33.3], pa.float32()), ["0.1", "0.00001", "33.3"]),
        (pa.array([Decimal("1.10"), Decimal("-2.00")], pa.decimal128(9, 2)), ["1.10", "-2.00"]),
        (pa.array([7, 2**62], pa.int64()), ["7", str(2**62)]),
    ],
    ids=["double", "single", "decimal", "integer"],
)
def test_number_columns_of_parquet_keep_their_digits(tmp_path, column, labels):
    pq.write_table(pa.table({"problem": ["Find x."] * len(column), "answer": column}), tmp_path / "rows.parquet")
    raws = raw_rows(read_rows(str(tmp_path / "rows.parquet")), "test", "train", set())
    assert [raw["answer"] for raw in raws] == labels


@pytest.mark.parametrize(
    ("row", "answer", "images"),
    [
        (source_row(answer=15), "15", 1),
        (source_row(answer=7.5), "7.5", 1),
        (source_row(answer=0.00001), "0.00001", 1),
        (source_row(answer=Decimal("1.10")), "1.10", 1),
        (source_row(answer=" 5 \\sqrt { 3 } "), "5 \\sqrt { 3 }", 1),
        (source_row(images=uri(image_file(drawing()))), "15", 1),  # one image that is no list
        (source_row(images=[image_file(drawing())]), "15", 1),
        (
            source_row(images=[image_file(drawing(1)), image_file(drawing(2))], problem="<image> and <image>"),
            "15",
            2,
        ),
    ],
    ids=str,
)
def test_rows_that_are_taken(row, answer, images):
    problem = check_problem(raw_of(row), options())
    assert (problem.answer, len(problem.images), problem.repaired) == (answer, images, 0)


PNG = image_file(drawing())
BASE64 = base64.b64encode(PNG).decode()


@pytest.mark.parametrize("name", ["images", "image"])
@pytest.mark.parametrize(
    "given",
    [
        PNG,
        BASE64,
        "\n".join(textwrap.wrap(BASE64, 76)),
        BASE64.rstrip("="),
        base64.b64encode(image_file(Image.new("RGB", (2, 2)))).decode(),  # shorter than names of files may be
        uri(PNG),
        {"bytes": PNG, "path": "a.png"},
        {"bytes": None, "path": uri(PNG)},
        {"bytes": BASE64, "path": None},
    ],
    ids=str,
)
@pytest.mark.parametrize("listed", [0, 1, 2])
def test_columns_and_forms_of_images(name, given, listed):
    """One image or a list of them in either column; with and without placeholders the same problem."""
    count = listed or 1
    row = {name: [given] * listed if listed else given, "problem": "Find x.", "answer": "15", "weight": 3}
    marked = {**row, "problem": "<image>" * count + "Find x."}
    found, rejected = index([row, marked])
    assert rejected == []
    assert [one["images_first"] for one in found] == [True, False]
    assert found[0]["problem_hash"] == found[1]["problem_hash"]
    assert len(found[0]["image_hashes"]) == count
    assert raw_of(row)["columns"] == '{"weight": 3}'
    assert process(row, "boxed")["problem"] == process(marked, "boxed")["problem"]


@pytest.mark.parametrize("empty", [None, "", b"", [], [None], [""], {}, {"bytes": None, "path": None}], ids=str)
def test_images_wins_over_image_unless_it_is_empty(empty):
    """Where both are empty the row is one of text alone."""
    assert len(check_problem(raw_of(source_row(images=empty, image=uri(PNG))), options()).images) == 1
    alone = raw_of({"images": empty, "image": empty, "problem": "Find x.", "answer": "15"})
    assert check_problem(alone, options(rows_without_image="keep")).images == []
    row = source_row(0, image="left.png")
    assert (len(check_problem(raw_of(row), options()).images), raw_of(row)["columns"]) == (1, '{"image": "left.png"}')


@pytest.mark.parametrize("instruction", TEMPLATES)
def test_images_come_before_the_question_and_behind_a_block(instruction):
    """An instruction of the row is recognised whether or not its question holds the placeholder."""
    plain = source_row(problem=TEMPLATES["tool"].replace("{question}", "Find x."))
    marked = source_row(problem=TEMPLATES["tool"].replace("{question}", "<image>Find x."))
    assert process(plain, instruction)["problem"] == process(marked, instruction)["problem"]


def test_the_report_counts_copies_and_images_that_come_first():
    rows = [source_row(0), source_row(0), source_row(0, problem="Find $x_{0}$."), source_row(1), source_row(2)]
    found, _ = index(rows)
    _, (rejected,) = index([BadRow("line is not JSON: …", "{broken")])
    assert rejected.reason == "line is not JSON: …" and "{broken" in rejected.raw
    report = summarise_data([{**row, "split": "train"} for row in found], [], options())
    assert report["rows_images_first"] == 1
    assert (report["splits"]["train"]["problems"], report["splits"]["train"]["repeated"]) == (5, 2)


def test_repairs_are_counted():
    damaged = source_row(problem="<image>Answer: \x08oxed{x}", answer="\x0crac{1}{2}")
    found, rejected = index([damaged, source_row(1)])
    assert [row["repaired"] for row in found] == [True, False]
    problem = check_problem(raw_of(damaged), options())
    assert (problem.text, problem.answer, problem.repaired) == ("<image>Answer: \\boxed{x}", "\\frac{1}{2}", 2)
    left = check_problem(raw_of(damaged), options(repair_control_characters=False))
    assert (left.text, left.answer, left.repaired) == (damaged["problem"], damaged["answer"], 0)
    assert rejected == []


def test_hashes_take_image_and_question_together():
    same = source_row(0)
    other_file = source_row(0, images=[image_file(drawing(0), "BMP")])
    instructed = source_row(0, problem=TEMPLATES["tool"].replace("{question}", same["problem"]))
    found, _ = index(
        [same, other_file, instructed, source_row(1, problem=same["problem"]), source_row(0, problem="<image>Q")]
    )
    hashes = [row["problem_hash"] for row in found]
    assert hashes[0] == hashes[1] == hashes[2]
    assert len(set(hashes)) == 3
    images = [row["image_hashes"][0] for row in found]
    assert images[0] == images[1] == images[4] != images[3]


def test_ids():
    rows = [source_row(id="a"), source_row(id="a"), source_row(id=7), source_row(), source_row(id="a_2")]
    ids = set()
    first = [raw["row_id"] for raw in raw_rows(enumerate(rows), "s", "train", ids)]
    assert first == ["a", "a_2", "7", "train_00003", "a_2_2"]
    assert [raw["row_id"] for raw in raw_rows([(3, source_row())], "s", "eval", ids)] == ["eval_00003"]


@pytest.mark.parametrize("instruction", [*TEMPLATES, "Say it: {question}"])
def test_processing_a_processed_row_changes_nothing(instruction):
    further = {"weight": 3, "data_source": "theirs", "family": "angles", "candidates": "none"}
    first = process(source_row(images=[image_file(drawing().convert("RGBA"))], id="mine", **further), instruction)
    assert json.loads(first["columns"]) == {"weight": 3}
    assert (first["data_source"], first["family"], first["candidates"]) == ("theirs", "angles", [])
    assert process(first, instruction) == first
    published = {name: first[name] for name in ("images", "problem", "answer")}
    again = process(published, instruction)
    assert {name: again[name] for name in published} == published
    assert again["problem_hash"] == first["problem_hash"]


# Real rows


@pytest.mark.parametrize("instruction", ["question", "tool"])
def test_all_real_rows(shared_data, tmp_path, instruction):
    chosen = options(instruction=instruction)
    source = [row for _, row in read_rows(str(shared_data / "geometry3k_small.parquet"))]
    raws = list(raw_rows(enumerate(source), "real", "train", set()))
    found = list(index_rows(raws, chosen, rejected := []))
    assert (len(found), rejected) == (69, [])
    assert len({name for row in found for name in row["image_hashes"]}) == 68
    assert len({row["problem_hash"] for row in found}) == 69
    prompts = [prompt_row(raw, {**one, "split": "train"}, chosen) for raw, one in zip(raws, found, strict=True)]
    for row, prompt in zip(source, prompts, strict=True):
        assert prompt["answer"] == row["answer"]
        assert row["problem"] in prompt["problem"] == prompt["prompt"]
        assert prompt["images"][0].startswith("data:image/png;base64,iVBOR")
        assert ("calc_score" in prompt["problem"]) == instruction.startswith("tool")
    for rows, schema in ((raws, RAW_PROBLEMS), (found, PROBLEM_INDEX), (prompts, PROMPTS)):
        write_rows(RowStream(lambda rows=rows: iter(rows)), schema, tmp_path / "x.parquet")
        assert list(stored_rows(tmp_path / "x.parquet")) == rows


def test_the_schemas_of_published_files_give_the_same_prompts(shared_data, tmp_path):
    source = [row for _, row in read_rows(f"{shared_data / 'geometry3k_small.parquet'}@[:12]")]
    as_uris = [{**row, "images": [uri(row["images"][0]["bytes"], "image/None")]} for row in source]
    files = [write_bytes(tmp_path / "bytes.parquet", source), write_uris(tmp_path / "uris.parquet", as_uris)]
    made = [[process(row, "tool") for _, row in read_rows(str(path))] for path in files]
    assert made[0] == made[1]
    published = write_uris(
        tmp_path / "processed.parquet", [{k: r[k] for k in ("images", "problem", "answer")} for r in made[0]]
    )
    again = [process(row, "tool") for _, row in read_rows(str(published))]
    assert again == made[0]


# Texts: damaged escapes, instructions put on and taken off, published blocks, texts that would break a prompt.

QUESTION = "<image>Find $x$ if $\\frac{1}{2} y = 3$.\r\n\nRound to the nearest tenth."
# Shaped like the block of published rows: ends with a blank line, speaks of the tool, `\boxed` damaged twice.
PUBLISHED = (
    'You check geometry.\n\nFirst think. Then send <tool_call>{"name": "calc_score", "arguments": {}}</tool_call> and '
    "Answer: \x08oxed{$Answer}.\nUse what comes back.\n\nEnd with Answer: \x08oxed{$Answer}.\n\n"
)


@pytest.mark.parametrize(
    ("text", "repaired", "count"),
    [
        ("Answer: \x08oxed{5}", "Answer: \\boxed{5}", 1),
        ("\x08oxed \x08oxed", "\\boxed \\boxed", 2),
        ("\x0crac{1}{2}", "\\frac{1}{2}", 1),
        ("\x07ngle, \x0bec", "\\angle, \\vec", 2),
        ("\\boxed{5}", "\\boxed{5}", 0),
        ("a\tb\r\nc", "a\tb\r\nc", 0),  # white space, not damage
        ("end\x08", "end\x08", 0),  # nothing follows that it could have begun
        ("\x08 oxed", "\x08 oxed", 0),
    ],
)
def test_repairs(text, repaired, count):
    assert repair_controls(text) == (repaired, count)
    check_text("problem", text, controls=False)  # let through where nothing is repaired


@pytest.mark.parametrize("first", [*TEMPLATES, "Solve this.\n{question}\nBe quick."])
@pytest.mark.parametrize("second", [*TEMPLATES, "Solve this.\n{question}\nBe quick."])
def test_instructions_replace_each_other(first, second):
    shown = instruct(QUESTION, first)
    again = instruct(shown, first)
    assert again == shown
    assert question_of(shown, first) == QUESTION
    if first in TEMPLATES:  # a text of one's own is known only while it is the instruction
        assert instruct(shown, second) == instruct(QUESTION, second)


@given(st.text(), st.sampled_from(sorted(TEMPLATES)))
def test_any_question_comes_back(text, name):
    shown = instruct(text, name)
    assert instruct(shown, name) == shown
    assert question_of(shown) == question_of(text) == question_of(question_of(text))


@pytest.mark.parametrize("first", sorted(TEMPLATES))
@pytest.mark.parametrize("second", sorted(TEMPLATES))
def test_all_instructions_of_a_text_come_off_at_once(first, second):
    """As in a row that was made with one, and then with another by somebody else."""
    shown = TEMPLATES[second].replace("{question}", instruct(QUESTION, first))
    assert question_of(shown) == QUESTION


def test_published_block():
    repaired, count = repair_controls(PUBLISHED + QUESTION)
    assert count == 2
    assert has_tool_block(repaired)
    assert question_of(repaired) == question_of(PUBLISHED + QUESTION) == QUESTION
    assert instruct(repaired, "tool") == repaired  # rows that bring the protocol keep it
    assert instruct(repaired, "boxed") == instruct(QUESTION, "boxed")
    assert instruct(repaired, "question") == QUESTION


@pytest.mark.parametrize(
    "text",
    [
        "<image>Find x.",
        "<image>Find x.\n\nGive \\boxed{}.",
        "<image>What is calc_score?",
        "What is calc_score?\n\n \n",
        "<image>Use calc_score.\n\nFind x.",  # the placeholder belongs to the question
    ],
)
def test_questions_without_a_block(text):
    assert not has_tool_block(text)
    assert question_of(text) == text


def test_the_protocol_is_the_one_that_the_environment_reads():
    for name in ("tool", "tool_brief"):
        text = TEMPLATES[name]
        assert "\\boxed" in text and "\x08" not in text
        assert "<tool_call>" in text and "calc_score" in text
    call = parse_tool_call(TEMPLATES["tool"], after_think=False)
    assert call is not None and call.is_known and call.answer == "<digits>"
    assert parse_tool_call(TEMPLATES["tool_brief"].replace('"answer": ', '"answer": 5')).answer == "5"


def test_questions_are_compared_without_placeholders_and_white_space():
    assert plain_question("<image>Find  x.\r\n") == plain_question("Find x. <image>") == "Find x."
