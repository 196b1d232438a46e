"""Where levels come from: the generator, a data set of the hub, or a file. All three end in the same `Reading`.

A row that is no level is quarantined with its reason and the reading goes on; a source that cannot be opened, or has
not one good row, stops the run before anything is written.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from geo_sokoban_pipeline.envs.row_files import BadRow, DataError, read_rows, split_slice, take_slice
from geo_sokoban_pipeline.envs.row_values import RejectedRow, row_as_text
from geo_sokoban_pipeline.envs.sokoban.collection import SUFFIXES, Entry, read_collection
from geo_sokoban_pipeline.envs.sokoban.generation import generate_rows
from geo_sokoban_pipeline.envs.sokoban.level_rows import LevelRow
from geo_sokoban_pipeline.envs.sokoban.preprocess import (
    level_from_processed,
    level_from_raw,
    level_from_text,
    with_solution_length,
)
from geo_sokoban_pipeline.envs.sokoban.splits import SplitRule, collapse_rows, split_levels
from geo_sokoban_pipeline.options.data import ImageLimits
from geo_sokoban_pipeline.options.sokoban import FileOptions, HubOptions, SokobanDataOptions

HubLoader = Callable[[HubOptions], Iterable[Mapping[str, Any]]]
Watch = Callable[[list[LevelRow]], Iterator[LevelRow]]
ROW_SUFFIXES = (".parquet", ".jsonl")


@dataclass(frozen=True)
class Reading:
    """What a source gave.

    Attributes:
        levels: (level, split), split-disjoint under `split_rule`.
        split_rule: `layout` or `level`.
        rejected: rows that are no levels.
        rows_read: rows seen, levels where they are generated.
        rows_collapsed: rows that another row of the same level or path stands for.
        rows_left_out: levels above the counts of their split.
    """

    levels: list[tuple[LevelRow, str]]
    split_rule: SplitRule
    rejected: list[RejectedRow]
    rows_read: int
    rows_collapsed: int = 0
    rows_left_out: int = 0


@dataclass(frozen=True)
class Candidate:
    """A row before it is checked: its place, the id it has or gets, what it holds, and its file within a folder."""

    number: int
    row_id: str
    row: Mapping[str, Any] | BadRow | Entry
    file: str = ""


def read_source(options: SokobanDataOptions, load_hub_rows: HubLoader | None = None, watch: Watch = iter) -> Reading:
    """Levels of the chosen source, split.

    Args:
        options: the data's parameters.
        load_hub_rows: gives the rows of a data set of the hub; a world knows no hub client, so its caller hands one in.
        watch: gives the levels one by one while they are solved; a caller that shows progress counts them.

    Raises:
        FileNotFoundError, ValueError: the file is missing, of another format, torn, or without one good row.
        LevelsExhaustedError: the generator's setting holds too few levels.
    """
    if options.source == "generate":
        levels, rule = generate_rows(options)
        return Reading(levels, rule, [], len(levels))
    if options.source == "hub":
        source, file_format = options.hub.dataset, "processed_parquet" if options.hub.processed else "raw_parquet"
        if load_hub_rows is None:
            raise ValueError("sokoban.source=hub: no loader was given; run it through the pipeline data_sokoban.")
        rows = enumerate(load_hub_rows(options.hub))
        candidates: Iterable[Candidate] = (Candidate(number, _row_id(row, number), row) for number, row in rows)
    else:
        source, file_format = split_slice(options.file.path or "")[0].name, options.file.format
        candidates = file_rows(options.file)
    return _sort_out(candidates, source, file_format, options, watch)


def file_rows(options: FileOptions) -> Iterator[Candidate]:
    """Rows of a file: parquet, JSON lines, or levels as text (a folder of such files too); `path@[a:b]` takes a slice.

    Raises:
        FileNotFoundError: no such file, or a folder without collections.
        ValueError: a row format whose suffix is neither .parquet nor .jsonl, or a torn file.
    """
    path, window = split_slice(options.path or "")
    if path.suffix in ROW_SUFFIXES or options.format in ("raw_parquet", "processed_parquet"):
        for number, row in read_rows(options.path or ""):
            yield Candidate(number, _row_id(row, number), row)
        return
    if not path.exists():
        raise FileNotFoundError(
            f"sokoban.file.path={options.path}: no file at {path}; relative paths start at the working folder."
        )
    yield from take_slice(_folder_levels(path) if path.is_dir() else _file_levels(path), window)


def _folder_levels(folder: Path) -> Iterator[Candidate]:
    """Levels of all collections below a folder in the order of their names; ids begin with the file's name."""
    files = sorted(path for path in folder.rglob("*") if path.suffix.lower() in SUFFIXES and path.is_file())
    if not files:
        raise FileNotFoundError(
            f"sokoban.file.path={folder}: no {', '.join(SUFFIXES)} in this folder; give a folder of level collections, "
            "or one file."
        )
    names = [path.relative_to(folder).as_posix() for path in files]
    stems = [path.relative_to(folder).with_suffix("").as_posix() for path in files]
    number = 0
    for path, name, stem in zip(files, names, stems, strict=True):
        prefix = stem if stems.count(stem) == 1 else name
        for candidate in _file_levels(path):
            yield Candidate(number, f"{prefix}/{candidate.row_id}", candidate.row, name)
            number += 1


