"""Sources of levels: the generator, a dataset of the hub, or files. Generated layouts are assigned to splits first."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from geo_sokoban_pipeline.config.data import ImageLimits
from geo_sokoban_pipeline.envs.rows import (
    SPLITS,
    BadRow,
    DataError,
    HubReader,
    RejectedRow,
    read_rows,
    row_as_text,
    share_out,
    split_slice,
    take_slice,
    wanted_splits,
)
from geo_sokoban_pipeline.envs.sokoban.board import Layout
from geo_sokoban_pipeline.envs.sokoban.collection import SUFFIXES, Entry, read_collection
from geo_sokoban_pipeline.envs.sokoban.config import FileOptions, SokobanDataOptions
from geo_sokoban_pipeline.envs.sokoban.data import (
    LevelRow,
    SplitRule,
    collapse_rows,
    data_source_name,
    level_from_processed,
    level_from_raw,
    level_from_text,
    split_levels,
    spread_by_length,
    with_solution_length,
)
from geo_sokoban_pipeline.envs.sokoban.levels import (
    Level,
    LevelsExhaustedError,
    count_positions,
    generate_levels,
    levels_of_layout,
    list_layouts,
)
from geo_sokoban_pipeline.formats import type_name
from geo_sokoban_pipeline.seeding import derive_seed, python_generator

Draw = Callable[..., list[Level]]
# Rounds in which levels of random layouts are drawn until every split has enough; each doubles the number.
_MAX_ROUNDS = 6


def generate_rows(options: SokobanDataOptions) -> tuple[list[tuple[LevelRow, str]], SplitRule]:
    """Levels of all splits, with the rule of the split.

    Raises:
        LevelsExhaustedError: a split's count is above what the setting yields; the message says how many that is.
    """
    counts = _counts(options)
    if (layouts := known_layouts(options)) is None:
        drawn, rule = _from_random_layouts(options, counts)
    elif len(layouts) < len([split for split in SPLITS if counts[split]]):
        drawn, rule = _by_level(options, counts, layouts), "level"
    else:
        drawn, rule = _by_layout(options, counts, layouts), "layout"
    return [(_row(level, f"{split}_{i:05d}"), split) for split in SPLITS for i, level in enumerate(drawn[split])], rule


def known_layouts(options: SokobanDataOptions) -> list[Layout] | None:
    """Every wall layout of the setting, one per class of the symmetries; None if they are too many to list."""
    layouts = list_layouts(options.height, options.width, options.inner_walls)
    # Too little floor for boxes and player gives no level; such layouts would leave a split empty.
    return layouts and [layout for layout in layouts if layout.floor.bit_count() > options.boxes]


def assign_layouts(options: SokobanDataOptions, layouts: list[Layout]) -> dict[str, list[Layout]]:
    """The wall layouts of each split."""
    return share_out(layouts, options.shares, python_generator(options.seed, "sokoban", "splits", "layout"))


def spread_draw(draw: Draw, count: int, lengths: Sequence[int] | None) -> list[Level]:
    """Draw levels with equal counts per length; other lengths replace those that run out.

    Args:
        draw: gives up to so many levels with lengths from a list in turn, fewer where lengths run out.
        count: levels wanted.
        lengths: solution lengths wanted; None: as they come.

    Returns:
        Up to `count` levels; fewer only if all lengths ran out.
    """
    if lengths is None:
        return draw(count, lengths=None)
    used_up: list[Level] = []
    open_lengths = list(lengths)
    while open_lengths:
        missing = count - len(used_up)
        levels = draw(missing, lengths=open_lengths)
        if len(levels) >= missing:
            return used_up + levels
        found = Counter(level.solution_length for level in levels)
        quota = {length: len(range(i, missing, len(open_lengths))) for i, length in enumerate(open_lengths)}
        short = [length for length in open_lengths if found[length] < quota[length]]
        used_up += [level for level in levels if level.solution_length in short]
        open_lengths = [length for length in open_lengths if length not in short]
    return used_up


def _by_layout(options: SokobanDataOptions, counts: dict[str, int], layouts: list[Layout]) -> dict[str, list[Level]]:
    parts = assign_layouts(options, layouts)
    drawn = {}
    for split in SPLITS:
        part = parts[split]
        drawn[split] = spread_draw(_draw(options, split, part), counts[split], _lengths(options)) if part else []
        _check(options, split, counts[split], drawn[split], f"on the {len(part)} wall layouts of this split")
    return drawn


def _by_level(options: SokobanDataOptions, counts: dict[str, int], layouts: list[Layout]) -> dict[str, list[Level]]:
    levels = spread_draw(_draw(options, "all", layouts), sum(counts.values()), _lengths(options)) if layouts else []
    drawn: dict[str, list[Level]] = {}
    # Held-out splits choose first, so that they get equal counts per length.
    for split in reversed(SPLITS):
        generator = python_generator(options.seed, "sokoban", "deal", split)
        drawn[split] = spread_by_length(levels, [level.solution_length for level in levels], counts[split], generator)
        _check(options, split, counts[split], drawn[split], f"beyond those of other splits, {len(levels)} in all")
        taken = {level.board.canonical_hash for level in drawn[split]}
        levels = [level for level in levels if level.board.canonical_hash not in taken]
    return drawn


def _from_random_layouts(
    options: SokobanDataOptions, counts: dict[str, int]
) -> tuple[dict[str, list[Level]], SplitRule]:
    """Levels on random walls, routed by a hash of their layout until every split has enough."""
    draw, total, drawn = _draw(options, "all", None), sum(counts.values()), {}
    for round_number in range(_MAX_ROUNDS):
        levels = spread_draw(draw, (total * 5 // 4 + 8) << round_number, _lengths(options))
        pools: dict[str, list[Level]] = {split: [] for split in SPLITS}
        for level in levels:
            pools[_split_of(level.board.layout_hash, options)].append(level)
        drawn = {split: pools[split][: counts[split]] for split in SPLITS}
        if all(len(drawn[split]) == counts[split] for split in SPLITS):
            return drawn, "layout"
    for split in SPLITS:
        _check(options, split, counts[split], drawn[split], "on the layouts of this split; raise its share")
    return drawn, "layout"


def _split_of(layout_hash: str, options: SokobanDataOptions) -> str:
    point = derive_seed(options.seed, "sokoban", "split", layout_hash) / 2**63
    splits = wanted_splits(options.shares)
    for split in splits[:-1]:
        point -= getattr(options.shares, split)
        if point < 0:
            return split
    return splits[-1]


def _draw(options: SokobanDataOptions, name: str, layouts: Sequence[Layout] | None) -> Draw:
    return partial(
        generate_levels,
        seed=derive_seed(options.seed, "sokoban", name),
        height=options.height,
        width=options.width,
        boxes=options.boxes,
        min_solution=options.min_solution,
        max_solution=options.max_solution,
        inner_walls=options.inner_walls,
        layouts=layouts,
        return_fewer=True,
    )


def _lengths(options: SokobanDataOptions) -> range | None:
    return range(options.min_solution, options.max_solution + 1) if options.equal_lengths else None


def _counts(options: SokobanDataOptions) -> dict[str, int]:
    counts = {split: getattr(options.counts, split) for split in SPLITS}
    for split, count in counts.items():
        if count is None:
            raise ValueError(
                f"sokoban.counts.{split}=null: how many levels to generate must be said. "
                f"Set sokoban.counts.{split} to a number; null is for levels that are read."
            )
        if count and not getattr(options.shares, split):
            raise ValueError(
                f"sokoban.counts.{split}={count}, but sokoban.shares.{split}=0: raise the share or set the count to 0."
            )
    return counts


def _check(options: SokobanDataOptions, split: str, count: int, found: list[Level], where: str) -> None:
    if len(found) >= count:
        return
    low, high = options.inner_walls
    largest = max((level.solution_length or 0 for level in found), default=0)
    raise LevelsExhaustedError(
        f"sokoban.counts.{split}={count}: {options.height}×{options.width} levels with {options.boxes} "
        f"{'box' if options.boxes == 1 else 'boxes'}, {low} to {high} inner walls and solutions of "
        f"{options.min_solution} to {options.max_solution} moves yield {len(found)} distinct ones {where}; "
        f"longest solution among them: {largest}. "
        f"Lower sokoban.counts.{split}, widen the solution lengths or inner_walls, or raise height, width or boxes."
    )


def _row(level: Level, row_id: str) -> LevelRow:
    return LevelRow(
        row_id,
        "generate",
        data_source_name(level.board),
        level.board,
        seed=level.seed,
        solution_length=level.solution_length,
    )


# How many levels a setting holds, counted without drawing any: by solution length, and by split.


# About a second of listing.
_MAX_COUNTED_POSITIONS = 1_000_000


def setting_yield(options: SokobanDataOptions) -> dict[str, int] | None:
    """Distinct levels of the setting by solution length; None if they are too many to count."""
    layouts = _countable_layouts(options)
    return None if layouts is None else _count_levels(options, layouts)


def split_yields(options: SokobanDataOptions) -> dict[str, int] | None:
    """Largest number of distinct levels of each split; None if they are too many to count.

    Where there are fewer layouts than splits, all splits share the levels of all layouts.
    """
    if (layouts := _countable_layouts(options)) is None:
        return None
    if len(layouts) < len(wanted_splits(options.shares)):
        return dict.fromkeys(SPLITS, sum(_count_levels(options, layouts).values()))
    parts = assign_layouts(options, layouts)
    return {split: sum(_count_levels(options, part).values()) for split, part in parts.items()}


def _countable_layouts(options: SokobanDataOptions) -> list[Layout] | None:
    layouts = known_layouts(options)
    if layouts is None or sum(count_positions(layout, options.boxes) for layout in layouts) > _MAX_COUNTED_POSITIONS:
        return None
    return layouts


def _count_levels(options: SokobanDataOptions, layouts: Sequence[Layout]) -> dict[str, int]:
    found: Counter[int] = Counter()
    for layout in layouts:
        levels = levels_of_layout(layout, options.boxes, options.min_solution, options.max_solution)
        if any(layout.transform(symmetry) == layout for symmetry in range(1, 8)):
            # Only on symmetric walls can two of the listed levels be equal.
            found.update({board.canonical_hash: length for board, length in levels}.values())
        else:
            found.update(length for _, length in levels)
    return {str(length): found[length] for length in sorted(found)}


# Where levels come from: the generator, a data set of the hub, or a file. All three end in the same `Reading`.


Watch = Callable[[list[LevelRow]], Iterator[LevelRow]]
ROW_SUFFIXES = (".parquet", ".jsonl")


@dataclass(frozen=True)
class Reading:
    """Result of reading a source.

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
class UncheckedRow:
    """A row before the check: its id, its content, and its file within a folder."""

    row_id: str
    row: Mapping[str, Any] | BadRow | Entry
    file: str = ""


