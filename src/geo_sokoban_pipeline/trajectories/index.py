"""Index of a run's episodes: one light row per episode, without tokens, texts of turns or images.

Each trajectory file `<kind>/iter=00012/part-000.parquet` of a run has rows in one index file below `episodes/`, see
below. They follow from the trajectory file alone, so a missing, torn or outdated index file is made again from it, with
equal rows. Images are never read.
"""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import reduce
from operator import attrgetter
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from geo_sokoban_pipeline.config.grpo import EpisodeChoice
from geo_sokoban_pipeline.runs.storage import write_atomic
from geo_sokoban_pipeline.trajectories.arrow import (
    PART_COLUMNS,
    Ragged,
    find_responses,
    flags,
    list_lengths,
    one_array,
    read_column,
)
from geo_sokoban_pipeline.trajectories.parquet import TornFileError, read_trajectories
from geo_sokoban_pipeline.trajectories.thinning import read_thinning

logger = logging.getLogger(__name__)

INDEX_VERSION = "3"  # of the columns and of the rules for tags; files of another version are made again
FOLDER = "episodes"  # below a run's outputs
BLOCK = 64  # iterations in one file
SPLITS = {"trajectories": "train", "eval_trajectories": "validation", "held_out_trajectories": "evaluation"}
_EVALUATIONS = ("evaluate_", "control_")  # runs whose `eval_trajectories` are no validations

# Tags of all tasks; a task has further ones (`Task.tags`).
OUT_OF_TURNS = "out_of_turns"
TRUNCATED = "truncated"
REPETITION = "repetition"
ONE_ANSWER = "one_answer_collapse"

_REPEATS, _REPEATED_LENGTH, _LONGEST_PIECE, _TAIL = 4, 40, 500, 4000
_COLLAPSED_SHARE, _COLLAPSED_PROMPTS = 0.5, 4
_ANSWER_LENGTH = 200
_NAME = re.compile(r"iter=\d{5,}/part-\d{3,}\.parquet")  # others are files of other people
_repeats = attrgetter("repeats")

_COPIED: dict[str, pa.DataType] = {
    "trajectory_id": pa.string(),
    "task": pa.string(),
    "task_id": pa.string(),
    "iteration": pa.int32(),
    "group_index": pa.int32(),
    "sample_index": pa.int32(),
    "policy_version": pa.int32(),
    "status": pa.string(),
    "finish_reason": pa.string(),
    "drop_reason": pa.string(),
    "trained": pa.bool_(),
    "reward": pa.float64(),
    **dict.fromkeys(PART_COLUMNS, pa.float64()),
    "advantage": pa.float64(),
    "success": pa.bool_(),
    "difficulty": pa.string(),
    "optimal_steps": pa.int32(),
    "label": pa.string(),
    "n_turns": pa.int32(),
    "prompt_length": pa.int32(),
}
_MADE: dict[str, pa.DataType] = {
    "n_images": pa.int32(),
    "tokens": pa.int32(),
    "response_tokens": pa.int32(),
    "mean_log_prob": pa.float64(),
    "max_log_prob_gap": pa.float64(),
    "widest_gap": pa.float64(),
    "widest_gap_position": pa.int32(),
    "widest_gap_token": pa.int32(),
    "answer": pa.string(),
    "greedy": pa.bool_(),
    "tags": pa.list_(pa.field("element", pa.string())),
    "tag_counts": pa.list_(pa.field("element", pa.int32())),
    "partition": pa.string(),
    "row": pa.int32(),
}
_WIDEST = ("widest_gap", "widest_gap_position", "widest_gap_token")
_PLACE = dict.fromkeys(("run", "run_id", "split"), pa.string())
INDEX_SCHEMA = pa.schema(list((_PLACE | _COPIED | _MADE).items()), metadata={"index_version": INDEX_VERSION})
_TOKENS = ("token_ids", "loss_mask", "rollout_log_probs", "old_log_probs")
# Columns of a trajectory file that the index needs: all but images, and what is copied nowhere.
NEEDED = [*_COPIED, *_TOKENS, "turns", "metrics", "image_grid_thw", "sampling"]


