"""Episodes for the page's frame-by-frame players: pictures once each by content hash, texts as plain JSON strings."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from geo_sokoban_pipeline.envs.data_uris import png_data_uri
from geo_sokoban_pipeline.reporting.episodes import Frame, describe_end, episode_frames, is_solved
from geo_sokoban_pipeline.reporting.formats import number, signed
from geo_sokoban_pipeline.reporting.run_worlds import run_world
from geo_sokoban_pipeline.seeding import content_hash
from geo_sokoban_pipeline.trajectories import Trajectory

_SHOWN_REPLY = 6000  # characters; longer replies are cut, with a note


@dataclass
class PlayerData:
    """Everything the page's script reads: `pictures` by key, `episodes` as lists of frames."""

    pictures: dict[str, str] = field(default_factory=dict)
    episodes: list[dict[str, Any]] = field(default_factory=list)

    def add(self, trajectory: Trajectory) -> int:
        """Add an episode.

        Returns:
            Its number, by which a player on the page names it.
        """
        frames = episode_frames(trajectory)
        replies = len(frames) - 1
        silent = run_world(trajectory.task).silent
        shown = [self._describe(frame, at + 1, replies, silent) for at, frame in enumerate(frames[:-1])]
        end = {"picture": self._add_picture(frames[-1].picture), "step": "end", "note": describe_end(trajectory)}
        self.episodes.append({"frames": [*shown, end], "solved": is_solved(trajectory)})
        return len(self.episodes) - 1

    def _describe(self, frame: Frame, number_of: int, replies: int, silent: str) -> dict[str, Any]:
        notes = [frame.action.replace(",", ", ") if frame.action else silent]
        if frame.reward is not None:
            notes.append(f"reward {signed(frame.reward)}")
        if frame.advantage is not None:
            notes.append(f"advantage {signed(frame.advantage)}")
        return {
            "picture": self._add_picture(frame.picture),
            "step": f"{number_of} of {replies}",
            "reply": shorten(frame.reply or ""),
            "note": " · ".join(notes),
        }

    def _add_picture(self, png: bytes | None) -> str | None:
        if png is None:
            return None
        key = content_hash(png)[:16]
        self.pictures.setdefault(key, png_data_uri(png))
        return key


def shorten(text: str, limit: int = _SHOWN_REPLY) -> str:
    """A text, cut after `limit` characters with the number of those left out."""
    left_out = len(text) - limit
    return text if left_out <= 0 else f"{text[:limit]}\n… {number(left_out, 0)} more characters"
