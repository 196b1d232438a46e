"""Identity of a task's data: a readable name and a short hash of everything that changes rows.

Equal rows have equal ids in every process and every folder; other settings give another id. Tables lie under their id,
so commands with other settings never overwrite them.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from geo_sokoban_pipeline.config.data import DataOptions
from geo_sokoban_pipeline.envs.rows import split_slice
from geo_sokoban_pipeline.runs.storage import file_digest
from geo_sokoban_pipeline.seeding import content_hash

# Raise one when the same settings give other rows: tables of earlier code then keep their own ids.
ROWS_VERSION = {"generate": 1, "file": 2, "hub": 2}

SOURCE_FILES = ("path", "validation_path", "eval_path")  # names of files, in the section `file`
_DIGITS = 8


@dataclass(frozen=True)
class DataIdentity:
    """Everything that determines the rows of a task's data.

    Attributes:
        task: name of the task.
        id: readable name and hash, the folder of the tables.
        settings: everything that changes rows, contents of local files included, as JSON values.
        options: all options of the data, as JSON values; they make the same rows again.
    """

    task: str
    id: str
    settings: dict[str, Any]
    options: dict[str, Any]

    @property
    def fingerprint(self) -> dict[str, Any]:
        """The data in the fingerprint of a run."""
        return {"id": self.id, **self.settings}


def identify_data(task: str, options: DataOptions) -> DataIdentity:
    """Identity of the data that a task's options describe; it reads local source files only."""
    given = options.model_dump(mode="json")
    source = str(given["source"])
    settings = used_options(given, type(options))
    if source == "file":
        settings["file"] = settings["file"] | _describe_files(given["file"])
    elif source == "hub" and (folder := Path(given["hub"]["dataset"])).is_dir():
        settings["hub"] = settings["hub"] | {"content": _digest(folder)}
    settings["rows_version"] = ROWS_VERSION.get(source, 1)
    text = json.dumps(settings, sort_keys=True, ensure_ascii=False, separators=(",", ":"))
    return DataIdentity(task, f"{_name(options, given)}-{content_hash(text)[:_DIGITS]}", settings, given)


def used_options(options: Mapping[str, Any], config: type[DataOptions]) -> dict[str, Any]:
    """Options of a task's data, as JSON values, without those that the chosen source does not use."""
    unused = config.UNUSED.get(str(options["source"]), ())
    kept: dict[str, Any] = {name: value for name, value in options.items() if name not in unused}
    for section, _, name in (path.partition(".") for path in unused if "." in path):
        kept[section] = {key: value for key, value in kept[section].items() if key != name}
    return kept


def _describe_files(files: Mapping[str, Any]) -> dict[str, Any]:
    """Name, slice and content of each file or folder; its place changes no row."""
    described: dict[str, Any] = {}
    for field in SOURCE_FILES:
        if (given := files.get(field)) is not None:
            path, window = split_slice(given)
            part = "" if window == slice(None) else f"@[{window.start}:{window.stop}]"
            described |= {field: path.name + part, f"{field}_content": _digest(path)}
    return described


def _digest(path: Path) -> str | None:
    """Digest of a file, or of all files below a folder; None if it does not exist, which the data nodes report."""
    if path.is_dir():
        files = sorted(below for below in path.rglob("*") if below.is_file())
        return content_hash(*(f"{below.relative_to(path).as_posix()}:{_digest(below)}" for below in files))
    if not path.is_file():
        return None
    found = path.stat()
    return _cached_digest(path.resolve(), found.st_size, found.st_mtime_ns)


@functools.lru_cache(maxsize=64)
def _cached_digest(path: Path, size: int, modified: int) -> str:
    """Cached, because a command needs it several times; a changed file has another size or time."""
    return file_digest(path)


def _name(options: DataOptions, given: Mapping[str, Any]) -> str:
    """Readable part of an id: the label of generated data, or the name of the source."""
    source = options.source
    word = options.label
    if source == "file":
        word = split_slice(given["file"]["path"] or "")[0].stem
    elif source == "hub":
        word = Path(given["hub"]["dataset"]).name
    word = re.sub(r"[^A-Za-z0-9_]+", "-", word).strip("-")[:40].strip("-")
    return f"{word}-{source}" if word else source
