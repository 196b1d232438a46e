"""Records: what a study keeps of each member that has ended well, so that it is not run again.

A member counts as finished if its record holds the very parameters it would be run with now, and its files are there.
"""

from __future__ import annotations

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

    def is_finished(self, member: Member) -> bool:
        """Whether the member has ended well with the parameters it has now, and its files are there."""
        same = self.read_record(member).get("parameters") == member.parameters
        return same and all(path.is_file() for path in member.outputs)

    def write_record(self, member: Member, seconds: float | None, workers: int) -> None:
        """Note that a member has ended well.

        Args:
            seconds: wall time of its process if that did all of the member's work; None if it went on with older work.
            workers: runs side by side at most.
        """
        entries = {"parameters": member.parameters, "seconds": seconds, "workers": workers}
        write_json(self.record(member), entries)