@dataclass(frozen=True)
class Place:
    """Where a trajectory file lies: namespace and run id of its run, what its episodes are for, its partition.

    Attributes:
        partition: path below the run's outputs without suffix, such as `trajectories/iter=00012/part-000`.
    """

    run: str
    run_id: str
    split: str
    partition: str

    @classmethod
    def of(cls, path: Path) -> Place:
        """From the path `…/<run>/<run id>/<kind>/iter=00012/part-000.parquet`."""
        kind, outputs = path.parents[1].name, path.absolute().parents[2]
        run, split = outputs.parent.name, SPLITS.get(kind, kind)
        is_evaluation = split == "validation" and run.startswith(_EVALUATIONS)
        partition = f"{kind}/{path.parent.name}/{path.stem}"
        return cls(run, outputs.name, "evaluation" if is_evaluation else split, partition)


@dataclass(frozen=True, slots=True, eq=False)
class StoredResponse:
    """One response of the policy: its text, the parsed action, the environment's info, `count_repeats` of the text.

    Equal responses of a table are one object, and objects are compared by identity: values that follow from a
    response alone are cheap to cache.
    """

    text: str
    action: str | None
    info: Mapping[str, Any]
    repeats: int = 0


@dataclass(frozen=True, slots=True)
class StoredEpisode:
    """Source of an episode's tags and answers.

    Attributes:
        success: None where it is not known.
        metrics: the environment's numbers.
        responses: in order.
    """

    status: str
    success: bool | None
    label: str | None
    metrics: Mapping[str, float]
    responses: Sequence[StoredResponse]


class Describer(Protocol):
    """A task's words about an episode; `Task` is one."""

    def answer(self, episode: StoredEpisode) -> str | None:
        """The answer, equal for equal answers; None: there is none."""

    def tags(self, episode: StoredEpisode) -> dict[str, int]:
        """Counts of what went wrong, by tag."""


FindTask = Callable[[str], Describer]


def build_index(table: pa.Table, place: Place, find_task: FindTask) -> pa.Table:
    """Index of a table of episodes, in its order.

    Args:
        table: at least the columns `NEEDED` of `TRAJECTORY_SCHEMA`.
        find_task: the task of a name.
    """
    count = table.num_rows
    columns = {name: one_array(table, name) for name in NEEDED}
    made: dict[str, Any] = {name: columns[name] for name in _COPIED}
    if (thinning := read_thinning(table.schema)) is None or thinning.tokens:
        made |= _measure_tokens(columns)
    else:  # a measure that the file was not thinned with is not known
        made |= {name: pa.nulls(count, INDEX_SCHEMA.field(name).type) for name in _WIDEST} | dict(thinning.measures)
    answers, tags = _describe(columns, find_task)
    made |= {
        "n_images": list_lengths(columns["image_grid_thw"]),
        "answer": answers,
        "greedy": _read_sampling(columns, "greedy", False),
        "tags": [sorted(found) for found in tags],
        "tag_counts": [[found[name] for name in sorted(found)] for found in tags],
        "row": np.arange(count),
        **{name: pa.repeat(value, count) for name, value in asdict(place).items()},
    }
    arrays = [
        value if isinstance(value, pa.Array) else pa.array(value, INDEX_SCHEMA.field(name).type)
        for name, value in ((name, made[name]) for name in INDEX_SCHEMA.names)
    ]
    return pa.Table.from_arrays(arrays, schema=INDEX_SCHEMA)


def measure_tokens(table: pa.Table) -> dict[str, list[Any]]:
    """Columns of the index that follow from tokens, one value per episode; an index is made of them without tokens."""
    measured = _measure_tokens({name: one_array(table, name) for name in _TOKENS})
    return {
        name: values.tolist() if isinstance(values, np.ndarray) else values.to_pylist()
        for name, values in (measured | {"prompt_length": table["prompt_length"].to_numpy()}).items()
    }


