"""Identity of a task's data: a short id of everything that changes rows, behind a name that people can read.

Equal rows have equal ids in every process and every folder; rows of other settings have another one. Tables lie under
their id, so what one command makes is never what another one has made with other settings.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from geo_sokoban_pipeline.config.geo3k import Geo3kDataOptions
from geo_sokoban_pipeline.config.sokoban import SokobanDataOptions
from geo_sokoban_pipeline.envs.rows import split_slice
from geo_sokoban_pipeline.runs.storage import file_digest
from geo_sokoban_pipeline.seeding import content_hash
from geo_sokoban_pipeline.tasks import World, task_of

# Raised where the same settings give other rows than before: tables of the code before keep their ids then.
ROWS_VERSION = 1

# Fields that change no row of a source. A field that is not named here belongs to the identity.
_UNUSED: Mapping[World, Mapping[str, tuple[str, ...]]] = {
    "sokoban": {
        "generate": (
            *("solver_states", "collapse", "pictures", "strip_chat_markup", "consistent_legend"),
            *("hub", "file", "limits"),
        ),
        "hub": (*("height", "width", "boxes", "inner_walls", "min_solution", "max_solution", "equal_lengths", "file"),),
        "file": (*("height", "width", "boxes", "inner_walls", "min_solution", "max_solution", "equal_lengths", "hub"),),
    },
    "geometry": {
        "generate": ("shares", "image_folder", "hub", "file"),
        "hub": ("problems", "file", "hub.streaming"),
        "file": ("problems", "hub"),
    },
}
_FILES = ("path", "validation_path", "eval_path")  # names of files, in the section `file`
_DIGITS = 8


@dataclass(frozen=True)
class DataIdentity:
    """What the rows of a task's data follow from.

    Attributes:
        task: name of the task.
        id: readable name and hash, the folder of the tables.
        settings: everything that changes rows, contents of local files included, as JSON values.
        options: all options of the data, as JSON values: what makes the same rows again.
    """

    task: str
    id: str
    settings: dict[str, Any]
    options: dict[str, Any]

    @property
    def fingerprint(self) -> dict[str, Any]:
        """What the fingerprint of a run holds of its data."""
        return {"id": self.id, **self.settings}


def identify_data(task: str, options: BaseModel) -> DataIdentity:
    """Identity of the data that a task's options describe; reads local source files, and nothing else."""
    given = options.model_dump(mode="json")
    world, source = task_of(task).world, str(given["source"])
    settings = _without(given, _UNUSED[world][source])
    if source == "file":
        settings["file"] |= _describe_files(given["file"])
    elif source == "hub" and (folder := Path(given["hub"]["dataset"])).is_dir():
        settings["hub"]["content"] = _digest(folder)
    settings["rows_version"] = ROWS_VERSION
    text = json.dumps(settings, sort_keys=True, ensure_ascii=False, separators=(",", ":"))
    return DataIdentity(task, f"{_name(options)}-{content_hash(text)[:_DIGITS]}", settings, given)


def _without(options: Mapping[str, Any], unused: tuple[str, ...]) -> dict[str, Any]:
    kept: dict[str, Any] = {name: value for name, value in options.items() if name not in unused}
    for section, _, name in (path.partition(".") for path in unused if "." in path):
        kept[section] = {key: value for key, value in kept[section].items() if key != name}
    return kept


def _describe_files(files: Mapping[str, Any]) -> dict[str, Any]:
    """Name, slice and content of each file or folder; where it lies changes no row."""
    described: dict[str, Any] = {}
    for field in _FILES:
        if (given := files.get(field)) is not None:
            path, window = split_slice(given)
            part = "" if window == slice(None) else f"@[{window.start}:{window.stop}]"
            described[field] = path.name + part
            described[f"{field}_content"] = _digest(path)
    return described


def _digest(path: Path) -> str | None:
    """Digest of a file, or of all files below a folder; None: nothing is there, which the data nodes will say."""
    if path.is_dir():
        files = sorted(below for below in path.rglob("*") if below.is_file())
        return content_hash(*(f"{below.relative_to(path).as_posix()}:{_digest(below)}" for below in files))
    if not path.is_file():
        return None
    found = path.stat()
    return _cached_digest(path.resolve(), found.st_size, found.st_mtime_ns)


@functools.lru_cache(maxsize=64)
def _cached_digest(path: Path, size: int, modified: int) -> str:
    """A command asks several times; a file that has been written since has another size or time."""
    return file_digest(path)


def _name(options: BaseModel) -> str:
    """What people recognise: size and boxes, or difficulty, or the name of what is read."""
    if isinstance(options, SokobanDataOptions):
        made, read = f"{options.height}x{options.width}-{options.boxes}box", options.file.path
        dataset, source = options.hub.dataset, options.source
    elif isinstance(options, Geo3kDataOptions):
        made, read = options.problems.difficulty, options.file.path
        dataset, source = options.hub.dataset, options.source
    else:
        raise TypeError(f"{type(options).__name__} describes the data of no task")
    words = {"generate": made, "file": split_slice(read or "")[0].stem, "hub": Path(dataset).name}
    word = re.sub(r"[^A-Za-z0-9_]+", "-", words[source]).strip("-")[:40].strip("-")
    return f"{word}-{source}" if word else source
