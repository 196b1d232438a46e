"""Running a study: its runs side by side, each an ordinary command, and a record of each one that has ended well.

A run counts as finished if its record holds the very parameters it would be run with now, and its files are there. A
command with `fresh=true` opens a generation, and every later command without it finishes that one: nothing that was
made before is taken for a result of it. No run outlives the study, however that ends.
"""

from __future__ import annotations

import logging
import signal
import subprocess
import threading
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from geo_sokoban_pipeline.console import track
from geo_sokoban_pipeline.processes import count_cores, tethered
from geo_sokoban_pipeline.runs.fingerprint import as_current, flatten
from geo_sokoban_pipeline.runs.folders import REPORTS
from geo_sokoban_pipeline.runs.lock import find_holder
from geo_sokoban_pipeline.runs.provenance import describe_maker, read_commands
from geo_sokoban_pipeline.runs.storage import find_json, write_json
from geo_sokoban_pipeline.studies.plan import Command, StudyRun

_POLL_SECONDS = 0.1
_GRACE_SECONDS = 20.0
_SHOWN_LINES = 15
_ENDINGS = (signal.SIGTERM, signal.SIGHUP)  # what ends a study as Ctrl-C does
logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class StudyFolder:
    """Files of a study itself.

    Attributes:
        path: `08_reporting/studies/<study>` in the data root.
    """

    path: Path

    @classmethod
    def of(cls, root: Path, name: str) -> StudyFolder:
        """Folder of a study in a data root."""
        return cls(root / REPORTS / "studies" / name)

    def log(self, member: StudyRun) -> Path:
        """Output of the member's processes."""
        return self.path / "logs" / f"{member.run_id}.log"

    def config(self, member: StudyRun) -> Path:
        """Arguments of the member's command."""
        return self.path / "configs" / f"{member.run_id}.json"

    def record(self, member: StudyRun) -> Path:
        """The member's record."""
        return self.path / "members" / f"{member.run_id}.json"

    def read_record(self, member: StudyRun) -> dict[str, Any]:
        """The stored record, or `{}`."""
        return find_json(self.record(member)) or {}

    def begin_generation(self, members: Sequence[StudyRun]) -> None:
        """Begin all members anew: none of them counts as begun or finished, also if this is interrupted halfway."""
        # The token goes first: records under another one do not count, whether they are deleted or not.
        replaced = {member.run_id: _first_command(member) for member in members}
        write_json(self._generation, {"token": uuid.uuid4().hex, "replaced": replaced})
        for member in members:
            self.record(member).unlink(missing_ok=True)

    def is_outdated(self, member: StudyRun) -> bool:
        """Whether what is stored of a member is older than the generation that it belongs to.

        A run of it has begun once another command than the noted one is the first that has worked on the member; while
        the older run is only set aside it may come back.
        """
        replaced = self._read_generation().get("replaced", {})
        is_same = replaced.get(member.run_id) == _first_command(member)
        return member.run_id in replaced and (is_same or member.folders.can_restore)

    def is_finished(self, member: StudyRun) -> bool:
        """Whether the member has ended well in this generation with the parameters it has now, and its files exist."""
        record = self.read_record(member)
        stored = as_current(flatten(record.get("parameters") or {}), f"train_{member.task}.")
        same = stored == flatten(member.parameters)
        current = record.get("generation") == self._read_generation().get("token")
        return same and current and all(path.is_file() for path in member.outputs)

    def write_record(self, member: StudyRun, seconds: float | None, workers: int, maker: Mapping[str, Any]) -> None:
        """Note that a member has ended well.

        Args:
            seconds: wall time of its process if that did all of the member's work; None if it continued earlier work.
            workers: runs side by side at most.
            maker: versions and machine, see `describe_maker`.
        """
        entries = {
            "parameters": member.parameters,
            "generation": self._read_generation().get("token"),
            "seconds": seconds,
            "workers": workers,
            "maker": dict(maker),
        }
        write_json(self.record(member), entries)

    @property
    def _generation(self) -> Path:
        return self.path / "generation.json"

    def _read_generation(self) -> dict[str, Any]:
        """`token` of the last command that said `fresh=true`, and by run id the first command of each member that it
        replaces; `{}` before the first one.
        """
        return find_json(self._generation) or {}


def _first_command(member: StudyRun) -> dict[str, Any] | None:
    """The command that began a member's run; None: none has."""
    return next(iter(read_commands(member.folders.outputs)), None)


# Processes: the members of a study side by side, each an ordinary command with its share of the cores.


class StudyError(RuntimeError):
    """Members of a study have failed; the message has their names, logs and last lines."""


@dataclass
class _Child:
    member: StudyRun
    process: subprocess.Popen[bytes]
    began: float
    whole: bool  # nothing of the member was there before
    maker: dict[str, Any]


