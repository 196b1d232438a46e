"""Records: what a study keeps of each member that has ended well, so that it is not run again.

A member counts as finished if its record holds the very parameters it would be run with now, and its files are there.
A command with `fresh=true` opens a generation, and every later command without it finishes that one: nothing that was
made before is taken for a result of it.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from geo_sokoban_pipeline.storage import read_json, write_json
from geo_sokoban_pipeline.studies.planning import Member


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
        return cls(root / "08_reporting" / "studies" / name)

    def log(self, member: Member) -> Path:
        """What the member's processes have said."""
        return self.path / "logs" / f"{member.run_id}.log"

    def config(self, member: Member) -> Path:
        """Arguments of the member's command."""
        return self.path / "configs" / f"{member.run_id}.json"

    def record(self, member: Member) -> Path:
        """The member's record."""
        return self.path / "members" / f"{member.run_id}.json"

    def read_record(self, member: Member) -> dict[str, Any]:
        """The stored record, or `{}`."""
        path = self.record(member)
        stored: dict[str, Any] = read_json(path) if path.is_file() else {}
        return stored

    def begin_generation(self, members: Sequence[Member]) -> None:
        """Begin all members anew: none of them counts as begun or finished, also if this is interrupted halfway."""
        # The token goes first: what was recorded under another one does not count, whether it is deleted or not.
        write_json(self._generation, {"token": uuid.uuid4().hex, "members": [member.run_id for member in members]})
        for member in members:
            self.record(member).unlink(missing_ok=True)

    def is_outdated(self, member: Member) -> bool:
        """Whether what is stored of a member is older than the generation that it belongs to."""
        generation = self._read_generation()
        if member.run_id not in generation.get("members", []):
            return False
        path = self._begun(member)
        return not path.is_file() or read_json(path) != generation["token"]

    def note_begun(self, member: Member) -> None:
        """Note that from now on what is stored of a member belongs to the open generation."""
        write_json(self._begun(member), self._read_generation().get("token"))

    def is_finished(self, member: Member) -> bool:
        """Whether the member has ended well in this generation with the parameters it has now, and its files exist."""
        record = self.read_record(member)
        same = record.get("parameters") == member.parameters
        current = record.get("generation") == self._read_generation().get("token")
        return same and current and all(path.is_file() for path in member.outputs)

    def write_record(self, member: Member, seconds: float | None, workers: int, maker: Mapping[str, Any]) -> None:
        """Note that a member has ended well.

        Args:
            seconds: wall time of its process if that did all of the member's work; None if it went on with older work.
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

    def _begun(self, member: Member) -> Path:
        return self.path / "begun" / f"{member.run_id}.json"

    def _read_generation(self) -> dict[str, Any]:
        """`token` and `members` of the last command that said `fresh=true`, `{}` before the first one."""
        stored: dict[str, Any] = read_json(self._generation) if self._generation.is_file() else {}
        return stored
