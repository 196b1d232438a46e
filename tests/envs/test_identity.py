"""The id of data: equal where rows are equal, another one for each field that changes rows, the same for all others."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from typing import Any

import pytest
from pydantic import BaseModel

from geo_sokoban_pipeline.config.base import parameter_names
from geo_sokoban_pipeline.envs.data_identity import identify_data
from geo_sokoban_pipeline.envs.geo3k.config import DATA_OPTIONS
from geo_sokoban_pipeline.envs.sokoban.config import SokobanDataOptions

MODELS: dict[str, type[BaseModel]] = {"sokoban": SokobanDataOptions, **DATA_OPTIONS}
COUNTS = {"train": 9, "validation": 9, "eval": 9}
SHARES = {"train": 0.5, "validation": 0.25, "eval": 0.25}
ALL, READ, MADE = {"generate", "hub", "file"}, {"hub", "file"}, {"generate"}

# Another value of each field, and the sources whose rows it changes. Sections stand for all of their fields, of which
# each occurs with its own name too.
SOKOBAN: dict[str, tuple[Any, set[str]]] = {
    "seed": (1, ALL),
    "height": (7, MADE),
    "width": (7, MADE),
    "boxes": (2, MADE),
    "inner_walls": ([0, 2], MADE),
    "min_solution": (2, MADE),
    "max_solution": (7, MADE),
    "equal_lengths": (False, MADE),
    "counts": (COUNTS, ALL),
    "counts.train": (9, ALL),
    "counts.validation": (9, ALL),
    "counts.eval": (9, ALL),
    "shares": (SHARES, ALL),
    "shares.train": (SHARES, ALL),
    "shares.validation": (SHARES, ALL),
    "shares.eval": (SHARES, ALL),
    "solver_states": (7, READ),
    "collapse": ("rows", READ),
    "cell_px": (24, ALL),
    "observation": ("text", ALL),
    "max_steps": (50, ALL),
    "instruction": ("full", ALL),
    "pictures": ("keep", READ),
    "strip_chat_markup": (False, READ),
    "consistent_legend": (False, READ),
    "hub": ({"dataset": "a/b"}, {"hub"}),
    "hub.dataset": ("a/b", {"hub"}),
    "hub.revision": ("v2", {"hub"}),
    "hub.split": ("test", {"hub"}),
    "hub.processed": (True, {"hub"}),
    "file": ({"path": "other.txt"}, {"file"}),
    "file.path": ("other.txt", {"file"}),
    "file.format": ("xsb", {"file"}),
    "limits": ({"max_bytes": 99}, READ),
    "limits.max_bytes": (99, READ),
    "limits.max_pixels": (99_999, READ),
}
GEOMETRY: dict[str, tuple[Any, set[str]]] = {
    "seed": (1, ALL),
    "problems": ({"difficulty": "easy"}, MADE),
    "problems.difficulty": ("easy", MADE),
    "problems.families": ({"square": 1.0}, MADE),
    "problems.picture_scale": (2.0, MADE),
    "problems.angle_step": (5, MADE),
    "problems.held_out_angles": ({"eval": 0.5}, MADE),
    "problems.lengths": ([10, 20], MADE),
    "counts": (COUNTS, ALL),
    "counts.train": (9, ALL),
    "counts.validation": (9, ALL),
    "counts.eval": (9, ALL),
    "shares": (SHARES, READ),
    "shares.train": (SHARES, READ),
    "shares.validation": (SHARES, READ),
    "shares.eval": (SHARES, READ),
    "instruction": ("tool", ALL),
    "exclude_overlaps": ("images", ALL),
    "repair_control_characters": (False, ALL),
    "transparency": ("drop", ALL),
    "image_folder": ("images", READ),
    "rows_without_image": ("keep", READ),
    "hub": ({"dataset": "a/b"}, {"hub"}),
    "hub.dataset": ("a/b", {"hub"}),
    "hub.revision": ("v2", {"hub"}),
    "hub.train": ("all", {"hub"}),
    "hub.validation": ("val", {"hub"}),
    "hub.eval": ("val", {"hub"}),
    "hub.streaming": (True, set()),
    "file": ({"path": "other.parquet"}, {"file"}),
    "file.path": ("other.parquet", {"file"}),
    "file.validation_path": ("v.parquet", {"file"}),
    "file.eval_path": ("e.parquet", {"file"}),
    "limits": ({"max_bytes": 99}, ALL),
    "limits.max_bytes": (99, ALL),
    "limits.max_pixels": (99, ALL),
    "limits.max_aspect": (99, ALL),
    "limits.max_images": (2, ALL),
}
FIELDS = {"sokoban": SOKOBAN, "geo3k": GEOMETRY, "geo3k_multi_turn": GEOMETRY}


def changed(task: str, source: str, path: str = "", value: Any = None) -> str:
    """Id of a task's default data of a source, after one change."""
    options: dict[str, Any] = {"source": source, "file": {"path": "levels.txt"}}
    section, _, name = path.partition(".")
    if section == "shares":
        options["shares"] = value
    elif name:
        options[section] = {**options.get(section, {}), name: value}
    elif section:
        options[section] = value
    return identify_data(task, MODELS[task].model_validate(options)).id


@pytest.mark.parametrize("task", sorted(FIELDS))
@pytest.mark.parametrize("source", ["file", "hub"])
def test_the_options_of_an_identity_are_those_that_were_given(task, source, tmp_path):
    """Contents of files are in the id alone, so that the options make the same rows again."""
    path = tmp_path / "rows.txt"
    path.write_text("#####")
    options = MODELS[task].model_validate({"source": source, "file": {"path": str(path)}, "hub": {"dataset": "a/b"}})
    identity = identify_data(task, options)
    assert MODELS[task].model_validate(identity.options) == options
    assert identify_data(task, MODELS[task].model_validate(identity.options)) == identity


