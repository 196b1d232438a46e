"""Trackers get, beside parameters and metrics of a run: prompts, origin of the policies, evaluation tables.

Everything is read from files that the run has stored anyway; MLflow and Weights & Biases get the same.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, unquote

from geo_sokoban_pipeline.config.grpo import SourceOptions
from geo_sokoban_pipeline.hub import PolicyUnavailableError
from geo_sokoban_pipeline.parameters import TrackingOptions
from geo_sokoban_pipeline.runs.fingerprint import hash_files, hash_rows
from geo_sokoban_pipeline.runs.folders import MLFLOW_NOTE, RunStore, SourceError, prompts_folder, sealed_checkpoints
from geo_sokoban_pipeline.runs.storage import CorruptFolderError, find_json, read_manifest
from geo_sokoban_pipeline.tasks import TASKS

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow as pa

OWN_STORE = "mlflow.db"  # in the data root; a run's note names it without its folder, so that the root may be moved
ARTIFACTS = "mlartifacts"
_DATABASE = re.compile(r"sqlite(?:\+\w+)?:///(?!:memory:)([^?]+)(?:\?.*)?")
# Tables of prompts in the catalog, and what a run does with them, in MLflow's words.
_CONTEXTS = {"prompts": "training", "validation_prompts": "validation", "eval_prompts": "evaluation"}
# Folders of policies below a run's models, and their tags.
_POLICIES = {"base_policy": "policy.start", "policy": "policy.warm_start", "final_policy": "policy.final"}
_STEP = ("iteration", "policy_version")  # the axis of every chart, no values of their own
_ZERO_STD = "rollout/zero_std/count"
_NO_NAME = re.compile(r"[^\w\-. :]")  # what MLflow takes in no name, or reads as a path
_LONGEST_NAME = 150  # characters of a policy's name in a tag's; MLflow takes 250 of the whole
_MODES = ("sampled", "greedy")
_START, _VALIDATION = "eval/start/", "eval/validation/"
_EPISODE_ROWS = 2000  # of the table of evaluation episodes
_EPISODE_COLUMNS = (
    "task_id",
    "difficulty",
    "greedy",
    "success",
    "reward",
    "status",
    "n_turns",
    "response_tokens",
    "answer",
    "label",
    "tags",
    "trajectory_id",
)


@dataclass(frozen=True)
class PromptTable:
    """A table of prompts that a run has read.

    Attributes:
        name: catalog entry, such as `sokoban.prompts`.
        context: `training`, `validation` or `evaluation`.
        digest: content hash of the rows, as `input.prompts` of a fingerprint.
        rows: their number.
        path: the parquet file.
        data_id: id of the settings that it follows from.
        source: where the task's data come from, such as `generated` or `hub`.
    """

    name: str
    context: str
    digest: str
    rows: int
    path: Path
    data_id: str
    source: str


def store_uri(options: TrackingOptions, data_root: Path) -> str:
    """URI of the MLflow store: the given one, else that of the project's own database in the data root."""
    path = str(data_root / OWN_STORE)
    if options.uri is not None or unquote(path) == path and "?" not in path:
        return options.uri or f"sqlite:///{path}"
    # SQLAlchemy decodes %20 and cuts at a question mark; where the driver is named, MLflow makes no folder of its own.
    return f"sqlite+pysqlite:///{quote(path)}"


def artifact_folder(options: TrackingOptions, data_root: Path) -> Path | None:
    """Where the artifacts of a new experiment go: beside a database in a file; None: the server chooses."""
    database = _DATABASE.fullmatch(store_uri(options, data_root))
    return None if database is None else Path(unquote(database[1])).resolve().parent / ARTIFACTS


def prompt_context(dataset_name: str) -> tuple[str, str] | None:
    """Task and context of a catalog entry of prompts; None: it is another entry."""
    task, _, name = dataset_name.partition(".")
    return (task, _CONTEXTS[name]) if task in TASKS and name in _CONTEXTS else None