def read_source(
    options: SokobanDataOptions, hub: HubReader | None = None, watch: Watch = iter, most: int | None = None
) -> Reading:
    """Levels of the chosen source, split.

    Args:
        options: the data's parameters.
        hub: reads rows from the hub; needed for `source=hub`.
        watch: gives the levels one by one while they are solved; a caller that shows progress counts them.
        most: rows read at most, for sources that are read; None: all.

    Raises:
        FileNotFoundError, ValueError: the file is missing, of another format, torn, or without one good row.
        LevelsExhaustedError: the generator's setting holds too few levels.
    """
    if options.source == "generate":
        levels, rule = generate_rows(options)
        return Reading(levels, rule, [], len(levels))
    if options.source == "hub":
        source, file_format = options.hub.dataset, "processed_parquet" if options.hub.processed else "raw_parquet"
        if hub is None:
            raise ValueError("sokoban.source=hub: no loader was given; run it through the pipeline data_sokoban.")
        rows = enumerate(hub.rows(options.hub, options.hub.split))
        candidates: Iterable[UncheckedRow] = (UncheckedRow(_row_id(row, number), row) for number, row in rows)
    else:
        source, file_format = split_slice(options.file.path or "")[0].name, options.file.format
        candidates = file_rows(options.file)
    return _sort_out(islice(candidates, most), source, file_format, options, watch)


