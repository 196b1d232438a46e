"""The subject of a pre-flight (a run with its options and folders), and the table of all findings.

A check does not raise: `guard` turns an error into a failure, so that one bad setting does not hide the others.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

from geo_sokoban_pipeline.config.grpo import TrainOptions
from geo_sokoban_pipeline.config.study import CheckPipelineOptions
from geo_sokoban_pipeline.envs.inspection import Check, State
from geo_sokoban_pipeline.envs.plugins import adapter_of, load_object
from geo_sokoban_pipeline.formats import plural
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
        return cast(TrainOptions, getattr(self.parameters, self.run))

    @property
    def data(self) -> Any:
        """Options of the task's data."""
        return getattr(self.parameters, self.task)

    @property
    def settings(self) -> CheckPipelineOptions:
        """Options of the pre-flight itself."""
        return cast(CheckPipelineOptions, getattr(self.parameters, f"check_{self.task}"))

    @property
    def folders(self) -> RunFolders:
        """Folders of the run."""
        return RunFolders.of(self.data_root, self.run, self.parameters.run_id)

    @property
    def base_policy(self) -> Path | None:
        """The run's copy of its starting policy, with which it continues; None: not stored yet."""
        return self._stored("base_policy")

    @property
    def learnt_policy(self) -> Path | None:
        """The run's policy after the warm start; None: not stored yet."""
        return self._stored("policy")

    def _stored(self, name: str) -> Path | None:
        folder = self.folders.models / name
        return folder if not self.parameters.fresh and (folder / MANIFEST).is_file() else None


def find_cases(group: str, *cases: tuple[object, str, State, str, str]) -> list[Check]:
    """Findings of the cases that are there.

    Args:
        cases: whether each is there; name, state, text and way out of its finding.
    """
    return [Check(group, name, state, text, way_out) for is_there, name, state, text, way_out in cases if is_there]


class PreflightError(RuntimeError):
    """The pre-flight has failures; the text is one line with their number and the first one."""


def as_table(subject: Subject, checks: Sequence[Check]) -> dict[str, Any]:
    """The findings as JSON values, with the run and the count of each state."""
    states = Counter(check.state for check in checks)
    groups = dict.fromkeys(check.group for check in checks)
    return {
        "run": subject.run,
        "run_id": subject.parameters.run_id,
        "states": {state: states[state] for state in ("ok", "warning", "failure", "skipped")},
        "checks": [asdict(check) for group in groups for check in checks if check.group == group],
    }


def summarise(table: dict[str, Any]) -> str:
    """One line that summarises the table."""
    counts = ", ".join(plural(table["states"][state], state) for state in ("failure", "warning"))
    text = f"{table['run']}/{table['run_id']}: {counts}"
    for first in (check for check in table["checks"] if check["state"] == "failure"):
        way_out = f"; {first['way_out']}" if first["way_out"] else ""
        return f"{text}; first, {first['group']}, {first['name']}: {first['found']}{way_out}"
    return f"{text}; the run can begin"


def rows_of(table: dict[str, Any]) -> list[tuple[str, ...]]:
    """Cells to print: group (only in its first row), name, state, finding with its way out."""
    groups = [None, *(check["group"] for check in table["checks"])]
    return [
        (
            "" if check["group"] == before else check["group"],
            check["name"],
            check["state"],
            f"{check['found']}\n→ {check['way_out']}" if check["way_out"] else check["found"],
        )
        for before, check in zip(groups, table["checks"], strict=False)
    ]


def is_own(options: TrainOptions) -> bool:
    """Whether code that is not this project's is named, or an advantage of turns requires a trial of the reward."""
    named = [*options.env.named_code.values(), options.reward.function]
    if options.warm_start.steps:
        named.append(options.warm_start.teacher.factory)
    foreign = adapter_of(options.env.factory) is not None
    return foreign or any(own_files(spec) for spec in named) or (needs_turns(options) and not made_of_turns(options))


def needs_turns(options: TrainOptions) -> bool:
    """Whether the advantage needs the parts of the reward that each turn has earned."""
    # It imports numpy, which the pipeline registry does without.
    from geo_sokoban_pipeline.grpo.estimators import load_estimator

    return load_estimator("advantage", options.grpo).needs_turn_rewards


def made_of_turns(options: TrainOptions) -> bool:
    """Whether the reward is marked as the sum of its turns' worths."""
    reward = load_object(options.reward.function, default_name="reward")
    # The mark is the function itself, because `functools.wraps` copies the attribute to a wrapper that may add a term.
    return getattr(reward, "made_of_turns", None) is reward