def describe_prompts(dataset_name: str, frame: pd.DataFrame, data_root: Path, note: Mapping[str, Any]) -> PromptTable:
    """A table of prompts that a node has read.

    Args:
        dataset_name: such as `sokoban.prompts`.
        note: `data.json` of the run.
    """
    task, _, name = dataset_name.partition(".")
    return PromptTable(
        name=dataset_name,
        context=_CONTEXTS[name],
        digest=hash_rows(frame.to_dict("records")),
        rows=len(frame),
        path=prompts_folder(data_root, task, note["id"]) / f"{name}.parquet",
        data_id=note["id"],
        source=str(note["run"]["params"][task].get("source", "")),
    )


def read_lineage(models: Path) -> dict[str, str]:
    """Tags that say where a run's policies come from: hashes of their files, and of what they started from."""
    tags: dict[str, str] = {}
    for folder, name in _POLICIES.items():
        if manifest := _manifest(models / folder):
            tags[name] = hash_files(manifest["files"])
            made_with = manifest.get("fingerprint", {})
            if folder == "base_policy":
                tags |= _origin(made_with)
            if "input.base_policy" in made_with:
                tags[f"{name}.started_from"] = made_with["input.base_policy"]
            known = ("started_from", "iteration", "policy_version")
            tags |= {f"{name}.{entry}": str(manifest[entry]) for entry in known if entry in manifest}
    checkpoints = sealed_checkpoints(models)
    if manifest := _manifest(checkpoints[max(checkpoints)]) if checkpoints else None:
        tags["policy.checkpoint"] = hash_files(manifest["files"])
        tags["policy.checkpoint.iteration"] = str(max(checkpoints))
        started_from = manifest.get("fingerprint", {}).get("input.policy", manifest.get("started_from"))
        tags |= {"policy.checkpoint.started_from": str(started_from)} if started_from else {}
    return tags


def source_lineage(source: SourceOptions, data_root: Path) -> dict[str, str]:
    """Tags of a run that works on another one: which run, which checkpoint, its hash, and its MLflow run.

    A source that cannot be had has no tags; the node that reads it says why.
    """
    store = RunStore(data_root)
    try:
        found = store.describe(source)
        tags = {"source": found.words}
        if found.folder is not None and (manifest := _manifest(found.folder)):
            tags["source.policy"] = hash_files(manifest["files"])
    except (SourceError, CorruptFolderError, PolicyUnavailableError):
        tags = {}
    if store.is_own(source):
        tags |= {"source.run": source.run, "source.run_id": source.run_id}
        with suppress(CorruptFolderError):  # a torn note names no run
            if note := find_json(store.folders(source).models / MLFLOW_NOTE):
                tags["source.mlflow_run_id"] = str(note["mlflow_run_id"])
    return tags


def policy_table(summary: Mapping[str, Any]) -> dict[str, list[Any]]:
    """The evaluation's rows (policies, ablations, baselines) as columns of plain values; {}: there are none."""
    rows = [dict(row) for row in summary.get("rows") or []]
    columns = {name: [row.get(name) for row in rows] for name in dict.fromkeys(name for row in rows for name in row)}
    return {
        name: values
        for name, values in columns.items()
        if all(isinstance(value, str | bool | int | float | None) for value in values)
    }