@pytest.mark.parametrize("source", sorted(ALL))
@pytest.mark.parametrize("task", sorted(FIELDS))
def test_fields_that_change_rows_change_the_id_and_no_others(task, source):
    """A new field is in the identity by itself; the table says whether that is right."""
    assert set(parameter_names(MODELS[task])) == {"source", *FIELDS[task]}
    plain = changed(task, source)
    differing = {path for path, (value, _) in FIELDS[task].items() if changed(task, source, path, value) != plain}
    assert differing == {path for path, (_, sources) in FIELDS[task].items() if source in sources}


def test_sources_and_tasks_have_ids_of_their_own():
    ids = [changed(task, source) for task in FIELDS for source in ALL]
    assert len(set(ids)) == len(ids)


@pytest.mark.parametrize(
    ("task", "options", "name"),
    [
        ("sokoban", {"height": 8, "width": 10, "boxes": 2}, "8x10-2box-generate"),
        ("sokoban", {"source": "file", "file": {"path": "/some/where/Level set (1).txt@[3:9]"}}, "Level-set-1-file"),
        ("sokoban", {"source": "hub"}, "sokoban-hub"),
        ("geo3k", {}, "tiny-generate"),
        ("geo3k_multi_turn", {"source": "hub", "hub": {"dataset": "chenhegu/geo3k_imgurl"}}, "geo3k_imgurl-hub"),
        ("geo3k", {"source": "file", "file": {"path": "räume.parquet"}}, "r-ume-file"),
    ],
)
def test_names_can_be_read(task, options, name):
    found = identify_data(task, MODELS[task].model_validate(options)).id
    assert re.fullmatch(re.escape(name) + r"-[0-9a-f]{8}", found)


EVERYWHERE = """
import sys
from geo_sokoban_pipeline.envs.data_identity import identify_data
from geo_sokoban_pipeline.envs.geo3k.config import Geo3kDataOptions
from geo_sokoban_pipeline.envs.sokoban.config import SokobanDataOptions
from geo_sokoban_pipeline.seeding import content_hash
ids = [identify_data("sokoban", SokobanDataOptions()).id, identify_data("geo3k", Geo3kDataOptions()).id]
heavy = {"torch", "transformers", "datasets", "pyarrow", "pandas"} & set(sys.modules)

from geo_sokoban_pipeline.envs.geo3k.sources import open_source
from geo_sokoban_pipeline.envs.sokoban.data import prompt_row, raw_level_row
from geo_sokoban_pipeline.envs.sokoban.sources import read_source
counts = {"train": 60, "validation": 9, "eval": 20}
options = SokobanDataOptions(counts=counts, seed=4)
rows = [prompt_row(raw_level_row(level, split, "layout"), options) for level, split in read_source(options).levels]
for difficulty in ("tiny", "mixed"):
    rows += open_source(Geo3kDataOptions(counts=counts, problems={"difficulty": difficulty}), "geo3k")
found = [*ids, len(rows), content_hash(repr(rows))]
"""


def test_ids_and_rows_are_equal_in_every_process():
    """An id costs no heavy import: every command asks for it."""
    here: dict[str, Any] = {}
    exec(EVERYWHERE, here)
    environment = {**os.environ, "PYTHONHASHSEED": "12345"}
    words = [sys.executable, "-c", f"{EVERYWHERE}print(found, heavy)"]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout == f"{here['found']} set()\n"


# Local sources


FILES = ("path", "validation_path", "eval_path")


def of_file(path, task="sokoban", **options):
    given = {"source": "file", "file": {"path": str(path)}, **options}
    return identify_data(task, MODELS[task].model_validate(given)).id


def test_the_content_of_a_file_is_in_the_id_and_its_folder_is_not(tmp_path):
    one, same, other = (tmp_path / name / "levels.txt" for name in ("a", "b", "c"))
    for path, text in ((one, "#@$.#"), (same, "#@$.#"), (other, "#@ $.#")):
        path.parent.mkdir()
        path.write_text(text)
    assert of_file(one) == of_file(same)
    assert len({of_file(one), of_file(other), of_file(f"{one}@[0:1]"), of_file(f"{one}@[0:2]")}) == 4
    before = of_file(one)
    one.write_text("#@  $.#")
    assert of_file(one) != before
    renamed = one.rename(one.with_name("others.txt"))  # the name of the file is in the rows
    assert of_file(renamed) != of_file(one)  # where nothing is, that is the content


@pytest.mark.parametrize(
    ("task", "options", "written"),
    [
        *(
            ("geo3k", {"source": "file", "file": {n: f"{n}.parquet" for n in FILES}}, f"{name}.parquet")
            for name in FILES
        ),
        ("sokoban", {"source": "file", "file": {"path": "folder"}}, "folder/second.xsb"),
        ("sokoban", {"source": "hub", "hub": {"dataset": "folder"}}, "folder/train.parquet"),
    ],
)
def test_every_file_of_a_source_is_in_the_id(tmp_path, monkeypatch, task, options, written):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    for name in ("folder/first.xsb", *(f"{name}.parquet" for name in FILES)):
        (tmp_path / name).write_bytes(b"rows")
    before = identify_data(task, MODELS[task].model_validate(options)).id
    (tmp_path / written).write_bytes(b"other rows")
    assert identify_data(task, MODELS[task].model_validate(options)).id != before
