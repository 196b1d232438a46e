"""The subject of a pre-flight (a run with its options and folders), and the table of all findings.

A check does not raise: `guard` turns an error into a failure, so that one bad setting does not hide the others.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from geo_sokoban_pipeline.config.grpo import TrainOptions
from geo_sokoban_pipeline.config.study import CheckPipelineOptions
from geo_sokoban_pipeline.envs.inspection import Check
from geo_sokoban_pipeline.envs.plugins import load_object
from geo_sokoban_pipeline.parameters import ProjectParameters
from geo_sokoban_pipeline.runs.folders import RunFolders
from geo_sokoban_pipeline.runs.own_code import own_files
from geo_sokoban_pipeline.runs.storage import MANIFEST


@dataclass(frozen=True)
class Subject:
    """The run that a pre-flight checks.

    Attributes:
        task: such as `sokoban`; the run is `train_<task>`.
        parameters: all parameters of the command.
        data_root: folder that holds `06_models` and the other layers.
    """

    task: str
    parameters: ProjectParameters
    data_root: Path

    @property
    def run(self) -> str:
        """Namespace of the run."""
        return f"train_{self.task}"

    @property
    def options(self) -> TrainOptions:
        """Options of the run."""
        found: TrainOptions = getattr(self.parameters, self.run)
        return found

    @property
    def data(self) -> Any:
        """Options of the task's data."""
        return getattr(self.parameters, self.task)

    @property
    def settings(self) -> CheckPipelineOptions:
        """Options of the pre-flight itself."""
        found: CheckPipelineOptions = getattr(self.parameters, f"check_{self.task}")
        return found

    @property
    def models(self) -> Path:
        """Folder of the run's policies, checkpoints and lock."""
        return self._folders.models

    @property
    def base_policy(self) -> Path | None:
        """The run's copy of its starting policy, with which it continues; None: not stored yet."""
        return self._stored("base_policy")

    @property
    def learnt_policy(self) -> Path | None:
        """The run's policy after the warm start; None: not stored yet."""
        return self._stored("policy")

    @property
    def outputs(self) -> Path:
        """Folder of the run's trajectories and metrics."""
        return self._folders.outputs

    @property
    def reports(self) -> Path:
        """Folder of the run's summary and report."""
        return self._folders.reports

    @property
    def _folders(self) -> RunFolders:
        return RunFolders.of(self.data_root, self.run, self.parameters.run_id)

    def _stored(self, name: str) -> Path | None:
        folder = self.models / name
        return folder if not self.parameters.fresh and (folder / MANIFEST).is_file() else None


class PreflightError(RuntimeError):
    """The pre-flight has failures; the text is one line with their number and the first one."""


def as_table(subject: Subject, checks: Sequence[Check]) -> dict[str, Any]:
    """The findings as JSON values, with the run and the count of each state."""
    states = Counter(check.state for check in checks)
    groups = list(dict.fromkeys(check.group for check in checks))
    checks = sorted(checks, key=lambda check: groups.index(check.group))
    return {
        "run": subject.run,
        "run_id": subject.parameters.run_id,
        "states": {state: states[state] for state in ("ok", "warning", "failure", "skipped")},
        "checks": [check.to_json() for check in checks],
    }


def summarise(table: dict[str, Any]) -> str:
    """One line that summarises the table."""
    states = table["states"]
    counts = [f"{states[state]} {state}{'' if states[state] == 1 else 's'}" for state in ("failure", "warning")]
    text = f"{table['run']}/{table['run_id']}: {', '.join(counts)}"
    failures = [check for check in table["checks"] if check["state"] == "failure"]
    if not failures:
        return f"{text}; the run can begin"
    first = failures[0]
    way_out = f"; {first['way_out']}" if first["way_out"] else ""
    return f"{text}; first, {first['group']}, {first['name']}: {first['found']}{way_out}"


def rows_of(table: dict[str, Any]) -> list[tuple[str, ...]]:
    """Cells to print: group (only in its first row), name, state, finding with its way out."""
    rows: list[tuple[str, ...]] = []
    group = None
    for check in table["checks"]:
        text = f"{check['found']}\n→ {check['way_out']}" if check["way_out"] else check["found"]
        rows.append(("" if check["group"] == group else check["group"], check["name"], check["state"], text))
        group = check["group"]
    return rows


def is_own(options: TrainOptions) -> bool:
    """Whether environment, reward or expert are user code, or credit per turn requires a trial of the reward."""
    named = [options.env.factory, options.reward.function]
    if options.warm_start.steps:
        named.append(options.warm_start.teacher.factory)
    return any(own_files(spec) for spec in named) or (options.grpo.credit == "turn" and not made_of_turns(options))


def made_of_turns(options: TrainOptions) -> bool:
    """Whether the reward is marked as the sum of its turns' worths."""
    reward = load_object(options.reward.function, default_name="reward")
    # The mark is the function itself, because `functools.wraps` copies the attribute to a wrapper that may add a term.
    return getattr(reward, "made_of_turns", None) is reward
