"""Stored runs: their folders, and the policy, checkpoint or trajectories that a `source` names."""

from __future__ import annotations

import shutil
import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from geo_sokoban_pipeline.config.grpo import SourceOptions
from geo_sokoban_pipeline.formats import type_name
from geo_sokoban_pipeline.hub import PolicyUnavailableError, fetch_config, fetch_policy
from geo_sokoban_pipeline.runs.fingerprint import as_current
from geo_sokoban_pipeline.runs.lock import LOCK_FILE, find_holder
from geo_sokoban_pipeline.runs.policy_folder import PolicyFolder, check_model_type, check_policy_files, open_policy
from geo_sokoban_pipeline.runs.provenance import COMMANDS_FILE
from geo_sokoban_pipeline.runs.storage import (
    COMPLETE_FILE,
    MANIFEST,
    CorruptFolderError,
    describe_files,
    find_json,
    flush_to_disk,
    iteration_of,
    read_json,
    read_manifest,
    remove_entry,
    remove_temporaries,
    write_json,
)

# Layers of a data root, as in the catalog. An entry lies in its layer under its own name, so that code without a
# catalog finds it.
RAW, INTERMEDIATE, INPUTS = "01_raw", "02_intermediate", "05_model_input"  # data of tasks
MODELS, OUTPUTS, REPORTS = "06_models", "07_model_output", "08_reporting"  # runs
# Entries of a data root that the pipelines write; anything else there belongs to the user.
OWN_ENTRIES = (
    *(RAW, INTERMEDIATE, "03_primary", "04_feature", INPUTS, MODELS, OUTPUTS, REPORTS),
    *("studies", "servers", "wandb", "mlartifacts", "mlflow.db*"),
)
POLICIES = ("base_policy", "policy", "final_policy")  # entries of a run's models
DATA_NOTE = "data.json"  # of a run, and of a task's data: what the tables follow from
MLFLOW_NOTE, WANDB_NOTE = "mlflow_run.json", "wandb_run.json"  # in the folder of a run's models
WANDB_SENT = "wandb_sent.jsonl"  # beside them: what W&B has been sent, a line each time


ASIDE = ".replaced"  # in each folder of a run: what `fresh=true` replaces, until the new run has committed something
JOURNAL = "replaced.json"  # beside the lock: how far that is
NOTES = (DATA_NOTE, MLFLOW_NOTE, WANDB_NOTE, WANDB_SENT, COMMANDS_FILE, "budget.json")  # written before any result
_CHECKPOINTED = ("train_", "update_")  # runs that commit by checkpoints


