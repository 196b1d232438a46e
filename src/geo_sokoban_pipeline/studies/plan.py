"""The plan of a study: which runs it is made of, in which order, with which parameters.

Nothing is read or started here.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from geo_sokoban_pipeline.config.base import ParameterError, validate_parameters
from geo_sokoban_pipeline.config.study import StudyDefinition
from geo_sokoban_pipeline.envs.base import Task
from geo_sokoban_pipeline.parameters import TrackingOptions
from geo_sokoban_pipeline.runs.fingerprint import hash_code
from geo_sokoban_pipeline.runs.folders import RunFolders
from geo_sokoban_pipeline.runs.provenance import DATA_ROOT
from geo_sokoban_pipeline.runs.storage import MANIFEST
from geo_sokoban_pipeline.tasks import task_of

Kind = Literal["train", "control", "evaluate"]
# Longest first, so that no worker is left alone with a long run at the end.
_ORDER: tuple[Kind, ...] = ("train", "control", "evaluate")
_START = ("policy", "warm_start", "env", "reward")  # options that a warm start follows from
Sections = Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True)
class Command:
    """Where and how the current command runs.

    Attributes:
        project: folder of the project.
        conf_source: folder or archive of the configuration.
        env: configuration environment; None: Kedro's default.
        data_root: absolute data root.
        find_root: returns the data root of a command with the given one in `GEO_SOKOBAN_DATA_ROOT`; None where the
            configuration has no data root.
    """

    project: Path
    conf_source: str
    env: str | None
    data_root: Path
    find_root: Callable[[Path], Path | None]

    def check_root(self, root: Path) -> None:
        """See that a command of a study writes where the study expects it.

        Raises:
            ParameterError: it would write elsewhere, over the data of other runs.
        """
        found = self.find_root(root)
        if found != root.resolve():
            raise ParameterError(
                f"data_root: the configuration does not follow {DATA_ROOT}. A run of this study belongs into {root}, "
                f"but would write into {found or 'no data root at all'}. Write `data_root: ${{oc.env:{DATA_ROOT}, "
                f"<path>}}` in globals.yml with your own path, or set {DATA_ROOT} instead."
            )

    def words(self, config: Path) -> list[str]:
        """`kedro run` in a process of its own, with the same environment and configuration and a file of arguments."""
        env = [] if self.env is None else [f"--env={self.env}"]
        kedro = (sys.executable, "-m", "kedro", "run")
        return [*kedro, f"--config={config}", f"--conf-source={self.conf_source}", *env]

    @staticmethod
    def environment(data_root: Path) -> dict[str, str]:
        """Environment variables of a run on a data root, with one thread."""
        return {**os.environ, DATA_ROOT: str(data_root), "OMP_NUM_THREADS": "1"}


@dataclass(frozen=True)
class StudyRun:
    """One run of a study.

    Attributes:
        run_id: name, unique within the study.
        kind: what it does.
        part: the control, the set of prompts, or the compared recipe; empty for a run of the study's own recipe.
        seed: of the run.
        root: data root.
        params: what `--params` would give.
        parameters: everything that its result depends on, with all defaults, as JSON values; without the number of
            processes and threads, which changes last bits only. `code` has the hashes of the user's own code, if any.
        task: its name.
        after: run id of the member whose result it needs, or None.
    """

    run_id: str
    kind: Kind
    part: str
    seed: int
    root: Path
    params: dict[str, Any]
    parameters: dict[str, Any]
    task: str
    after: str | None = None

    @property
    def pipelines(self) -> list[str]:
        """Names of the pipelines that are run."""
        run = f"{self.kind}_{self.task}"
        return [f"data_{self.task}", run] if self.kind == "evaluate" else [run]

    @property
    def folders(self) -> RunFolders:
        """Everything that is stored of it, but the data it shares."""
        return RunFolders.of(self.root, f"{self.kind}_{self.task}", self.run_id)

    @property
    def models(self) -> Path:
        """Where its policies and checkpoints are stored."""
        return self.folders.models

    @property
    def summary(self) -> Path:
        """Where its evaluation is stored."""
        return self.folders.evaluation

    @property
    def outputs(self) -> list[Path]:
        """Files of a finished member."""
        made = {
            "train": ["policy/" + MANIFEST, "checkpoints/COMPLETE.json", "final_policy/" + MANIFEST],
            "control": ["policy/" + MANIFEST],
            "evaluate": [],
        }
        return [*(self.models / name for name in made[self.kind]), self.summary]


def plan_members(name: str, study: StudyDefinition, base: Sections, root: Path, share: int = 1) -> list[StudyRun]:
    """All members of a study, longest first, each after the one it needs.

    Args:
        name: of the study, the first part of all run ids.
        base: the sections `train_<task>`, `<task>` and `tracking` of the parameters.
        root: data root of the command.
        share: cores of a member; it has so many processes with one thread each, no more than its options say.

    Raises:
        ParameterError: an override is unknown or not allowed, or the tracking URI holds a password; names it.
    """
    # Like the variables of servers: a password in the tracking URI would stand in the members' files.
    validate_parameters(base.get("tracking", {}), TrackingOptions, prefix="tracking")
    task, data = task_of(study.task), study.data(study.task)
    own = root / "studies" / name if data else root
    given = {**base, **_override(task, base, study.train, data, share)}
    resolved = _resolve(f"study_{name}", task, given)
    members = []
    for seed in study.seeds:
        run_id = f"{name}-seed{seed}"
        members.append(_member(task, run_id, "train", "", seed, own, given, resolved))
        start = {"source": "folder", "path": str(RunFolders.of(own, task.run, run_id).models / "policy")}
        for recipe, changes in study.recipes.items():
            train = merge(study.train, changes, {"policy": start, "warm_start": {"steps": 0}})
            compared = {**base, **_override(task, base, train, data, share)}
            everything = _resolve(f"study_{name}.recipes.{recipe}", task, compared)
            # A recipe's own options do not say how its warm start was made.
            both = compared, {**everything, "start": {name: resolved[task.run][name] for name in _START}}
            members.append(_member(task, f"{run_id}-{recipe}", "train", recipe, seed, own, *both, run_id))
        for imitate in study.controls:
            control = {f"control_{task.name}": {"source": {"run": task.run, "run_id": run_id}, "imitate": imitate}}
            both = {**given, **control}, {**resolved, **control}
            members.append(_member(task, f"{run_id}-{imitate}", "control", imitate, seed, own, *both, run_id))
        for number, further in enumerate(study.evaluations):
            prompts = {**given, **_override(task, given, further.train, further.data(study.task), share)}
            everything = _resolve(f"study_{name}.evaluations.{number}", task, prompts)
            policy = str(RunFolders.of(own, task.run, run_id).models / "final_policy")
            source = {"run": task.run, "run_id": run_id, "checkpoint": policy}
            evaluation = {f"evaluate_{task.name}": {"source": source}}
            # A tracking store of its own for every set would cost more than the evaluation.
            both = {**prompts, **evaluation, "tracking": {"enabled": False}}, {**everything, **evaluation}
            place, part = root / "studies" / name / further.name, further.name
            members.append(_member(task, f"{run_id}-{part}", "evaluate", part, seed, place, *both, run_id))
    members += [_member(task, f"{name}-seed{one}", "train", "", one, own, given, resolved) for one in study.beside]
    return sorted(members, key=lambda member: _ORDER.index(member.kind))


def merge(base: Mapping[str, Any], *changes: Mapping[str, Any]) -> dict[str, Any]:
    """Nested mappings merged name by name; anything else replaces what was there."""
    merged = dict(base)
    for change in changes:
        for name, value in change.items():
            before = merged.get(name)
            merged[name] = merge(before, value) if isinstance(before, Mapping) and isinstance(value, Mapping) else value
    return merged


def _override(
    task: Task, base: Sections, train: Mapping[str, Any], data: Mapping[str, Any], share: int
) -> dict[str, dict[str, Any]]:
    own = merge(base[task.run], train)
    # Its processes may be too few to share copies.
    own = {name: value for name, value in own.items() if name not in ("sharding", "replicas", "megatron")}
    return {
        task.run: {**own, "threads": 1, "processes": min(own.get("processes", 1), share)},
        task.name: merge(base[task.name], data),
    }


def _resolve(path: str, task: Task, given: Sections) -> dict[str, Any]:
    options = validate_parameters(given[task.run], task.train_config, prefix=f"{path}.train")
    data = validate_parameters(given[task.name], task.data_config, prefix=f"{path}.{task.name}")
    if options.rollout.server.environment:
        raise ParameterError(
            f"{task.run}.rollout.server.environment: a study writes its parameters into files, where values that may "
            "be secrets must not stand. Set these variables for the command itself: servers inherit them."
        )
    run = options.model_dump(mode="json", exclude={"threads", "processes", "sharding", "replicas", "megatron"})
    code = hash_code(options)
    return {task.run: run, task.name: data.model_dump(mode="json"), **({"code": code} if code else {})}


def _member(
    task: Task,
    run_id: str,
    kind: Kind,
    part: str,
    seed: int,
    root: Path,
    given: Mapping[str, Any],
    resolved: Mapping[str, Any],
    after: str | None = None,
) -> StudyRun:
    own = {"run_id": run_id, "seed": seed}
    return StudyRun(run_id, kind, part, seed, root, {**own, **given}, {**own, **resolved}, task.name, after)