def _file_levels(path: Path) -> Iterator[Candidate]:
    # Line by line: bytes that are no UTF-8 are letters of a title in an older encoding, or no symbol of a level, so
    # only the level that holds them is rejected.
    text = "\n".join(_decode(line) for line in path.read_bytes().split(b"\n"))
    for number, entry in enumerate(read_collection(text)):
        yield Candidate(number, entry.row_id, entry)


def _decode(line: bytes) -> str:
    try:
        return line.decode("utf-8")
    except UnicodeDecodeError:
        return line.decode("cp1252", "replace")


def _sort_out(
    candidates: Iterable[Candidate], source: str, file_format: str, options: SokobanDataOptions, watch: Watch
) -> Reading:
    good: list[LevelRow] = []
    rejected: list[RejectedRow] = []
    rows_read = 0
    for candidate in candidates:
        rows_read += 1
        try:
            good.append(_to_level(candidate, candidate.file or source, file_format, options.limits))
        except ValueError as error:
            raw = _raw_text(candidate.row)
            rejected.append(RejectedRow(candidate.row_id, str(error), raw, candidate.file or source))
    distinct = collapse_rows(good, options.collapse)
    levels: list[LevelRow] = []
    for level in watch(distinct):
        try:
            levels.append(with_solution_length(level, options.solver_states))
        except ValueError as error:
            rejected.append(RejectedRow(level.row_id, str(error), level.board.to_xsb(), level.source))
    if not levels:
        raise DataError(_nothing_good(source, rows_read, rejected))
    split, rule = split_levels(levels, options.shares, options.counts, options.seed)
    return Reading(split, rule, rejected, rows_read, len(good) - len(distinct), len(levels) - len(split))


def _to_level(candidate: Candidate, source: str, file_format: str, limits: ImageLimits) -> LevelRow:
    row = candidate.row
    if isinstance(row, BadRow):
        raise ValueError(row.reason)
    if isinstance(row, Entry):
        return level_from_text(row.rows, candidate.row_id, source, row.columns)
    if "xsb" in row and file_format in ("auto", "xsb", "boxoban"):
        if not isinstance(row["xsb"], str):
            raise ValueError(f"xsb is a {type(row['xsb']).__name__}; the level as text is expected")
        columns = {name: value for name, value in row.items() if name not in ("xsb", "id")}
        return level_from_text(row["xsb"], candidate.row_id, source, columns)
    if file_format == "processed_parquet" or (file_format == "auto" and "images" in row):
        return level_from_processed(row, candidate.number, source, limits)
    if file_format in ("xsb", "boxoban"):
        raise ValueError("row has no field xsb")
    return level_from_raw(row, candidate.number, source)


def _row_id(row: Mapping[str, Any] | BadRow, number: int) -> str:
    known = row.get("id") if isinstance(row, Mapping) else None
    return f"row_{number}" if known is None else str(known)


def _raw_text(row: Mapping[str, Any] | BadRow | Entry) -> str:
    if isinstance(row, BadRow):
        return row.raw
    return row.rows if isinstance(row, Entry) else row_as_text(row)


def _nothing_good(source: str, rows_read: int, rejected: list[RejectedRow]) -> str:
    if rows_read == 0:
        return f"{source} holds no rows and no levels; check the file, its slice and its format."
    reasons = "; ".join(
        f"{times} × {reason}" for reason, times in Counter(row.reason for row in rejected).most_common(3)
    )
    way_out = "Check sokoban.file.format or sokoban.hub.processed."
    return f"{source}: none of its {rows_read} rows is a playable level: {reasons}. {way_out}"