@dataclass(frozen=True)
class RunFolders:
    """The three folders of one run id of one run.

    A run that `fresh=true` replaces is moved into the folder `ASIDE` of each of them. It is deleted once the new run
    has committed: its first checkpoint, for runs without checkpoints the first output, or its end. Else the next
    command puts it back. The journal holds the step that was reached, so that a process may be killed between any two:

    - `moving`: every entry belongs to the old run; some are in `ASIDE`, the others in their places;
    - `aside`: the old run is in `ASIDE`, the new run in its place;
    - no journal: the content of `ASIDE` is being deleted.

    Attributes:
        models: policies, checkpoints, lock.
        outputs: trajectories, metrics.
        reports: evaluation summary, report.
    """

    models: Path
    outputs: Path
    reports: Path

    @classmethod
    def of(cls, data_root: Path, run: str, run_id: str) -> RunFolders:
        """Folders of `run_id` of the namespace `run`."""
        return cls(*(data_root / layer / run / run_id for layer in (MODELS, OUTPUTS, REPORTS)))

    @property
    def name(self) -> str:
        """Namespace and run id, such as `train_sokoban/default`."""
        return f"{self.models.parent.name}/{self.models.name}"

    @property
    def layers(self) -> tuple[Path, Path, Path]:
        """All three folders."""
        return self.models, self.outputs, self.reports

    @property
    def evaluation(self) -> Path:
        """The summary of the run's evaluation."""
        return self.reports / "eval_summary.json"

    @property
    def report(self) -> Path:
        """The page of the run."""
        return self.reports / "report.html"

    @property
    def has_replaced(self) -> bool:
        """Whether a run is set aside here."""
        return self._journal.is_file()

    @property
    def can_restore(self) -> bool:
        """Whether a run is set aside that the next command puts back, since the new one has committed nothing.

        Raises:
            CorruptFolderError: the journal is damaged.
        """
        return self.has_replaced and not (self._step() == "aside" and self.has_committed)

    @property
    def is_empty(self) -> bool:
        """Whether nothing is stored, but for a lock."""
        return not any(self._entries())

    @property
    def has_committed(self) -> bool:
        """Whether the run that lies here, and not the one set aside, has stored a first checkpoint or output."""
        if self.models.parent.name.startswith(_CHECKPOINTED):
            return bool(sealed_checkpoints(self.models))
        entries = (entry for entry in self._entries() if entry.name not in NOTES and entry.suffix != ".tmp")
        files = (path.relative_to(entry) for entry in entries for path in (entry, *entry.rglob("*")) if path.is_file())
        return any(not any(part.endswith(".tmp") for part in file.parts) for file in files)

    def tidy(self) -> None:
        """Delete half-written files of killed commands; the caller holds the run's lock."""
        for folder in self.layers:
            remove_temporaries(folder)
        if not self.has_replaced:
            self._delete_aside()

    def clear(self) -> None:
        """Delete everything but the lock and a run that is set aside.

        Stored state goes first, and each entry by a rename: a clearing that is interrupted leaves a run that starts
        anew, never one that continues from half of its files.
        """
        for entry in self._entries():
            _delete(entry)

    def set_aside(self) -> None:
        """Move everything but the lock into `ASIDE`, where nothing is set aside yet; the caller holds the run's lock.

        Raises:
            OSError: an entry cannot be moved; all of them are then back in their places.
        """
        self.settle()
        self.tidy()
        if self.is_empty:
            return
        write_json(self._journal, {"state": "moving"})
        try:
            for folder in self.layers:
                self._move(folder, folder / ASIDE)
        except OSError:
            self.settle()
            raise
        write_json(self._journal, {"state": "aside"})

    def settle(self) -> Literal["put back", "deleted"] | None:
        """Decide about a run that is set aside, as the class says; the caller holds the run's lock.

        Returns:
            What has been done with it; None: no run is set aside.

        Raises:
            CorruptFolderError: the journal is damaged.
        """
        if not self.has_replaced:
            return None
        if not self.can_restore:
            self.delete_replaced()
            return "deleted"
        if self._step() == "aside":
            self.clear()
            write_json(self._journal, {"state": "moving"})
        for folder in self.layers:
            self._move(folder / ASIDE, folder)
        self.delete_replaced()
        for folder in (self.outputs, self.reports):  # which the new run alone had
            if folder.is_dir() and not any(folder.iterdir()):
                folder.rmdir()
        return "put back"

    def delete_replaced(self) -> None:
        """Delete the run that is set aside; the caller holds the run's lock."""
        self._journal.unlink(missing_ok=True)
        flush_to_disk(self.models)
        self._delete_aside()

    def remove(self) -> None:
        """Delete all of it, a run that is set aside too; the caller holds the run's lock, whose file goes as well."""
        self.delete_replaced()
        self.clear()
        for folder in self.layers:
            shutil.rmtree(folder, ignore_errors=True)

    @property
    def _journal(self) -> Path:
        return self.models / JOURNAL

    def _step(self) -> str:
        stored = read_json(self._journal)
        state = stored.get("state") if isinstance(stored, dict) else None
        if state not in ("moving", "aside"):
            raise CorruptFolderError(
                f'{self._journal} holds no step: write {{"state": "aside"}} into it if {ASIDE} holds the whole old run.'
            )
        return str(state)

    def _entries(self) -> list[Path]:
        return [entry for folder in self.layers if folder.is_dir() for entry in _entries(folder)]

    def _delete_aside(self) -> None:
        for folder in self.layers:
            if (folder / ASIDE).is_dir():
                _delete(folder / ASIDE)

    @staticmethod
    def _move(source: Path, target: Path) -> None:
        """Move the entries of a folder; they are on disk in their new places when it returns."""
        if entries := _entries(source) if source.is_dir() else []:
            target.mkdir(exist_ok=True)
            for entry in entries:
                entry.rename(target / entry.name)
            flush_to_disk(source)
            flush_to_disk(target)


