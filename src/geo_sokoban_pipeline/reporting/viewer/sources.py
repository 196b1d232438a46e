"""Runs that a site shows: their index, where their files lie, and what else is stored of them.

Everything is found from paths alone, so that a folder copied from another machine is enough: tokenizer, settings and
token scores are used where they lie beside it, and left out where they do not.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from operator import itemgetter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from geo_sokoban_pipeline.config.grpo import SourceOptions
from geo_sokoban_pipeline.reporting.episodes import TokenTexts, read_token_texts
from geo_sokoban_pipeline.runs.folders import (
    ASIDE,
    DATA_NOTE,
    RunFolders,
    RunStore,
    committed_iteration,
    prompts_folder,
)
from geo_sokoban_pipeline.runs.storage import find_json
from geo_sokoban_pipeline.tasks import task_or_plain
from geo_sokoban_pipeline.trajectories.index import (
    FOLDER,
    NEEDED,
    SPLITS,
    Place,
    build_index,
    keep_committed,
    read_index,
    trajectory_files,
)
from geo_sokoban_pipeline.trajectories.parquet import OtherVersionError, TornFileError, check_file, read_trajectories

_POLICIES = ("policy", "final_policy", "base_policy")  # folders of a run that have its tokenizer
_SIDE_TABLES = (("score", "token_scores"), ("score", "occlusion"), ("fork", "turn_values"))


class NothingToBrowseError(ValueError):
    """A path holds no stored episodes; the message names it."""


@dataclass(frozen=True)
class BrowsedRun:
    """Episodes of one run.

    Attributes:
        name: such as `train_sokoban/default`.
        index: one row per episode, see `trajectories/index.py`.
        folder: an episode lies in row `row` of `<partition>.parquet` below it.
        settings: what the run was made with, flat; {}: not known.
        token_texts: texts of token ids; None: the site shows ids.
        report: page of its report; None: there is none.
        scores: files of `token_scores` that may hold scores of these episodes.
        maps: the same of `occlusion`.
        values: the same of `turn_values`.
        evaluation: its `eval_summary`; None: there is none.
        clusters: by the task id of an episode what it shares with those that are no evidence of their own, where that
            is known and not the task id itself.
    """

    name: str
    index: pa.Table
    folder: Path
    settings: Mapping[str, Any] = field(default_factory=dict)
    token_texts: TokenTexts | None = None
    scores: Sequence[Path] = ()
    report: Path | None = None
    maps: Sequence[Path] = ()
    values: Sequence[Path] = ()
    evaluation: Mapping[str, Any] | None = None
    clusters: Mapping[str, str] = field(default_factory=dict)

    def within(self, first: int, last: int | None) -> BrowsedRun:
        """The same with the training episodes of these iterations alone, `last` None: up to the newest."""
        iteration = self.index["iteration"]
        kept = pc.greater_equal(iteration, first)
        if last is not None:
            kept = pc.and_(kept, pc.less_equal(iteration, last))
        return replace(self, index=self.index.filter(pc.or_(pc.not_equal(self.index["split"], "train"), kept)))

    @cached_property
    def scored(self) -> dict[str, list[dict[str, Any]]]:
        """Rows of scores by trajectory id, in the order of their positions; of several files the last one counts."""
        return {name: sorted(rows, key=itemgetter("position")) for name, rows in self._read_rows(self.scores).items()}

    @cached_property
    def mapped(self) -> dict[str, list[dict[str, Any]]]:
        """Rows of occlusion maps by trajectory id, as they are stored; of several files the last one counts."""
        return self._read_rows(self.maps)

    @cached_property
    def valued(self) -> dict[str, list[dict[str, Any]]]:
        """Rows of turns with a value by trajectory id; of several files the last one counts."""
        found = self._read_rows(self.values)
        return {name: [row for row in rows if row["value"] is not None] for name, rows in found.items()}

    def _read_rows(self, files: Sequence[Path]) -> dict[str, list[dict[str, Any]]]:
        run, _, run_id = self.name.partition("/")
        found: dict[str, list[dict[str, Any]]] = {}
        for path in files:
            table = pq.read_table(path, partitioning=None)
            own = table.filter(pc.and_(pc.equal(table["run"], run), pc.equal(table["run_id"], run_id)))
            rows: dict[str, list[dict[str, Any]]] = {}
            for row in own.to_pylist():
                rows.setdefault(row["trajectory_id"], []).append(row)
            found |= rows
        return found


def find_runs(paths: Iterable[Path], tokenizer: Path | None = None) -> list[BrowsedRun]:
    """Runs below the given paths.

    Args:
        paths: trajectory files, or folders at any level: of an iteration, of a run's outputs, a whole data root.
        tokenizer: folder with a `tokenizer.json`, for runs without one of their own.

    Raises:
        NothingToBrowseError: a path does not exist, or holds no episodes of the contract.
    """
    whole: dict[Path, None] = {}
    parts: dict[Path, dict[Path, None]] = {}
    for path in paths:
        outputs = _find_outputs(path)
        files = [file for file in _find_files(path) if not any(folder in file.parents for folder in outputs)]
        if not files and not outputs:
            raise NothingToBrowseError(f"{path}: no trajectory files of the contract are there.")
        whole |= dict.fromkeys(outputs)
        for file in files:
            of_run = file.parents[1].name in SPLITS
            parts.setdefault(file.parents[2] if of_run else file, {})[file] = None
    runs = [open_run(outputs, tokenizer=tokenizer) for outputs in whole]
    for place, own in parts.items():
        if not place.is_dir():
            texts = read_token_texts(tokenizer) if tokenizer else None
            runs.append(BrowsedRun(f"{place.parent.name}/{place.stem}", _index(place), place.parent, token_texts=texts))
        elif place not in whole:
            runs.append(open_run(place, list(own), tokenizer))
    return runs


def open_run(outputs: Path, files: Sequence[Path] | None = None, tokenizer: Path | None = None) -> BrowsedRun:
    """A run by the folder of its outputs, with what is stored of it elsewhere below the same data root.

    Args:
        files: only these of its trajectory files; None: all of them.
        tokenizer: as in `find_runs`.
    """
    outputs = outputs.absolute()
    run, run_id, root = outputs.parent.name, outputs.name, outputs.parents[2]
    # A folder that was copied may have a name that no run can have.
    store, folders = RunStore(root), RunFolders.of(root, run, run_id)
    if files is None:
        # Of a run that goes on, what its newest checkpoint commits.
        index = keep_committed(read_index(outputs, task_or_plain), committed_iteration(folders.models))
    else:
        index = pa.concat_tables([_index(file) for file in files])
    models, report = folders.models, folders.report
    policies = (models / name for name in _POLICIES if (models / name / "tokenizer.json").is_file())
    words = tokenizer or next(policies, None)
    scores, maps, values = (
        sorted(store.side_tables(*table), key=lambda path: path.stat().st_mtime) for table in _SIDE_TABLES
    )
    evaluation = find_json(folders.evaluation)
    return BrowsedRun(
        f"{run}/{run_id}",
        index,
        outputs,
        store.settings(SourceOptions(run=run, run_id=run_id)) if models.is_dir() else {},
        read_token_texts(words) if words else None,
        scores,
        report if report.is_file() else None,
        maps,
        values,
        evaluation,
        _read_clusters(root, find_json(folders.models / DATA_NOTE)) | ((evaluation or {}).get("cluster_of") or {}),
    )


def _read_clusters(root: Path, note: Mapping[str, Any] | None) -> dict[str, str]:
    """Clusters of the prompts of all splits, by their keys, where their tables are still stored."""
    task = task_or_plain((note or {}).get("task"))
    columns = [task.key, task.apart[0]]
    found: dict[str, str] = {}
    if note is None or task.key in ("id", task.apart[0]):
        return {}
    for path in prompts_folder(root, note["task"], note["id"]).glob("*prompts.parquet"):
        table = pq.read_table(path, columns=columns, partitioning=None)
        found |= dict(zip(*(table[name].to_pylist() for name in columns), strict=True))
    return found


def _index(file: Path) -> pa.Table:
    """Index of one trajectory file; of a file outside a run, the partition is its name."""
    of_run = file.parents[1].name in SPLITS
    place = Place.of(file) if of_run else Place(file.parent.name, file.stem, "episodes", file.stem)
    return build_index(read_trajectories(file, NEEDED), place, task_or_plain)


def _find_outputs(path: Path) -> list[Path]:
    """Folders of runs' outputs at a path or below: those with a folder of trajectories."""
    levels = ("", "*/", "*/*/", "*/*/*/") if path.is_dir() else ()
    found = {place.absolute().parent for level in levels for kind in SPLITS for place in path.glob(f"{level}{kind}")}
    found = {folder for folder in found if folder.name not in (FOLDER, ASIDE)}  # which have folders of the same names
    return sorted(folder for folder in found if any(trajectory_files(folder / kind) for kind in SPLITS))


def _find_files(path: Path) -> list[Path]:
    """Trajectory files at a path or below.

    Raises:
        NothingToBrowseError: the path does not exist.
        TornFileError: the path itself is a file that is none.
    """
    if path.is_file():
        check_file(path)
        return [path.absolute()]
    if not path.is_dir():
        raise NothingToBrowseError(f"{path} does not exist.")
    files = (file for file in sorted(path.rglob("*.parquet")) if ASIDE not in file.relative_to(path).parts)
    return [file.absolute() for file in files if _holds_episodes(file)]


def _holds_episodes(file: Path) -> bool:
    try:
        check_file(file)
    except OtherVersionError:
        raise
    except TornFileError:
        return False
    return True