def episode_table(index: pa.Table, policies: list[str], limit: int = _EPISODE_ROWS) -> dict[str, list[Any]]:
    """Evaluation episodes as columns: the first prompts, under every policy; {}: there are none.

    Args:
        index: of evaluation episodes, see `trajectories/index.py`.
        policies: names by iteration of the index.
        limit: rows at most, as far as prompts have equally many.
    """
    if not index.num_rows:
        return {}
    groups = index["group_index"].to_numpy()
    each = max(index.num_rows // max(len(set(groups.tolist())), 1), 1)
    chosen = index.filter(groups < max(limit // each, 1)) if index.num_rows > limit else index
    names = dict(enumerate(policies))
    shown = [names.get(number, str(number)) for number in chosen["iteration"].to_pylist()]
    columns = {name: chosen[name].to_pylist() for name in _EPISODE_COLUMNS}
    return {"policy": shown, **columns, "tags": [", ".join(tags) for tags in columns["tags"]]}


def points_of(row: Mapping[str, Any]) -> list[tuple[str, float, int]]:
    """A metrics row as points of MLflow: (metric, value, step).

    The step is the iteration. For validations it is the version of the policy, so that the validation before training
    is the first point of their curve. Groups of equal rewards are counted together, since the number of different
    rewards has no bound.
    """
    iteration = int(row["iteration"])
    points: list[tuple[str, float, int]] = []
    equal = 0.0
    for name, value in row.items():
        if value is None or name in _STEP:
            continue
        if name.startswith(f"{_ZERO_STD}_"):
            equal += float(value)
        elif name.startswith(_START):
            points.append((_VALIDATION + name.removeprefix(_START), float(value), 0))
        elif name.startswith(_VALIDATION):
            points.append((name, float(value), iteration + 1))
        else:
            points.append((name, float(value), iteration))
    # An iteration of the loop without such groups is a 0 in the curve, not a gap.
    return [*points, (_ZERO_STD, equal, iteration)] if any(name.startswith("rollout/") for name in row) else points


def evaluation_points(summary: Mapping[str, Any], step: int) -> list[tuple[str, float, int]]:
    """The evaluation of the policies at the end of a run as points of `eval/final/…`.

    The policy before GRPO is the point at step 0, the final one that at its version, so that a chart is a line from one
    to the other; of a single policy there is one point.

    Args:
        step: of the final policy where the summary has no version of it.
    """
    names = [str(name) for name in summary.get("policies") or []]
    version = (summary.get("checkpoints") or {}).get(names[-1], {}).get("policy_version") if names else None
    step = step if version is None else int(version)
    steps = {names[-1]: step, **({names[0]: 0} if len(names) > 1 else {})} if names else {}
    return [
        (f"eval/final/{row['mode']}_solve_rate", float(row["solve_rate"]), steps[row["policy"]])
        for row in summary.get("rows") or []
        if row.get("policy") in steps and row.get("mode") in _MODES and row.get("solve_rate") is not None
    ]


def evaluation_tags(summary: Mapping[str, Any]) -> dict[str, str]:
    """Evaluated policies and data, baselines, image ablations and intervals as tags: they need no chart each."""
    names = [str(name) for name in summary.get("policies") or []]
    tags = {f"eval.final.{name}": str(summary[name]) for name in ("data_id", "prompts_hash") if summary.get(name)}
    for policy, found in (summary.get("checkpoints") or {}).items():
        place = f"{_tag_name(policy)}.policy"
        tags |= {
            place if name == "hash" else f"{place}.{name}": str(value)
            for name, value in found.items()
            if value is not None
        }
    for row in summary.get("rows") or []:
        if row.get("solve_rate") is None:
            continue
        mode = row.get("mode") if row.get("mode") in _MODES else None
        name = _tag_name(row["policy"]) + (f".{mode}" if mode else "")
        if row["policy"] not in (names[0], names[-1]) if names else True:
            tags[name] = f"{row['solve_rate']:.4f}"
        if row.get("low") is not None and row.get("high") is not None:
            tags[f"{name}.interval"] = f"{row['low']:.4f}–{row['high']:.4f}"
    return tags


def _tag_name(policy: str) -> str:
    """First part of the tags of a policy, whose name may be a long path."""
    return f"eval.final.{_NO_NAME.sub('_', policy)[-_LONGEST_NAME:]}"


def warm_start_points(history: Iterable[Mapping[str, Any]]) -> list[tuple[str, float, int]]:
    """A warm start's history as points of `warm_start/…` at its optimizer steps."""
    return [
        (f"warm_start/{name}", float(value), int(row["step"]))
        for row in history
        for name, value in row.items()
        if name not in ("step", "seconds", "cpu_seconds") and value is not None
    ]


def _origin(made_with: Mapping[str, Any]) -> dict[str, str]:
    """Where the starting policy was taken from: built here, a folder, or a hub id with its revision."""
    names = ("source",) if made_with.get("policy.source") == "tiny" else ("source", "path", "revision")
    known = {name: made_with.get(f"policy.{name}") for name in names}
    return {f"policy.start.{name}": str(value) for name, value in known.items() if value is not None}


def _manifest(folder: Path) -> dict[str, Any] | None:
    try:
        return read_manifest(folder, verify=False)
    except CorruptFolderError:
        return None
