"""Trajectory files: parquet that other tools read, written atomically and checked on reading.

A file is one row group with the image bytes in one dictionary, so a repeated frame costs its bytes once, on disk and
in memory. The file stores no Arrow schema of its own: types come from parquet, and a reader that does not ask for a
dictionary gets plain bytes. Float columns are not dictionary-encoded, which keeps -0.0 and 0.0 apart. Lists and texts
are compressed; numbers and columns of few words are not, and these alone have minimum and maximum.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from geo_sokoban_pipeline.runs.storage import CorruptFolderError, partition, write_atomic
from geo_sokoban_pipeline.trajectories.schema import (
    TRAJECTORY_SCHEMA,
    TableContext,
    check_version,
    read_context,
    validate_schema,
)
from geo_sokoban_pipeline.trajectories.thinning import fill_images
from geo_sokoban_pipeline.trajectories.types import Trajectory, trajectories_to_table
from geo_sokoban_pipeline.trajectories.validation import TrajectoryError

IMAGE_BYTES = "images.list.element.bytes"
DICTIONARY_LIMIT = 1 << 28  # bytes; the default of 1 MiB would store repeated frames again
PART_LIMIT = 512 << 20  # bytes of decoded images per part
_TEXTS = frozenset({"trajectory_id", "task_id", "error", "response"})  # columns with a distinct text for each episode


class TornFileError(CorruptFolderError):
    """A trajectory file is truncated or foreign; the message names it and the way out."""


class OtherVersionError(TornFileError):
    """A trajectory file of another schema version; the message names it and the way out."""


def write_trajectories(path: Path, table: pa.Table) -> None:
    """Write a table of episodes as one parquet file, atomically.

    Raises:
        TrajectoryError: the table's types or metadata are not those of the contract.
        OSError: no space, read-only folder; `path` is then unchanged.
    """
    validate_schema(table.schema)
    read_context(table.schema)
    table = table.unify_dictionaries().combine_chunks()
    write_atomic(path, lambda temporary: _write_parquet(temporary, table))


def _write_parquet(path: Path, table: pa.Table) -> None:
    # Setting up the codec for a page costs more than compressing a short column saves.
    long = {name for name, _ in _LEAVES if "." in name or name in _TEXTS}
    writer = pq.ParquetWriter(
        path,
        table.schema.remove_metadata(),
        compression={name: "zstd" if name in long else "none" for name, _ in _LEAVES},
        write_statistics=[name for name, _ in _LEAVES if name not in long],
        store_schema=False,
        use_dictionary=[name for name, kind in _LEAVES if not pa.types.is_floating(kind)],
        dictionary_pagesize_limit=DICTIONARY_LIMIT,
        write_page_checksum=True,
        # Log-probs hardly repeat; splitting their bytes lets zstd at least shrink the exponents.
        column_encoding={name: "BYTE_STREAM_SPLIT" for name, kind in _LEAVES if pa.types.is_float32(kind)},
    )
    with writer:
        writer.add_key_value_metadata(dict(table.schema.metadata))
        writer.write_table(table, row_group_size=max(table.num_rows, 1))


def _leaves(fields: Iterable[pa.Field], prefix: str = "") -> Iterable[tuple[str, pa.DataType]]:
    for field in fields:
        name, kind = f"{prefix}{field.name}", field.type
        while pa.types.is_list(kind):
            name, kind = f"{name}.list.element", kind.value_type
        if pa.types.is_struct(kind):
            yield from _leaves(kind, f"{name}.")
        else:
            yield name, kind


_LEAVES = list(_leaves(TRAJECTORY_SCHEMA))


def read_trajectories(path: Path, columns: Sequence[str] | None = None) -> pa.Table:
    """Read a trajectory file; image bytes stay dictionary-encoded, one copy of each in memory.

    Args:
        columns: names to read; None for all.

    Raises:
        TornFileError: the file is no parquet, is cut off, or holds another schema than the contract's.
        CorruptFolderError: an image that retention keeps once per run is not there.
        FileNotFoundError: no such file.
    """
    check_file(path)
    try:
        with pq.ParquetFile(path, read_dictionary=[IMAGE_BYTES], page_checksum_verification=True) as file:
            table = file.read(columns=None if columns is None else list(columns))
    except FileNotFoundError:
        raise
    except (pa.ArrowException, OSError) as error:
        raise _torn(path, error) from error
    return fill_images(table, path)


def check_file(path: Path) -> None:
    """Check that a file holds episodes of this schema version, from its footer alone.

    Raises:
        OtherVersionError: another version of this project has written it.
        TornFileError, FileNotFoundError: as in `read_trajectories`.
    """
    try:
        schema = pq.read_schema(path)
        check_version(schema)
    except TrajectoryError as error:
        way_out = (
            "Other tools still read the file. To run this version, choose another run_id, or start this one over with "
            "fresh=true"
        )
        raise OtherVersionError(f"{path} was written by another version of this project. {error} {way_out}.") from error
    except FileNotFoundError:
        raise
    except (pa.ArrowException, OSError) as error:
        raise _torn(path, error) from error
    try:
        validate_schema(schema)
        read_context(schema)
    except TrajectoryError as error:
        way_out = "It was not written by this project: move it out of this folder"
        raise TornFileError(f"{path} is a foreign parquet file. {error} {way_out}.") from error


def _torn(path: Path, error: Exception) -> TornFileError:
    reason = " ".join(str(error).split())
    way_out = "It was cut off or changed: restore it, or delete it to go on without these episodes"
    return TornFileError(f"{path} cannot be read as parquet ({reason}). {way_out}.")


def split_parts(trajectories: Sequence[Trajectory], limit: int = PART_LIMIT) -> list[list[Trajectory]]:
    """Cut episodes into parts whose images, decoded to RGB, stay below a limit.

    Groups are kept whole, so that rules on groups can be checked part by part; a single group above the limit
    becomes a part of its own.

    Args:
        trajectories: in any order; the order is kept.
        limit: bytes.

    Returns:
        At least one part unless there are no episodes; none is empty.
    """
    # An episode may repeat an image, and episodes of a group share images.
    sizes = {image: decoded_size(image) for image in set(chain.from_iterable(item.images for item in trajectories))}
    parts: list[list[Trajectory]] = []
    size = 0
    for group in _adjacent_groups(trajectories):
        added = sum(map(sizes.__getitem__, chain.from_iterable(item.images for item in group)))
        if not parts or size + added > limit:
            parts.append([])
            size = 0
        parts[-1].extend(group)
        size += added
    return parts


def _adjacent_groups(trajectories: Sequence[Trajectory]) -> list[list[Trajectory]]:
    # A group whose episodes are scattered holds together everything between its first and its last episode.
    last = {(episode.iteration, episode.group_index): place for place, episode in enumerate(trajectories)}
    groups: list[list[Trajectory]] = []
    end = -1
    for place, episode in enumerate(trajectories):
        if place > end:
            groups.append([])
        groups[-1].append(episode)
        end = max(end, last[episode.iteration, episode.group_index])
    return groups


def decoded_size(png: bytes) -> int:
    """Bytes of a PNG once decoded to RGB, from the width and height in its header."""
    return int.from_bytes(png[16:20], "big") * int.from_bytes(png[20:24], "big") * 3


def name_parts(iteration: int, trajectories: Sequence[Trajectory], context: TableContext) -> dict[str, pa.Table]:
    """Partitions of one iteration's episodes, ready to be saved: {"iter=00012/part-000": table}; {} for none."""
    parts = split_parts(trajectories)
    return {
        f"{partition(iteration)}/part-{index:03d}": trajectories_to_table(part, context)
        for index, part in enumerate(parts)
    }
