"""Boards read back from images, and episodes as frames and films."""

from __future__ import annotations

import io

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from builders import make_png, make_trajectories
from geo_sokoban_pipeline.envs.geo3k.task import GEO3K
from geo_sokoban_pipeline.envs.sokoban import Board
from geo_sokoban_pipeline.envs.sokoban.drawing import play_moves, read_board, render_png
from geo_sokoban_pipeline.envs.sokoban.task import SOKOBAN
from geo_sokoban_pipeline.reporting.episodes import (
    describe_end,
    episode_frames,
    episodes_gif,
)
from reporting.material import make_levels, play


@given(level=st.integers(0, 23), cell_px=st.sampled_from([8, 16, 33]), moves=st.lists(st.sampled_from("udlr")))
@settings(max_examples=40, deadline=None)
def test_image_names_its_board(level, cell_px, moves):
    board = make_levels(48)[level].board
    for move in moves:
        board = board.move({"u": "up", "d": "down", "l": "left", "r": "right"}[move]).board
    assert read_board(render_png(board, cell_px)) == (board, cell_px)


def test_cells_with_what_stands_there():
    """All seven kinds of cells are read; a part of an image names what is in it."""
    for text in ("#######\n#@ $.*#\n#######", "######\n#+ $ #\n######"):
        board = Board.from_text(text)
        assert read_board(render_png(board, 16)) == (board, 16)
    cells = SOKOBAN.image_parts(render_png(Board.from_text("#####\n#@$.#\n#####"), 16))
    assert [cell.content for cell in cells[5:10]] == ["wall", "player", "box", "target", "wall"]
    assert [(cell.left, cell.top, cell.width, cell.height) for cell in cells[5:7]] == [
        (0, 16, 16, 16),
        (16, 16, 16, 16),
    ]
    assert len(cells) == 15


@pytest.mark.parametrize(
    ("size", "columns", "rows"), [((96, 64), 6, 4), ((300, 150), 8, 8), ((20, 10), 1, 1), ((1000, 40), 8, 2)]
)
def test_other_images_have_a_grid(size, columns, rows):
    """Its parts cover every pixel once."""
    buffer = io.BytesIO()
    Image.new("RGB", size).save(buffer, "PNG")
    for task in (SOKOBAN, GEO3K):
        parts = task.image_parts(buffer.getvalue())
        assert len(parts) == columns * rows
        covered = np.zeros(size[::-1], int)
        for part in parts:
            covered[part.top : part.top + part.height, part.left : part.left + part.width] += 1
            assert part.content is None
        assert (covered == 1).all()


def test_the_image_after_moves():
    """It ends where the board is solved; there is none of another image or an unknown move."""
    board = Board.from_text("######\n#@$. #\n######")
    shown = render_png(board, 16)
    assert play_moves(shown, ["right", "left", "left"]) == render_png(board.move("right").board, 16)
    assert play_moves(shown, ["fly"]) is None
    for other in (make_png(96, 3), make_png(32, 1)):
        assert read_board(other) is None and play_moves(other, ["up"]) is None


def test_frames_of_an_episode_end_on_the_solved_board_or_its_last_image():
    solved, unsolved = (play(make_levels(48)[level], skill, "x/sampled", 0) for level, skill in ((4, 1.0), (7, 0.0)))
    frames = episode_frames(solved)
    assert [frame.response for frame in frames[:-1]] == [turn.text for turn in solved.turns if turn.role == "assistant"]
    assert [frame.image for frame in frames[:-1]] == solved.images
    assert frames[-1].is_end and read_board(frames[-1].image)[0].is_solved
    assert describe_end(solved) == "Solved in 5 turns."
    frames = episode_frames(unsolved)
    assert frames[-1].image == unsolved.images[-1] and len(frames) == len(unsolved.images)
    assert describe_end(unsolved) == "Not solved after 10 turns."


def test_frames_without_images_or_turns():
    episode = make_trajectories(1)[0]
    for turn in episode.turns:
        turn.image_indices = []
    assert {frame.image for frame in episode_frames(episode)} == {None}
    episode.turns = []
    assert [frame.is_end for frame in episode_frames(episode)] == [True]


def test_films_have_a_frame_per_response_and_the_end():
    """Side by side they are as long as the longest."""
    episodes = [play(make_levels(48)[at], 1.0, "x/sampled", 0) for at in (0, 2, 4)]
    film = episodes_gif(episodes[2:], board_px=96)
    assert episodes_gif(episodes[2:], board_px=96) == film
    with (
        Image.open(io.BytesIO(film)) as one,
        Image.open(io.BytesIO(episodes_gif(episodes, columns=2, board_px=64))) as three,
    ):
        assert one.n_frames == three.n_frames == 6 and one.info["loop"] == 0
        assert three.width < three.height * 1.2
    with pytest.raises(ValueError, match="0 episodes"):
        episodes_gif([])