def _entries(folder: Path) -> list[Path]:
    """Entries of a folder of a run that belong to the run itself."""
    return sorted(entry for entry in folder.iterdir() if entry.name not in (LOCK_FILE, JOURNAL, ASIDE))


def _delete(entry: Path) -> None:
    """Delete a file, link or folder, whose name goes first; the target of a link stays."""
    doomed = entry.with_name(f".{entry.name}.{uuid.uuid4().hex[:8]}.tmp")
    entry.rename(doomed)
    remove_entry(doomed)


def find_all_runs(root: Path) -> list[RunFolders]:
    """All stored runs below a data root, by namespace and run id; those of which nothing is stored are left out."""
    found = {
        (path.parent.name, path.name)
        for layer in (MODELS, OUTPUTS, REPORTS)
        for path in (root / layer).glob("*/*")
        if path.is_dir() and path.parent.name != "studies"  # which have files of their own
    }
    runs = [RunFolders.of(root, run, run_id) for run, run_id in sorted(found)]
    return [run for run in runs if run.has_replaced or not run.is_empty]


def prompts_folder(root: Path, task: str, data_id: str) -> Path:
    """Folder of the tables of prompts of a task's data, with the note (`DATA_NOTE`) of what they follow from."""
    return root / INPUTS / task / data_id


START = -1  # in place of an iteration: the policy that GRPO started from
# Folders of policies that are no checkpoints, and what they are.
_FOLDERS = {"start": "policy", "final": "final_policy"}
_WORDS = {"start": "the policy after its warm start", "final": "the final policy"}


class SourceError(ValueError):
    """A source names something that is not stored; the message lists what is there."""


@dataclass(frozen=True)
class FoundSource:
    """The target of a source, in words and as a folder.

    Attributes:
        words: such as `train_sokoban/seed2, checkpoint 149 (latest)`.
        folder: of the policy or the trajectories; None: an untrained policy, or one of the hub.
    """

    words: str
    folder: Path | None


