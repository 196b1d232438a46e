"""Thinned episodes: what `loop.retention` keeps of older iterations, and what may still be done with it.

A thinned file has the schema of a whole one. Tokens that are left out are empty lists, images that are kept once per
run are paths to files named by their content. The file's metadata say what was done, so that a reader works on what is
there or refuses with a sentence, and an audit takes nothing for torn. Thinning follows from the whole file alone, so a
continued run ends with the same files.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from operator import methodcaller
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from geo_sokoban_pipeline.runs.storage import CorruptFolderError, Thin, write_atomic
from geo_sokoban_pipeline.seeding import content_hash
from geo_sokoban_pipeline.trajectories.arrow import one_array

IMAGES = "images"  # folder of a run's images, below its outputs
_MARK = b"thinned"
_TOKENS = ("token_ids", "loss_mask", "rollout_log_probs", "weight_spans")
_SCORES = ("old_log_probs", "ref_log_probs")


class ThinnedError(ValueError):
    """A request needs more than retention has kept; the message names the file and the way out."""


@dataclass(frozen=True)
class Thinning:
    """The parts that were left out of a file.

    Attributes:
        tokens: whether tokens, masks and log-probs are kept.
        episodes: one of so many is kept.
        images: `file`, in the file itself, or `run`, in the folder `images` of the run.
        measures: columns of the index that follow from tokens, by name.
    """

    tokens: bool = True
    episodes: int = 1
    images: Literal["file", "run"] = "file"
    measures: Mapping[str, list[Any]] = field(default_factory=dict)


def read_thinning(schema: pa.Schema) -> Thinning | None:
    """The parts that were left out of a table; None: it is whole."""
    text = (schema.metadata or {}).get(_MARK)
    return None if text is None else Thinning(**json.loads(text))


def thin_table(table: pa.Table, order: Thin, outputs: Path, measures: Mapping[str, list[Any]]) -> pa.Table:
    """The table that an order leaves of a whole one; images that are kept once per run are written before.

    Args:
        outputs: folder of the run's outputs.
        measures: columns of the index that follow from tokens, one value per episode.
    """
    kept = np.arange(0, table.num_rows, order.episodes)
    table = table.take(kept).unify_dictionaries().combine_chunks()
    left: dict[str, list[Any]] = {}
    if not order.tokens:
        left = {name: [values[row] for row in kept] for name, values in measures.items()}
        for name, array in _without_tokens(table).items():
            table = _replace(table, name, array)
    if order.images == "run":
        table = _replace(table, "images", _store_images(one_array(table, "images"), outputs))
    mark = {"tokens": order.tokens, "episodes": order.episodes, "images": order.images, "measures": left}
    return table.replace_schema_metadata({**(table.schema.metadata or {}), _MARK: json.dumps(mark).encode()})


def fill_images(table: pa.Table, path: Path) -> pa.Table:
    """A table read from a file, with the bytes of images that are kept once per run.

    Args:
        path: of the file, in the outputs of its run.

    Raises:
        CorruptFolderError: an image is not there, or is another one.
    """
    thinning = read_thinning(table.schema)
    if thinning is None or thinning.images == "file" or "images" not in table.column_names:
        return table
    lists = one_array(table, "images")
    named = lists.values.field("path").dictionary_encode()
    outputs = path.absolute().parents[2]
    images = [_read_image(outputs / name, path) for name in named.dictionary.to_pylist()]
    data = pa.DictionaryArray.from_arrays(named.indices, pa.array(images, pa.binary()))
    struct = pa.StructArray.from_arrays([data, pa.nulls(len(data), pa.string())], names=["bytes", "path"])
    kind = pa.list_(pa.field("element", struct.type))
    return _replace(table, "images", pa.ListArray.from_arrays(lists.offsets, struct, type=kind))


def refuse_thinned(files: Iterable[Path], doing: str, *, tokens: bool = False, groups: bool = False) -> None:
    """See that files hold what something needs; reads their footers.

    Args:
        doing: what needs it, such as `update_sokoban`.
        tokens: tokens, masks and log-probs.
        groups: all episodes of a group.

    Raises:
        ThinnedError: a file does not.
    """
    for path in files:
        if (thinning := read_thinning(pq.read_schema(path))) is None:
            continue
        name = f"{path.parent.name}/{path.name}"
        if tokens and not thinning.tokens:
            raise ThinnedError(
                f"{doing} needs tokens, and loop.retention has kept those of the newest iterations alone: {name} has "
                "none. Name newer iterations, or train a run with loop.retention.tokens=true."
            )
        if groups and thinning.episodes > 1:
            raise ThinnedError(
                f"{doing} needs whole groups, and loop.retention has kept one episode of {thinning.episodes} of "
                f"{name}. Name newer iterations, or train a run with loop.retention.episodes=1."
            )


def _without_tokens(table: pa.Table) -> dict[str, pa.Array]:
    """The columns that hold tokens or places among them, without any."""
    count, turns = table.num_rows, one_array(table, "turns")
    structs, fields = turns.values, list(turns.values.type)
    zeros = pa.array(np.zeros(len(structs), np.int32))
    cells = [zeros if one.name in ("token_start", "token_end") else structs.field(one.name) for one in fields]
    without = pa.StructArray.from_arrays(cells, fields=fields)
    return {
        **{name: pa.array([[]] * count, table.schema.field(name).type) for name in _TOKENS},
        **{name: pa.nulls(count, table.schema.field(name).type) for name in _SCORES},
        "prompt_length": pa.array(np.zeros(count, np.int32)),
        "turns": pa.ListArray.from_arrays(turns.offsets, without, type=turns.type),
    }


def _store_images(lists: pa.Array, outputs: Path) -> pa.Array:
    data = lists.values.field("bytes")
    data = data if pa.types.is_dictionary(data.type) else data.dictionary_encode()
    names = []
    for image in data.dictionary.to_pylist():
        digest = content_hash(image)
        names.append(f"{IMAGES}/{digest[:2]}/{digest}.png")
        place = outputs / names[-1]
        if not place.is_file():
            write_atomic(place, methodcaller("write_bytes", image))
    paths = pa.array(names, pa.string()).take(data.indices)
    struct = pa.StructArray.from_arrays([pa.nulls(len(paths), pa.binary()), paths], names=["bytes", "path"])
    return pa.ListArray.from_arrays(lists.offsets, struct, type=pa.list_(pa.field("element", struct.type)))


def _read_image(place: Path, path: Path) -> bytes:
    try:
        image = place.read_bytes()
    except FileNotFoundError as error:
        raise CorruptFolderError(
            f"{place} is missing, an image of {path}: retention keeps images once per run. Restore it; whoever copies "
            f"episodes copies the folder {place.parents[1]} as well."
        ) from error
    if content_hash(image) != place.stem:
        raise CorruptFolderError(f"{place} is another image than its name says. Restore it.")
    return image


def _replace(table: pa.Table, name: str, array: pa.Array) -> pa.Table:
    place = table.schema.get_field_index(name)
    return table.set_column(place, table.schema.field(place).with_type(array.type), array)