def run_members(
    members: Sequence[StudyRun], command: Command, folder: StudyFolder, workers: int | None, *, fresh: bool, name: str
) -> None:
    """Run the members that are not finished; returns once all are.

    Args:
        members: each after the one it needs; started in this order.
        workers: processes side by side; None: one per core this process may use.
        fresh: start every member anew, finished ones too; after an interruption, call again without it.
        name: of the study, for the progress.

    Raises:
        StudyError: at least one member failed; all that do not need it have been run.
    """
    limit = workers or count_cores()
    if fresh:
        folder.begin_generation(members)
    waiting = [member for member in members if not folder.is_finished(member)]
    done = {member.run_id for member in members} - {member.run_id for member in waiting}
    failed: dict[str, str] = {}
    running: list[_Child] = []
    told: set[str] = set()
    spent: list[float] = []  # seconds of members that have ended well

    def advance() -> None:
        ages = [time.monotonic() - child.began for child in running]
        progress.advance(left=seconds_left(spent, ages, len(waiting), limit) if spent else None)

    with track(f"study {name}", len(members), len(done)) as progress, _end_children(running):
        while waiting or running:
            for member in [m for m in waiting if m.after in failed]:
                waiting.remove(member)
                failed[member.run_id] = ""
                advance()
            for member in [m for m in waiting if m.after is None or m.after in done]:
                if len(running) < limit and _is_free(member, told):
                    waiting.remove(member)
                    running.append(_start(member, command, folder))
            for child in [c for c in running if c.process.poll() is not None]:
                running.remove(child)
                _settle(child, folder, limit, done, failed, spent)
                advance()
            time.sleep(_POLL_SECONDS if running or waiting else 0)
    if reasons := [text for text in failed.values() if text]:
        again = "The same command without fresh=true" if fresh else "The same command"
        raise StudyError("\n".join([*reasons, f"{again} goes on with what is left once this is mended."]))


def _is_free(member: StudyRun, told: set[str]) -> bool:
    """Whether no other process works on a member's run, such as a child of an earlier study; logged once."""
    if (holder := find_holder(member.models)) is not None and member.run_id not in told:
        told.add(member.run_id)
        logger.warning("%s waits. %s", member.run_id, holder)
    return holder is None


def _start(member: StudyRun, command: Command, folder: StudyFolder) -> _Child:
    config, log = folder.config(member), folder.log(member)
    params = dict(member.params)
    if folder.is_outdated(member):
        params["fresh"] = True  # it replaces the older run once it has something itself
    write_json(config, {"run": {"pipelines": ",".join(member.pipelines), "params": params}})
    log.parent.mkdir(parents=True, exist_ok=True)
    whole = "fresh" in params or member.folders.is_empty
    logger.info("%s: %s", member.run_id, "started" if whole else "goes on")
    with log.open("ab") as handle:
        process = subprocess.Popen(
            tethered(command.words(config)),
            cwd=command.project,
            env=command.environment(member.root),
            stdin=subprocess.DEVNULL,
            stdout=handle,
            stderr=subprocess.STDOUT,
            # A Ctrl-C at the terminal goes to the study alone, which ends its children in order.
            start_new_session=True,
        )
    return _Child(member, process, time.monotonic(), whole, describe_maker(command.project))


def _settle(
    child: _Child, folder: StudyFolder, workers: int, done: set[str], failed: dict[str, str], spent: list[float]
) -> None:
    member, seconds, code = child.member, time.monotonic() - child.began, child.process.returncode
    if code == 0:
        folder.write_record(member, seconds if child.whole else None, workers, child.maker)
        done.add(member.run_id)
        spent.append(seconds)
        logger.info("%s: done after %.1f minutes", member.run_id, seconds / 60)
    else:
        failed[member.run_id] = _describe_failure(member, code, folder.log(member))
        logger.error("%s: failed after %.1f minutes", member.run_id, seconds / 60)


def seconds_left(spent: Sequence[float], ages: Sequence[float], waiting: int, limit: int) -> float:
    """Seconds until all members have ended, if each takes the mean of those that have.

    The pace of their ends says little: two that run side by side end together.

    Args:
        spent: seconds of those that have ended.
        ages: seconds of those that run.
        limit: how many run side by side.
    """
    mean = sum(spent) / len(spent)
    left = waiting * mean + sum(max(0.0, mean - age) for age in ages)
    return left / max(1, min(limit, waiting + len(ages)))


def _describe_failure(member: StudyRun, code: int, log: Path) -> str:
    how = f"was ended by signal {-code}" if code < 0 else f"ended with exit code {code}"
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()[-_SHOWN_LINES:]
    return "\n".join([f"{member.run_id} {how}; its log is {log}. The last lines:", *(f"  {line}" for line in lines)])


@contextmanager
def _end_children(running: list[_Child]) -> Iterator[None]:
    """End what still runs when the block is left, by an interrupt or a request to terminate too."""
    in_main = threading.current_thread() is threading.main_thread()
    # An ignored signal stays so: `nohup` means that closing the terminal is no reason to end.
    wanted = [number for number in _ENDINGS if in_main and signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, _leave) for number in wanted}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        for child in running:
            child.process.terminate()
        deadline = time.monotonic() + _GRACE_SECONDS
        for child in running:
            try:
                child.process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                child.process.kill()
                child.process.wait()


def _leave(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)