def file_rows(options: FileOptions) -> Iterator[UncheckedRow]:
    """Rows of a file: parquet, JSON lines, or levels as text (a folder of such files too); `path@[a:b]` takes a slice.

    Raises:
        FileNotFoundError: no such file, or a folder without collections.
        ValueError: a row format whose suffix is neither .parquet nor .jsonl, or a torn file.
    """
    path, window = split_slice(options.path or "")
    if path.suffix in ROW_SUFFIXES or options.format in ("raw_parquet", "processed_parquet"):
        for number, row in read_rows(options.path or ""):
            yield UncheckedRow(_row_id(row, number), row)
        return
    if not path.exists():
        raise FileNotFoundError(
            f"sokoban.file.path={options.path}: no file at {path}; relative paths start at the working folder."
        )
    yield from take_slice(_folder_levels(path) if path.is_dir() else _file_levels(path), window)


def _folder_levels(folder: Path) -> Iterator[UncheckedRow]:
    """Levels of all collections below a folder in the order of their names; ids begin with the file's name."""
    files = sorted(path for path in folder.rglob("*") if path.suffix.lower() in SUFFIXES and path.is_file())
    if not files:
        raise FileNotFoundError(
            f"sokoban.file.path={folder}: no {', '.join(SUFFIXES)} in this folder; give a folder of level collections, "
            "or one file."
        )
    names = [path.relative_to(folder).as_posix() for path in files]
    stems = [path.relative_to(folder).with_suffix("").as_posix() for path in files]
    for path, name, stem in zip(files, names, stems, strict=True):
        prefix = stem if stems.count(stem) == 1 else name
        for candidate in _file_levels(path):
            yield UncheckedRow(f"{prefix}/{candidate.row_id}", candidate.row, name)


