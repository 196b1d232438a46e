"""Pictures: the seed system's colours at the cell centres, any cell size, equal bytes for equal boards."""

from __future__ import annotations

import copy
import io
import pickle

import numpy as np
import pytest
from PIL import Image, ImageDraw

from geo_sokoban_pipeline.envs.sokoban import Board, render, render_png
from geo_sokoban_pipeline.envs.sokoban.drawing import BoardPicture, _tiles, render_observation

LEVEL = "######\n#@   #\n# $ .#\n#    #\n#  * #\n######"
CENTRES = [
    ((0, 0), (176, 80, 50)),  # wall
    ((1, 2), (8, 8, 8)),  # floor
    ((2, 4), (200, 30, 30)),  # target
    ((2, 2), (196, 140, 24)),  # box
    ((4, 3), (196, 140, 24)),  # box on a target
    ((1, 1), (70, 200, 70)),  # player
]


@pytest.mark.parametrize("cell_px", [8, 9, 12, 16, 17, 24, 32, 48, 64, 65, 96])
@pytest.mark.parametrize(("cell", "colour"), CENTRES)
def test_cell_centres_have_the_seed_colours(cell_px, cell, colour):
    picture = render(Board.from_text(LEVEL), cell_px)
    middle = (cell[1] * cell_px + cell_px // 2, cell[0] * cell_px + cell_px // 2)
    assert picture.getpixel(middle) == colour


def test_default_picture_is_64_pixels_a_cell_in_rgb():
    picture = render(Board.from_text(LEVEL))
    assert (picture.mode, picture.size) == ("RGB", (384, 384))
    assert render(Board.from_text("#@   #"), 16).size == (96, 16)


def test_floor_lines_are_one_white_pixel_at_the_near_edges():
    pixels = np.asarray(render(Board.from_text(LEVEL)))
    cell = pixels[64:128, 128:192]
    assert (cell[0] == 255).all() and (cell[:, 0] == 255).all()
    assert (cell[1:, 1:] == 8).all()
    assert (pixels[:64] == (176, 80, 50)).all()  # walls have no lines


def test_target_and_box_follow_the_seed_measures():
    pixels = np.asarray(render(Board.from_text(LEVEL)))
    target, box = pixels[128:192, 256:320], pixels[128:192, 128:192]
    assert (target[16:19, 17:47] == (220, 40, 40)).all() and tuple(target[15, 32]) == (8, 8, 8)
    assert tuple(target[32, 32 + 10]) == (200, 30, 30) and tuple(target[32, 32 + 13]) == (8, 8, 8)
    assert tuple(box[4, 32]) == (180, 130, 20) and tuple(box[3, 32]) == (8, 8, 8)
    assert tuple(box[20, 32]) == (233, 184, 47)


@pytest.mark.parametrize("cell_px", range(8, 65))
def test_all_seven_tiles_differ_at_every_size(cell_px):
    assert len({tile.tobytes() for tile in _tiles(cell_px)}) == 7


def test_cells_below_eight_pixels_are_refused():
    with pytest.raises(ValueError, match="cell_px=7: must be at least 8"):
        render(Board.from_text(LEVEL), 7)


def test_png_is_the_picture_and_equal_for_equal_boards():
    board = Board.from_text(LEVEL)
    png = render_png(board, 16)
    assert png == render_png(Board.from_text(LEVEL), 16)
    with Image.open(io.BytesIO(png)) as decoded:
        assert (decoded.format, decoded.mode) == ("PNG", "RGB")
        assert decoded.tobytes() == render(board, 16).tobytes()
    assert render_png(board.move("right").board, 16) != png


def saved(picture):
    file = io.BytesIO()
    picture.save(file, "PNG")
    return Image.open(file)


LOOKS = {
    "numpy": lambda picture: picture,
    "its own copy in numpy": np.array,
    "pillow": lambda picture: picture.load() and picture,
    "twice": lambda picture: np.asarray(picture).any() and picture.load() and picture,
    "bytes": lambda picture: Image.frombytes("RGB", picture.size, picture.tobytes()),
    "convert": lambda picture: picture.convert("RGB"),
    "copy": lambda picture: picture.copy(),
    "deepcopy": copy.deepcopy,
    "another process": lambda picture: pickle.loads(pickle.dumps(picture)),
    "file": saved,
    "crop": lambda picture: picture.crop((0, 0, *picture.size)),
    "split": lambda picture: Image.merge("RGB", picture.split()),
}


@pytest.mark.parametrize("look", LOOKS)
@pytest.mark.parametrize("cell_px", [8, 16, 33])
def test_an_observation_is_the_picture_however_it_is_looked_at(look, cell_px):
    board = Board.from_text(LEVEL)
    picture = BoardPicture(board, cell_px)
    assert (picture.mode, picture.size) == ("RGB", (6 * cell_px, 6 * cell_px))
    np.testing.assert_array_equal(np.asarray(LOOKS[look](picture)), np.asarray(render(board, cell_px)))
    np.testing.assert_array_equal(np.asarray(picture), np.asarray(render(board, cell_px)))


def test_what_is_drawn_on_a_picture_is_seen_by_all():
    picture = BoardPicture(Board.from_text(LEVEL), 16)
    ImageDraw.Draw(picture).point((3, 4), (1, 2, 3))
    assert picture.getpixel((3, 4)) == (1, 2, 3) == tuple(np.asarray(picture)[4, 3])
    assert picture.content_key is None, "a cache must not take it for the board's picture"


def test_equal_boards_share_a_picture():
    board = Board.from_text(LEVEL)
    picture = render_observation(board, 16)
    assert render_observation(Board.from_text(LEVEL), 16) is picture
    others = [render_observation(board, 17), render_observation(board.move("right").board, 16)]
    assert len({each.content_key for each in (picture, *others)}) == 3