@dataclass(frozen=True)
class RunStore:
    """All runs below a data root.

    Attributes:
        root: data root, the folder that holds `06_models` and the other layers.
    """

    root: Path

    def folders(self, source: SourceOptions) -> RunFolders:
        """Folders of a run, stored or not."""
        return RunFolders.of(self.root, source.run, source.run_id)

    def side_tables(self, kind: str, name: str) -> list[Path]:
        """Parquet files of an entry such as `turn_values`, of all runs of a kind such as `fork`."""
        return sorted((self.root / OUTPUTS).glob(f"{kind}_*/*/{name}/iter=*/part-*.parquet"))

    @staticmethod
    def is_own(source: SourceOptions) -> bool:
        """Whether a source's policy is one of the run that it names; else a folder, a hub id, or `tiny`."""
        wanted = str(source.checkpoint)
        return wanted in ("start", "final", "latest", "best") or wanted.isdigit()

    def describe(self, source: SourceOptions, *, trajectories: Literal["one", "all"] | None = None) -> FoundSource:
        """The target of a source, without opening it.

        Args:
            trajectories: those of one iteration, or of all, are meant, not the policy.

        Raises:
            SourceError: nothing of that name is stored; a folder or hub id is not looked for.
        """
        name = f"{source.run}/{source.run_id}"
        if trajectories:
            number, folder = self._iteration(source)
            if trajectories == "all":
                return FoundSource(f"{name}, trajectories of all iterations", folder.parent)
            newest = " (the newest)" if source.iteration is None else ""
            return FoundSource(f"{name}, trajectories of iteration {number}{newest}", folder)
        if source.checkpoint == "tiny":
            return FoundSource("an untrained policy", None)
        if not self.is_own(source):
            folder = Path(str(source.checkpoint)).expanduser()
            return FoundSource(f"the policy {source.checkpoint}", folder if folder.is_dir() else None)
        # Whether no checkpoint solves more validation prompts than the policy that the loop started from.
        start_is_best = source.checkpoint == "best" and best_iteration(self._newest_manifest(source)) == START
        kind = "start" if start_is_best else str(source.checkpoint)
        if kind in _FOLDERS:
            folder = self._models(source) / _FOLDERS[kind]
            if not (folder / MANIFEST).is_file():
                raise SourceError(
                    f"{self._describe(source)}: {folder} does not exist; run the pipeline {source.run} first."
                    + self._others(source)
                )
            return FoundSource(f"{name}, {_WORDS[kind]}{' (best)' if start_is_best else ''}", folder)
        number, folder = self._numbered(source)
        given = "" if str(source.checkpoint).isdigit() else f" ({source.checkpoint})"
        return FoundSource(f"{name}, checkpoint {number}{given}", folder)

    def data_note(self, source: SourceOptions) -> dict[str, Any] | None:
        """A run's notes about its data (see `hooks/parameters.py`); None: there are none."""
        return find_json(self._models(source) / DATA_NOTE)

    def data_report(self, source: SourceOptions) -> dict[str, Any] | None:
        """Counts of the tables of a run's data; None: they are not stored, or unknown."""
        note = self.data_note(source)
        return find_json(self.root / INTERMEDIATE / note["task"] / note["id"] / "data_report.json") if note else None

    def prompt_table(self, source: SourceOptions, name: str) -> Path | None:
        """File of a table of a run's data, such as `prompts`; None: it is not stored, or unknown."""
        note = self.data_note(source)
        path = prompts_folder(self.root, note["task"], note["id"]) / f"{name}.parquet" if note else None
        return path if path is not None and path.is_file() else None

    def trained_on(self, source: SourceOptions) -> tuple[str | None, str | None]:
        """Data id and content hash of the prompts that a policy was trained on; None for one of no run here."""
        if not self.is_own(source):
            return None, None
        manifest = read_manifest(self._models(source) / "policy", verify=False) or {}
        found = manifest.get("fingerprint", {})
        return found.get("data.id"), found.get("input.prompts")

    def policy(self, source: SourceOptions) -> PolicyFolder:
        """The policy that a source names; a checkpoint is one.

        Raises:
            SourceError: nothing of that name is stored.
            CorruptFolderError: it is, but damaged.
        """
        if self.is_own(source):
            folder = self.describe(source).folder
            assert folder is not None  # what is a run's own has one
            return open_policy(folder)
        self.find_foreign(source)
        return _foreign_policy(str(source.checkpoint))

    def find_foreign(self, source: SourceOptions) -> None:
        """See that a folder, or a policy of the hub, has the name in `checkpoint`; no weights are read or fetched.

        Raises:
            SourceError: there is none.
            FileNotFoundError, ValueError: the folder holds no supported policy.
        """
        name = str(source.checkpoint)
        folder = Path(name).expanduser()
        if folder.is_dir():
            check_policy_files(folder)
            return
        try:
            check_model_type(name, fetch_config(name, None))
        except PolicyUnavailableError as error:
            raise SourceError(
                f"{self._describe(source)}: no folder, and not to be had from the hub ({error.__cause__}). Give "
                "latest, best, final, start, the number of an iteration, a policy's folder, or its hub id."
            ) from error

    def versions(self, source: SourceOptions) -> dict[int, Path]:
        """Folders of a run's stored policies, by policy version; 0 is the policy that GRPO starts from.

        Raises:
            SourceError: the run has no checkpoint.
        """
        self._numbered(source.model_copy(update={"checkpoint": "latest"}))
        models = self._models(source)
        return {0: models / "policy"} | {number + 1: folder for number, folder in sealed_checkpoints(models).items()}

    def policy_before(self, source: SourceOptions) -> PolicyFolder:
        """The policy whose update on the trajectories that `source.iteration` names gave the next one."""
        iteration, _ = self._iteration(source)
        return self.policy(source.model_copy(update={"checkpoint": iteration - 1 if iteration else "start"}))

    def trajectory_files(self, source: SourceOptions) -> tuple[int, list[Path]]:
        """Iteration and parquet files of the trajectories that `source.iteration` names (None: the newest)."""
        number, folder = self._iteration(source)
        return number, sorted(folder.glob("part-*.parquet"))

    def all_trajectory_files(self, source: SourceOptions) -> list[Path]:
        """Parquet files of all stored trajectories, by iteration and part."""
        stored = self._trajectories(source)
        return [file for number in sorted(stored) for file in sorted(stored[number].glob("part-*.parquet"))]

    def outputs(self, source: SourceOptions) -> Path:
        """Folder of a run's outputs, which has trajectories.

        Raises:
            SourceError: there are none.
        """
        self._trajectories(source)
        return self.folders(source).outputs

    def data_root(self, source: SourceOptions) -> Path:
        """Data root of a run that has trajectories; raises as `outputs`."""
        self.outputs(source)
        return self.root

    def progress(self, source: SourceOptions) -> tuple[list[dict[str, Any]], bool]:
        """Stored rows of metrics, and whether the run's loop has reached its goal."""
        return self.metrics(source), self.is_complete(source)

    def is_complete(self, source: SourceOptions) -> bool:
        """Whether a run's loop has reached its goal."""
        return (self._models(source) / "checkpoints" / COMPLETE_FILE).is_file()

    def find_runs(self, names: Sequence[str], default: str) -> list[tuple[str, str]]:
        """Namespace and run id of each name: both with a slash between, or a run id of the namespace `default`.

        Raises:
            SourceError: fewer than two names, one twice, or one that is not stored.
        """
        stored = sorted(
            f"{path.parent.parent.name}/{path.parent.name}" for path in (self.root / OUTPUTS).glob("train_*/*/metrics")
        )
        known = f"Stored are {', '.join(stored)}." if stored else f"No training run is stored in {self.root}."
        found = [name if "/" in name else f"{default}/{name}" for name in names]
        if len(set(found)) < 2:
            raise SourceError(
                f"runs=[{','.join(names)}]: give two runs or more, such as --params 'runs=[default,seed2]'. {known}"
            )
        for name in found:
            if name not in stored:
                raise SourceError(f"runs: {name} is not stored. {known}")
        return [(run, run_id) for run, _, run_id in (name.partition("/") for name in dict.fromkeys(found))]

    def evaluation(self, source: SourceOptions) -> dict[str, Any]:
        """The summary of a run's evaluation; `{}` where it has none."""
        return find_json(self.folders(source).evaluation) or {}

    def held_out_files(self, source: SourceOptions) -> dict[str, Path]:
        """Files of the evaluation's episodes by partition, `iter=<number of the policy>/part-…`."""
        folder = self.folders(source).outputs / "held_out_trajectories"
        return {path.relative_to(folder).as_posix(): path for path in sorted(folder.glob("iter=*/part-*.parquet"))}

    def settings(self, source: SourceOptions) -> dict[str, Any]:
        """Settings of a run's newest checkpoint: its fingerprint, flat, and its layout."""
        manifest = self._newest_manifest(source)
        return {**as_current(manifest.get("fingerprint", {})), **manifest.get("layout", {})}

    def metrics(self, source: SourceOptions) -> list[dict[str, Any]]:
        """Stored rows of metrics, by iteration; `[]` where there are none."""
        files = _by_iteration((self.folders(source).outputs / "metrics").glob("iter=*.json"))
        return [read_metrics_row(file) for file in files.values()]

    def _trajectories(self, source: SourceOptions) -> dict[int, Path]:
        """Folder of each stored iteration's trajectories.

        Raises:
            SourceError: there are none.
        """
        folder = self.folders(source).outputs / "trajectories"
        stored = _by_iteration(path for path in folder.glob("iter=*") if path.is_dir())
        if not stored:
            raise SourceError(
                f"{source.run}/{source.run_id} has no trajectories below {folder}; collect some first."
                + self._others(source)
            )
        return stored

    def _iteration(self, source: SourceOptions) -> tuple[int, Path]:
        """Number and folder of the trajectories that `source.iteration` names."""
        stored = self._trajectories(source)
        number = max(stored) if source.iteration is None else source.iteration
        if number not in stored:
            raise SourceError(
                f"source.iteration={number}: {source.run}/{source.run_id} holds {min(stored)} to {max(stored)}."
            )
        return number, stored[number]

    def _numbered(self, source: SourceOptions) -> tuple[int, Path]:
        """Iteration and folder of the checkpoint that `latest`, `best` or a number names."""
        if not (stored := sealed_checkpoints(self._models(source))):
            raise SourceError(
                f"{self._describe(source)}: {source.run}/{source.run_id} has no checkpoint; train it first."
                + self._others(source)
            )
        if (number := self._number(source, stored)) not in stored:
            raise SourceError(
                f"{self._describe(source)}: no such checkpoint; stored are {', '.join(map(str, stored))}."
            )
        return number, stored[number]

    def _others(self, source: SourceOptions) -> str:
        """Which other runs there are, for a message."""
        own = self._models(source)
        names = sorted(path.name for path in own.parent.glob("*") if path.is_dir() and path != own)
        return (
            f" Run ids of {source.run} that are stored: {', '.join(names)}; source.run_id names one." if names else ""
        )

    def _models(self, source: SourceOptions) -> Path:
        return self.folders(source).models

    def _number(self, source: SourceOptions, stored: dict[int, Path]) -> int:
        if source.checkpoint == "latest":
            return max(stored)
        if source.checkpoint == "best":
            if (best := self._newest_manifest(source).get("best")) is None:
                raise SourceError(f"{self._describe(source)}: the run has no validation yet; use latest or a number.")
            return int(best["iteration"])
        return int(source.checkpoint)

    def _newest_manifest(self, source: SourceOptions) -> dict[str, Any]:
        """Manifest of a run's newest checkpoint; `{}` without one."""
        stored = sealed_checkpoints(self._models(source))
        return read_manifest(stored[max(stored)], verify=False) or {} if stored else {}

    @staticmethod
    def _describe(source: SourceOptions) -> str:
        return f"source.checkpoint={source.checkpoint} of {source.run}/{source.run_id}"


