"""Findings of the preflight: records with a state, the facts, and the way out.

A check never raises: `guard` turns an error into a failure, so one bad setting does not hide the others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from geo_sokoban_pipeline.envs.rows import RejectedRow
from geo_sokoban_pipeline.runs.own_code import where

State = Literal["ok", "warning", "failure", "skipped"]


@dataclass(frozen=True)
class Check:
    """One finding.

    Attributes:
        group: `parameters`, `data`, `model`, …
        name: of the check.
        state: a `failure` would end a run later; a `warning` would not.
        found: the facts, with their units.
        way_out: what to do; empty if nothing needs to be done.
    """

    group: str
    name: str
    state: State
    found: str
    way_out: str = ""


def guard(group: str, name: str, check: Callable[[], Sequence[Check]]) -> list[Check]:
    """Findings of a check; an error that it raises is a failure under `name`, with the error's text."""
    try:
        return list(check())
    except Exception as error:  # user code and files may raise anything; the other checks still count
        return [failure_of(group, name, error)]


def failure_of(group: str, name: str, error: Exception) -> Check:
    """A failure with the text of an error and its place in own code; foreign errors begin with their class."""
    text = (" ".join(str(error).split()) or "no message") + where(error)
    own = type(error).__module__.startswith("geo_sokoban_pipeline") or isinstance(error, FileNotFoundError | ValueError)
    return Check(group, name, "failure", text if own else f"{type(error).__name__}: {text}")


@dataclass
class DataSample:
    """Findings about the data, and values for later checks.

    Attributes:
        checks: one record per row of the table.
        rows: training prompts for trials; empty if the source gave none.
        counts: prompts of each split in a run (None: known only from the whole source); None if the source could not be
            read.
        longest: optimal length of the hardest prompts in moves; None if the task has no moves.
    """

    checks: list[Check] = field(default_factory=list)
    rows: list[dict[str, Any]] = field(default_factory=list)
    counts: dict[str, int | None] | None = None
    longest: int | None = None


GROUP = "data"  # of all findings about data


def describe_sample(section: str, source: str, read: int, kept: str, rejected: Sequence[RejectedRow]) -> list[Check]:
    """Findings about the rows that were made or read.

    Args:
        section: name of the parameters.
        source: of the data.
        read: rows.
        kept: what they gave, in words.
    """
    checks = [Check(GROUP, "source", "ok", f"{source}: {read} rows looked at, {kept}")]
    if rejected:
        text = f"{len(rejected)} of {read} rows rejected; the first: {rejected[0].reason}"
        checks.append(Check(GROUP, "rows", "warning", text, f"they are left out; see {section}.rejected"))
    return checks


def inspect_source(
    look: Callable[[DataSample], None],
    check_counts: Callable[[], Sequence[Check]],
    check_stored: Callable[[], Sequence[Check]],
    *,
    generated: bool,
) -> DataSample:
    """Look at a source, whose counts and stored prompts are checked too; an error in one does not stop the others.

    Args:
        look: fills the sample.
        check_counts: finds counts that the source cannot give, if it generates.
        check_stored: finds stored prompts of other options.
        generated: whether the source generates.
    """
    unread = Check(GROUP, "counts", "skipped", "known once the source is read as a whole")
    sample, counts = DataSample(), guard(GROUP, "counts", check_counts) if generated else [unread]
    try:
        look(sample)
    except Exception as error:  # files, hub and generator may raise anything; the other checks still count
        # Impossible counts stop the generator too: one cause, one failure.
        if not any(check.state == "failure" for check in counts):
            sample.checks.append(failure_of(GROUP, "source", error))
    sample.checks += counts + guard(GROUP, _STORED, check_stored)
    return sample


# Tables of prompts by split, in 05_model_input.
TABLES = {"train": "prompts", "validation": "validation_prompts", "eval": "eval_prompts"}
_STORED = "stored prompts"


def compare_stored(folder: Path, differences: Callable[[Path, str], list[str]], *, generated: bool) -> list[Check]:
    """Whether the stored prompts are those of the options; `skipped` if there are none yet, or it is unknown.

    Args:
        folder: of the prompts tables in 05_model_input, under the id of the data.
        differences: differences of a split's table from the options; raises OSError or ValueError for a file that
            cannot be read.
        generated: whether the source generates, so that rows can be made and compared; for others the id decides.
    """
    paths = {split: folder / f"{name}.parquet" for split, name in TABLES.items()}
    if not all(path.is_file() for path in paths.values()):
        return [Check(GROUP, _STORED, "skipped", "none yet; the data nodes of the run make them")]
    if not generated:
        return [Check(GROUP, _STORED, "ok", f"made with these settings and source: {folder.name}")]
    found: list[Check] = []
    for split, path in paths.items():
        try:
            differs = differences(path, split)
        except (OSError, ValueError) as error:
            differs = [f"not readable ({' '.join(str(error).split())})"]
        if differs:
            way_out = f"delete {folder}; the data nodes of the run make them again"
            found.append(Check(GROUP, _STORED, "warning", f"{path}: {'; '.join(differs)}", way_out))
    return found or [Check(GROUP, _STORED, "ok", f"made with these settings: {folder.name}")]