def _measure_tokens(columns: Mapping[str, pa.Array]) -> dict[str, Any]:
    mask, sampled = Ragged.of(columns["loss_mask"]), Ragged.of(columns["rollout_log_probs"])
    lengths = _sum_rows(mask.values, mask.offsets)
    with np.errstate(invalid="ignore", divide="ignore"):
        means = _sum_rows(sampled.values, sampled.offsets) / lengths
    return {
        "tokens": mask.lengths,
        "response_tokens": lengths,
        "mean_log_prob": pa.array(means, mask=lengths == 0),
        **_find_widest(columns, mask, sampled),
    }


def _find_widest(columns: Mapping[str, pa.Array], mask: Ragged, sampled: Ragged) -> dict[str, pa.Array]:
    """The sampled token of each episode on which trainer and engine differ most; of equal gaps the first one."""
    places = np.flatnonzero(mask.values)
    rows = np.searchsorted(mask.offsets, places, side="right") - 1
    gaps = find_gaps(columns["old_log_probs"], sampled, places, rows)
    known = np.flatnonzero(~np.isnan(gaps))
    order = known[np.lexsort((-np.abs(gaps[known]), rows[known]))]
    filled, first = np.unique(rows[order], return_index=True)
    widest = order[first]
    found = {
        "max_log_prob_gap": np.abs(gaps[widest]),
        "widest_gap": gaps[widest],
        "widest_gap_position": (places[widest] - mask.offsets[filled]).astype(np.int32),
        "widest_gap_token": Ragged.of(columns["token_ids"]).values[places[widest]].astype(np.int32),
    }
    missing = np.ones(len(mask.lengths), bool)
    missing[filled] = False
    return {name: pa.array(_spread(values, filled, missing), mask=missing) for name, values in found.items()}


def _spread(values: np.ndarray, rows: np.ndarray, missing: np.ndarray) -> np.ndarray:
    """(rows,) values at their rows, 0 elsewhere."""
    whole = np.zeros(len(missing), values.dtype)
    whole[rows] = values
    return whole