def best_iteration(manifest: Mapping[str, Any]) -> int | None:
    """Iteration of the best policy that was validated and is stored; `START` where none solves more than the first one.

    Args:
        manifest: of the newest checkpoint.

    Returns:
        None where nothing was validated.
    """
    best, start = manifest.get("best"), (manifest.get("validated") or {}).get("start")
    if start is not None and (best is None or start["solve_rate"] > best["solve_rate"]):
        return START
    return None if best is None else int(best["iteration"])


def read_metrics_row(path: Path) -> dict[str, float | int | None]:
    """A stored row of metrics.

    Raises:
        CorruptFolderError: the file holds something else; the message names it.
    """
    row = read_json(path)
    if not isinstance(row, dict):
        raise CorruptFolderError(f"{path} holds {type_name(row)}, not a row of metrics. Restore it or delete it.")
    return row


def browsed_runs(site: Path) -> list[str]:
    """Names of the runs that a site shows; `[]` where there is no site."""
    return list((read_manifest(site, verify=False) or {}).get("runs", []))


def sealed_checkpoints(models: Path) -> dict[int, Path]:
    """Checkpoint folders that have their manifest, by iteration, in its order.

    Args:
        models: folder of a run id in 06_models.
    """
    return _by_iteration(path.parent for path in (models / "checkpoints").glob(f"iter=*/{MANIFEST}"))


def committed_iteration(models: Path) -> int | None:
    """Newest iteration that a checkpoint commits, −1 where a run has just begun; None: all that is stored counts.

    While a command works on a run, and after it was killed, episodes of later iterations may be stored, which the next
    command makes again.

    Args:
        models: folder of a run id in 06_models.
    """
    if sealed := sealed_checkpoints(models):
        return max(sealed)
    return START if find_holder(models) is not None and models.parent.name.startswith("train_") else None


def _by_iteration(paths: Iterable[Path]) -> dict[int, Path]:
    """Folders or files by their iteration, in its order."""
    found = ((iteration_of(path.name), path) for path in paths)
    return dict(sorted((iteration, path) for iteration, path in found if iteration is not None))


def _foreign_policy(name: str) -> PolicyFolder:
    """A folder that this project did not write, or a hub id (its files are then fetched)."""
    folder = Path(name).expanduser()
    folder = folder if folder.is_dir() else fetch_policy(name, None)
    return PolicyFolder(folder, read_manifest(folder) or {"files": describe_files(folder)})
