"""Observation texts: what stands beside the picture. `full` explains and asks, `brief` costs next to no tokens."""

from __future__ import annotations

from collections.abc import Sequence

from geo_sokoban_pipeline.envs.sokoban.board import Board

STYLES = ("full", "brief")


def observation_text(board: Board, executed: Sequence[str] | None, style: str, grid: bool, picture: bool) -> str:
    """Text of one observation.

    Args:
        board: the position to be described.
        executed: moves of the last turn, those that were blocked included; None at reset.
        style: `full` or `brief`.
        grid: whether the position is written out in the data set's symbols; without a picture `brief` puts nothing
            between the cells.
        picture: whether a picture of it comes with the text.
    """
    compact = style == "brief" and not picture
    rows = (board.to_grid() if compact else board.to_symbols()) if grid else None
    if style == "brief":
        return f"{rows}\nNext?" if rows else "Next?"
    shown = [text for text in ("See the image." if picture else None, rows) if text]
    done = ", ".join(action.capitalize() for action in executed or ()) or "None"
    return "\n".join(
        [
            "Current board:",
            *shown,
            f"Moves just made: {done}",
            "Which moves come next? Answer with Up, Down, Left or Right.",
        ]
    )