def find_gaps(old_log_probs: pa.Array, sampled: Ragged, places: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """(tokens,) float64 log-probs of the trainer minus those of the engine; NaN where the trainer recomputed none.

    Args:
        old_log_probs: column of the trainer's.
        sampled: those of the engine.
        places: flat positions in `sampled` of the tokens.
        rows: row of each.
    """
    old = Ragged.of(old_log_probs)
    gaps = np.full(len(places), np.nan)
    known = (old.lengths > 0)[rows]  # a null list counts as empty
    at = places[known] + (old.offsets - sampled.offsets)[rows[known]]
    gaps[known] = old.values[at].astype(np.float64) - sampled.values[places[known]]
    return gaps


def _sum_rows(values: np.ndarray, offsets: np.ndarray) -> np.ndarray:
    """(rows,) sum of each row; integers stay integers."""
    wide = values.astype(np.float64 if values.dtype.kind == "f" else np.int64)
    sums = np.zeros(len(offsets) - 1, wide.dtype)
    filled = np.flatnonzero(np.diff(offsets))
    if len(filled):
        sums[filled] = np.add.reduceat(wide, offsets[filled])
    return sums


def _describe(columns: Mapping[str, pa.Array], find_task: FindTask) -> tuple[list[str | None], list[dict[str, int]]]:
    answers: list[str | None] = []
    tags: list[dict[str, int]] = []
    names = columns["task"].to_pylist()
    tasks = {name: find_task(name) for name in set(names)}
    for name, episode in zip(names, _read_episodes(columns), strict=True):
        answer, found = _ask(tasks[name], name, episode)
        answers.append(answer and answer[:_ANSWER_LENGTH])
        if any(map(_repeats, episode.responses)):
            found = {**found, REPETITION: max(map(_repeats, episode.responses))}
        tags.append(found)
    for name, rows in _find_limits(columns).items():
        for row in rows:
            tags[row][name] = 1
    for row in _find_collapse(answers, columns):
        tags[row][ONE_ANSWER] = 1
    return answers, tags


def _ask(task: Describer, name: str, episode: StoredEpisode) -> tuple[str | None, dict[str, int]]:
    try:
        return task.answer(episode), task.tags(episode)
    except Exception:  # of any kind: a rule of a task of one's own; no run ends for it
        logger.warning("the index has an episode of %s without tags, because its rules failed", name, exc_info=True)
        return None, {}


def _read_episodes(columns: Mapping[str, pa.Array]) -> list[StoredEpisode]:
    turns, metrics = Ragged.of(columns["turns"]), read_column("metrics", columns["metrics"])
    places = np.flatnonzero(find_responses(turns))
    responses = _read_responses(turns.values.take(pa.array(places)))
    ends = np.searchsorted(places, turns.offsets).tolist()
    plain = (columns[name].to_pylist() for name in ("status", "success", "label"))
    return [
        StoredEpisode(status, success, label, metrics[row], responses[ends[row] : ends[row + 1]])
        for row, (status, success, label) in enumerate(zip(*plain, strict=True))
    ]


def _read_responses(said: pa.StructArray) -> list[StoredResponse]:
    """Equal responses are one object: episodes repeat many, and reading each once is several times quicker."""
    cells = [said.field(name).dictionary_encode(null_encoding="encode") for name in ("text", "action", "info")]
    texts, actions, infos = (cell.dictionary.to_pylist() for cell in cells)
    repeats = [count_repeats(text) for text in texts]
    parsed = [orjson.loads(info) for info in infos]
    keys = np.zeros(len(said), np.int64)
    for cell in cells:
        keys = keys * len(cell.dictionary) + cell.indices.to_numpy()
    _, first, chosen = np.unique(keys, return_index=True, return_inverse=True)
    codes = zip(*(cell.indices.to_numpy()[first].tolist() for cell in cells), strict=True)
    different = [
        StoredResponse(texts[text], actions[action], parsed[info], repeats[text]) for text, action, info in codes
    ]
    return [different[place] for place in chosen.tolist()]


def _find_limits(columns: Mapping[str, pa.Array]) -> dict[str, Sequence[int]]:
    """Rows of episodes that a limit ended: on turns, without success, where several are allowed; or on tokens."""
    most = _read_sampling(columns, "max_turns", 0)
    status, turns = columns["status"], columns["n_turns"].to_numpy()
    cut = flags(pc.equal(status, "truncated"))
    ended = cut | flags(pc.equal(status, "completed"))
    # A response that is cut off in the last turn is a matter of tokens.
    at_limit = (most > 1) & (turns >= most) & ~flags(pc.equal(columns["finish_reason"], "length"))
    return {
        OUT_OF_TURNS: np.flatnonzero(ended & at_limit & ~flags(columns["success"])).tolist(),
        TRUNCATED: np.flatnonzero(cut & ~at_limit).tolist(),
    }


def _read_sampling(columns: Mapping[str, pa.Array], name: str, unknown: Any) -> np.ndarray:
    """(rows,) one setting of each episode's sampling."""
    sampling = columns["sampling"].dictionary_encode()
    found = [orjson.loads(text).get(name) or unknown for text in sampling.dictionary.to_pylist()]
    return np.array(found, type(unknown))[sampling.indices.to_numpy()]


def _find_collapse(answers: Sequence[str | None], columns: Mapping[str, pa.Array]) -> list[int]:
    """Rows of unsolved episodes whose answer is that of at least half of all answered ones, over several prompts."""
    if not (counts := Counter(answer for answer in answers if answer is not None)):
        return []
    answer, most = counts.most_common(1)[0]
    rows = [row for row, given in enumerate(answers) if given == answer]
    prompts = columns["task_id"].to_pylist()
    labels = set(columns["label"].to_pylist())
    # One answer to problems that all have the same one is no collapse.
    same = len(labels) == 1 and None not in labels
    asked = len({prompts[row] for row in rows})
    solved = columns["success"].to_pylist()
    collapsed = most >= _COLLAPSED_SHARE * counts.total() and asked >= _COLLAPSED_PROMPTS and not same
    return [row for row in rows if not solved[row]] if collapsed else []


def count_repeats(text: str) -> int:
    """How often the piece recurs with which a text ends, where the repeats are half of the text or more; else 0.

    Four repeats of 40 characters together count at least; pieces have up to 500 characters, and of long texts the last
    4,000 are looked at.
    """
    if len(text) < _REPEATED_LENGTH:
        return 0
    tail = f" {text.strip()}"[-_TAIL:]
    count = len(tail)
    for length in range(1, min(_LONGEST_PIECE, count // _REPEATS) + 1):
        piece = tail[count - length :]
        if not tail.endswith(piece * _REPEATS):
            continue
        repeats = _REPEATS
        while tail.endswith(piece, 0, count - repeats * length):
            repeats += 1
        if repeats * length >= max(_REPEATED_LENGTH, count / 2):
            return repeats
    return 0


# Choosing episodes by the index.


def spread(count: int, wanted: int) -> list[int]:
    """At most so many of `count` places, evenly spread, with the first and the last; of one, the last."""
    if wanted >= count:
        return list(range(count))
    if wanted <= 1:
        return [count - 1] * wanted
    return [round(number * (count - 1) / (wanted - 1)) for number in range(wanted)]


class NoEpisodesError(ValueError):
    """No episode of the index fulfils the conditions; the message has the way out."""


_CONDITIONS = {"split", "ids", "first_iteration", "last_iteration", "filter", "tags"}


def find_episodes(index: pa.Table, options: EpisodeChoice) -> pa.Table:
    """Rows of the index whose episodes fulfil the conditions and have a sampled token, in their order.

    Raises:
        NoEpisodesError: there is none, an id is unknown, or a condition cannot be understood.
    """
    index = index.combine_chunks()
    if unknown := sorted(set(options.ids) - set(index["trajectory_id"].to_pylist())):
        raise NoEpisodesError(f"ids: there is no episode {unknown[0]!r} in this run; the index lists all of them.")
    conditions = [
        pc.greater(index["response_tokens"], 0),
        pc.is_in(index["trajectory_id"], pa.array(options.ids, pa.string()))
        if options.ids
        else pc.equal(index["split"], options.split),
    ]
    if options.last_iteration is not None:
        conditions.append(pc.less_equal(index["iteration"], options.last_iteration))
    found = index.filter(reduce(pc.and_, conditions))
    first: Any = options.first_iteration
    if first is None:  # ids may be of any
        first = 0 if options.ids else pc.max(found["iteration"])
    found = found.filter(pc.greater_equal(found["iteration"], first))
    if options.tags:
        wanted = set(options.tags)
        found = found.filter(pa.array([not wanted.isdisjoint(tags) for tags in found["tags"].to_pylist()], pa.bool_()))
    if options.filter:
        found = found.filter(_read_filter(options.filter))
    if not found.num_rows:
        raise NoEpisodesError(
            f"none of the {index.num_rows} stored episodes has a sampled token and fulfils the conditions: "
            f"{options.model_dump(include=_CONDITIONS)}. Widen them."
        )
    return found


def _read_filter(conditions: Sequence[tuple[str, str, Any]]) -> Any:
    """Arrow expression of conditions; see `find_episodes`."""
    shown = [list(one) for one in conditions]
    if unknown := [name for name, _, _ in conditions if name not in INDEX_SCHEMA.names]:
        raise NoEpisodesError(
            f"filter={shown}: the index has no column {unknown[0]}; it has {', '.join(INDEX_SCHEMA.names)}."
        )
    try:
        expression = pq.filters_to_expression([tuple(one) for one in conditions])
        INDEX_SCHEMA.empty_table().filter(expression)
    except (ValueError, TypeError, pa.ArrowException) as error:
        raise NoEpisodesError(f"filter={shown}: {error}.") from error
    return expression


# Files of the index: one for each trajectory file, and one in place of them for each whole block of past iterations.
# A query opens every file, so a long run has few.


def index_path(path: Path) -> Path:
    """Index file of a trajectory file, until its block is merged."""
    return index_folder(path.parents[1]) / path.parent.name / path.name


def index_folder(folder: Path) -> Path:
    """Folder of the index of a folder of trajectories."""
    return folder.parent / FOLDER / folder.name


def trajectory_files(folder: Path) -> list[Path]:
    """Files of a folder of trajectories, or their index files, by iteration and part."""
    found = folder.glob("iter=*/part-*.parquet")
    return sorted((path for path in found if _NAME.fullmatch(_name(path))), key=_numbers)


def write_index(path: Path, table: pa.Table, find_task: FindTask) -> None:
    """Write the index of a trajectory file that holds this table; merge the blocks that end before its iteration."""
    place, folder = Place.of(path), index_folder(path.parents[1])
    block = _block(folder, _numbers(path)[0])
    if block.is_file():  # an iteration that is stored once more
        _split_block(block, lambda partition: partition != place.partition)
    _write(index_path(path), build_index(table, place, find_task))
    _merge_before(folder, block)


def read_index(outputs: Path, find_task: FindTask, kinds: Sequence[str] = tuple(SPLITS)) -> pa.Table:
    """Index of the episodes of a run; index files that are missing, torn or of another version are made again.

    Where they cannot be written, the rows are still complete.

    Args:
        outputs: folder with `trajectories`, `eval_trajectories` and `held_out_trajectories`.
        kinds: which of these are read.

    Raises:
        TornFileError: a trajectory file without an index file cannot be read.
    """
    found = [table for kind in kinds for table in _read_kind(outputs / kind, find_task)]
    return pa.concat_tables(found) if found else INDEX_SCHEMA.empty_table()


def keep_committed(index: pa.Table, newest: int | None) -> pa.Table:
    """Rows of committed iterations: training up to `newest`, validations of the policies up to the next version.

    Args:
        newest: iteration, −1 before the first one; None: all rows.
    """
    if newest is None:
        return index
    split, iteration = index["split"], index["iteration"]
    trained = pc.and_(pc.equal(split, "train"), pc.greater(iteration, newest))
    validated = pc.and_(pc.equal(split, "validation"), pc.greater(iteration, newest + 1 if newest >= 0 else -1))
    return index.filter(pc.invert(pc.or_(trained, validated)))


def find_edits(index: pa.Table, outputs: Path, kind: str) -> list[str]:
    """Episodes that differ from their rows in the index, which was written with them: one text a file.

    Files that cannot be read are left out.

    Args:
        index: as `read_index` gives it.
        outputs: folder of the run's outputs.
        kind: of its folders, such as `trajectories`.
    """
    found = []
    for path in trajectory_files(outputs / kind):
        name = Place.of(path).partition
        try:
            table = read_trajectories(path, list(_COPIED))
        except (TornFileError, OSError):
            continue
        rows = index.filter(pc.equal(index["partition"], name))
        if not rows.num_rows:  # of a run that goes on: newer than the index
            continue
        if rows.num_rows != table.num_rows:
            found.append(f"{name}: {table.num_rows} episodes, and {rows.num_rows} when it was written")
            continue
        thinning = read_thinning(table.schema)
        for column, kind_of in _COPIED.items():
            if column == "prompt_length" and thinning is not None and not thinning.tokens:
                continue  # it went with the tokens
            now, then = table[column].cast(kind_of).to_pylist(), rows[column].to_pylist()
            row = next((row for row, pair in enumerate(zip(now, then, strict=True)) if pair[0] != pair[1]), None)
            if row is not None:
                episode = rows["trajectory_id"][row].as_py()
                found.append(f"{name}, {episode}: {column} is {now[row]}, and was {then[row]} when it was written")
                break
    return found


def tidy_index(folder: Path) -> None:
    """Delete the rows of the index of a folder of trajectories whose trajectory files are gone, and doubled files."""
    own, files = index_folder(folder), trajectory_files(folder)
    kept = {Place.of(path).partition for path in files}
    merged: set[str] = set()
    for block in own.glob("block-*.parquet"):
        table = _read(block)
        partitions = set() if table is None else set(table["partition"].unique().to_pylist())
        if partitions and partitions <= kept:
            merged |= partitions
        else:
            _split_block(block, kept.__contains__)
    single = {index_path(path) for path in files if Place.of(path).partition not in merged}
    for path in own.glob("iter=*/*"):
        if path not in single:
            path.unlink(missing_ok=True)
    _remove_empty(own.glob("iter=*"))


def _numbers(path: Path) -> tuple[int, int]:
    iteration, part = re.findall(r"\d+", _name(path))
    return int(iteration), int(part)


def _name(path: Path) -> str:
    return f"{path.parent.name}/{path.name}"


def _block(folder: Path, iteration: int) -> Path:
    return folder / f"block-{iteration // BLOCK * BLOCK:05d}.parquet"


def _write(path: Path, index: pa.Table) -> None:
    # A torn index file is made again, so nothing waits for the disk.
    write_atomic(path, lambda temporary: pq.write_table(index, temporary, compression="none"), flush=False)


def _read(path: Path) -> pa.Table | None:
    """An index file; None: it is missing, torn, or of another version."""
    try:
        with pq.ParquetFile(path) as stored:
            return stored.read() if stored.schema_arrow.equals(INDEX_SCHEMA, check_metadata=True) else None
    except (OSError, pa.ArrowException):
        return None


def _read_kind(folder: Path, find_task: FindTask) -> list[pa.Table]:
    """Tables of the index of a folder of trajectories, by iteration."""
    files = {Place.of(path).partition: path for path in trajectory_files(folder)}
    found: list[tuple[tuple[int, int], pa.Table]] = []
    for block in index_folder(folder).glob("block-*.parquet"):
        table = _read(block)
        names = [] if table is None else table["partition"].unique().to_pylist()
        merged = [name for name in names if name in files]
        if table is not None and merged:
            if merged != names:
                table = table.filter(pc.is_in(table["partition"], pa.array(merged)))
            found.append((_numbers(files[merged[0]]), table))
            files = {name: path for name, path in files.items() if name not in set(merged)}
    found += [(_numbers(path), _read_or_make(path, find_task)) for path in files.values()]
    return [table for _, table in sorted(found, key=lambda one: one[0])]


def _read_or_make(path: Path, find_task: FindTask) -> pa.Table:
    file = index_path(path)
    if (index := _read(file)) is None:
        index = build_index(read_trajectories(path, NEEDED), Place.of(path), find_task)
        with suppress(OSError):  # a run that may only be read
            _write(file, index)
    return index


def _merge_before(folder: Path, block: Path) -> None:
    """Put the files of all iterations before a block into one file per block; blocks with a torn file are left."""
    blocks: dict[Path, list[Path]] = {}
    for path in trajectory_files(folder):
        blocks.setdefault(_block(folder, _numbers(path)[0]), []).append(path)
    for place, files in blocks.items():
        if place < block and not place.is_file():
            tables = [_read(path) for path in files]
            if all(table is not None for table in tables):
                _write(place, pa.concat_tables(tables).combine_chunks())
                for path in files:
                    path.unlink()
                _remove_empty({path.parent for path in files})


def _remove_empty(folders: Iterable[Path]) -> None:
    for folder in folders:
        if not any(folder.iterdir()):
            folder.rmdir()


def _split_block(block: Path, keep: Callable[[str], bool]) -> None:
    """Put the rows of a block back into one file per trajectory file, as far as they are kept."""
    table = _read(block)
    for name in [] if table is None else table["partition"].unique().to_pylist():
        if table is not None and keep(name):
            file = block.parent / name.partition("/")[2]
            _write(file.with_name(f"{file.name}.parquet"), table.filter(pc.equal(table["partition"], name)))
    block.unlink()