def _file_levels(path: Path) -> Iterator[UncheckedRow]:
    # Line by line: bytes that are no UTF-8 are letters of a title in an older encoding, or no symbol of a level, so
    # only the level that holds them is rejected.
    text = "\n".join(_decode(line) for line in path.read_bytes().split(b"\n"))
    for entry in read_collection(text):
        yield UncheckedRow(entry.row_id, entry)


def _decode(line: bytes) -> str:
    try:
        return line.decode("utf-8")
    except UnicodeDecodeError:
        return line.decode("cp1252", "replace")


def _sort_out(
    candidates: Iterable[UncheckedRow], source: str, file_format: str, options: SokobanDataOptions, watch: Watch
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


def _to_level(candidate: UncheckedRow, source: str, file_format: str, limits: ImageLimits) -> LevelRow:
    row = candidate.row
    if isinstance(row, BadRow):
        raise ValueError(row.reason)
    if isinstance(row, Entry):
        return level_from_text(row.rows, candidate.row_id, source, row.columns)
    if "xsb" in row and file_format in ("auto", "xsb", "boxoban"):
        if not isinstance(row["xsb"], str):
            raise ValueError(f"xsb is {type_name(row['xsb'])}; the level as text is expected")
        columns = {name: value for name, value in row.items() if name not in ("xsb", "id")}
        return level_from_text(row["xsb"], candidate.row_id, source, columns)
    if file_format == "processed_parquet" or (file_format == "auto" and "images" in row):
        return level_from_processed(row, candidate.row_id, source, limits)
    if file_format in ("xsb", "boxoban"):
        raise ValueError("row has no field xsb")
    return level_from_raw(row, candidate.row_id, source)


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
