"""Episodes as frames: what the policy saw, what it replied, what that earned.

A frame per reply, and one for how it ended. Texts are the model's own and not to be trusted: whoever shows them
escapes them.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from geo_sokoban_pipeline.contract.values import SOLVED
from geo_sokoban_pipeline.reporting.boards import play_moves, read_board
from geo_sokoban_pipeline.reporting.formats import plural
from geo_sokoban_pipeline.reporting.run_worlds import run_world
from geo_sokoban_pipeline.rewards.math_answer.extraction import extract_answer
from geo_sokoban_pipeline.trajectories import Trajectory, Turn


@dataclass(frozen=True)
class Frame:
    """One moment of an episode.

    Attributes:
        picture: PNG that the policy saw last; None where there was none.
        observation: text of the user turn, `<image>` where pictures stood; empty on the last frame.
        reply: the model's text; None on the last frame.
        action: what the environment understood, or, of a problem, the answer in the box; None for nothing.
        reward: that the turn was trained on, else what the environment gave for it; advantage: of the turn; None where
            there is none.
    """

    picture: bytes | None
    observation: str = ""
    reply: str | None = None
    action: str | None = None
    reward: float | None = None
    advantage: float | None = None

    @property
    def is_end(self) -> bool:
        """Whether this frame shows the end, after the last reply."""
        return self.reply is None


def episode_frames(trajectory: Trajectory) -> list[Frame]:
    """Frames of an episode in order: one per reply, then the end.

    The end shows the last stored picture, or, where an episode of Sokoban stopped before another one was taken, the
    board as the last actions left it.
    """
    moves = run_world(trajectory.task).world == "sokoban"
    frames: list[Frame] = []
    picture: bytes | None = None
    observation = ""
    for turn in trajectory.turns:
        if turn.role == "assistant":
            action = turn.action if moves else turn.action or extract_answer(turn.text)
            frames.append(Frame(picture, observation, turn.text, action, turn_reward(turn), turn.advantage))
            observation = ""
        else:
            observation = turn.text
            picture = trajectory.images[turn.image_indices[-1]] if turn.image_indices else picture
    last = trajectory.turns[-1] if trajectory.turns else None
    if moves and last is not None and last.role == "assistant" and picture is not None:
        picture = play_moves(picture, read_actions(last)) or picture
    return [*frames, Frame(picture, observation)]


def turn_reward(turn: Turn) -> float | None:
    """What a turn was trained on where credit is per turn, else what the environment gave for it; None for nothing."""
    return turn.reward if turn.credit is None else turn.credit


def deadlock_turn(trajectory: Trajectory) -> int | None:
    """Turn after which a box could no longer reach a target, from 1; None where none did, or no picture shows it."""
    if trajectory.metrics.get("lost", 0.0) < SOLVED:
        return None
    for number, frame in enumerate(episode_frames(trajectory)[1:], start=1):
        found = None if frame.picture is None else read_board(frame.picture)
        if found is not None and found[0].is_lost:
            return number
    return None


def read_actions(turn: Turn) -> list[str]:
    """Actions of a reply as the environment parsed them."""
    return [action for action in (turn.action or "").split(",") if action]


def is_solved(trajectory: Trajectory) -> bool:
    """Whether the episode succeeded; one that does not know counts as not solved."""
    return trajectory.metrics.get("success", 0.0) >= SOLVED


def is_greedy(trajectory: Trajectory) -> bool:
    """Whether replies were the likeliest tokens, as `sampling` records it."""
    sampling: dict[str, Any] = json.loads(trajectory.sampling or "{}")
    return bool(sampling.get("greedy"))


def describe_end(trajectory: Trajectory) -> str:
    """How an episode ended, in a few words, with the label of a problem that was missed."""
    words = run_world(trajectory.task).words
    turns = sum(turn.role == "assistant" for turn in trajectory.turns)
    steps = trajectory.metrics.get("steps")
    effort = plural(turns, "turn")
    if steps is not None and int(steps) != turns:
        effort += f", {plural(int(steps), 'move')}"
    if is_solved(trajectory):
        return f"{words.solved.capitalize()} in {effort}."
    label = f" The label is {trajectory.label}." if trajectory.label is not None else ""
    if trajectory.metrics.get("lost", 0.0) >= SOLVED:
        turn = deadlock_turn(trajectory)
        return f"Deadlocked{'' if turn is None else f' at turn {turn}'}: {words.unsolved} after {effort}."
    if trajectory.status == "completed":
        return f"{words.unsolved.capitalize()} after {effort}.{label}"
    reason = f": {trajectory.error}" if trajectory.error else ""
    return f"{trajectory.status.capitalize()} after {effort}{reason}.{label}"
