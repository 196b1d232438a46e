"""Images: slime's colours at the cell centres, any cell size, equal bytes for equal boards."""

from __future__ import annotations

import copy
import io
import pickle

import numpy as np
import pytest
from PIL import Image, ImageDraw

from geo_sokoban_pipeline.envs.sokoban import Board, render, render_png, render_solution
from geo_sokoban_pipeline.envs.sokoban.drawing import BoardImage, render_observation

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
    image = render(Board.from_text(LEVEL), cell_px)
    assert (image.mode, image.size) == ("RGB", (6 * cell_px, 6 * cell_px))
    middle = (cell[1] * cell_px + cell_px // 2, cell[0] * cell_px + cell_px // 2)
    assert image.getpixel(middle) == colour


def test_tiles_follow_the_seed_measures():
    pixels = np.asarray(render(Board.from_text(LEVEL)))
    assert pixels.shape == (384, 384, 3)
    # Floor lines are one white pixel at the near edges.
    cell = pixels[64:128, 128:192]
    assert (cell[0] == 255).all() and (cell[:, 0] == 255).all()
    assert (cell[1:, 1:] == 8).all()
    assert (pixels[:64] == (176, 80, 50)).all()  # walls have no lines
    target, box = pixels[128:192, 256:320], pixels[128:192, 128:192]
    assert (target[16:19, 17:47] == (220, 40, 40)).all() and tuple(target[15, 32]) == (8, 8, 8)
    assert tuple(target[32, 32 + 10]) == (200, 30, 30) and tuple(target[32, 32 + 13]) == (8, 8, 8)
    assert tuple(box[4, 32]) == (180, 130, 20) and tuple(box[3, 32]) == (8, 8, 8)
    assert tuple(box[20, 32]) == (233, 184, 47)


@pytest.mark.parametrize("cell_px", range(8, 65))
def test_all_seven_tiles_differ_at_every_size(cell_px):
    # The player stands on floor in one board and on a target in the other; the other six cells are the same.
    cells = set()
    for level in ("# .*$@", "# .*$+"):
        pixels = np.asarray(render(Board.from_text(level), cell_px))
        cells |= {pixels[:, at * cell_px : (at + 1) * cell_px].tobytes() for at in range(6)}
    assert len(cells) == 7


def test_png_is_the_image_and_equal_for_equal_boards():
    board = Board.from_text(LEVEL)
    png = render_png(board, 16)
    assert png == render_png(Board.from_text(LEVEL), 16)
    with Image.open(io.BytesIO(png)) as decoded:
        assert (decoded.format, decoded.mode) == ("PNG", "RGB")
        assert decoded.tobytes() == render(board, 16).tobytes()
    assert render_png(board.move("right").board, 16) != png
    image = render_observation(board, 16)
    assert render_observation(Board.from_text(LEVEL), 16) is image
    others = [render_observation(board, 17), render_observation(board.move("right").board, 16)]
    assert len({each.content_key for each in (image, *others)}) == 3
    drawn = BoardImage(board, 16)
    ImageDraw.Draw(drawn).point((3, 4), (1, 2, 3))
    assert drawn.getpixel((3, 4)) == (1, 2, 3) == tuple(np.asarray(drawn)[4, 3])
    assert drawn.content_key is None, "a cache must not take it for the board's image"


def saved(image):
    file = io.BytesIO()
    image.save(file, "PNG")
    return Image.open(file)


LOOKS = {
    "numpy": lambda image: image,
    "its own copy in numpy": np.array,
    "pillow": lambda image: image.load() and image,
    "twice": lambda image: np.asarray(image).any() and image.load() and image,
    "bytes": lambda image: Image.frombytes("RGB", image.size, image.tobytes()),
    "convert": lambda image: image.convert("RGB"),
    "copy": lambda image: image.copy(),
    "deepcopy": copy.deepcopy,
    "another process": lambda image: pickle.loads(pickle.dumps(image)),
    "file": saved,
    "crop": lambda image: image.crop((0, 0, *image.size)),
    "split": lambda image: Image.merge("RGB", image.split()),
}


@pytest.mark.parametrize("look", LOOKS)
@pytest.mark.parametrize("cell_px", [8, 16, 33])
def test_an_observation_is_the_image_however_it_is_looked_at(look, cell_px):
    board = Board.from_text(LEVEL)
    image = BoardImage(board, cell_px)
    assert (image.mode, image.size) == ("RGB", (6 * cell_px, 6 * cell_px))
    np.testing.assert_array_equal(np.asarray(LOOKS[look](image)), np.asarray(render(board, cell_px)))
    np.testing.assert_array_equal(np.asarray(image), np.asarray(render(board, cell_px)))


@pytest.mark.parametrize(
    ("draw", "message"),
    [
        (lambda board: render(board, 7), "cell_px=7: must be at least 8"),
        (lambda board: render_solution(board, ["sideways"]), "sideways"),
    ],
)
def test_images_that_cannot_be_drawn(draw, message):
    with pytest.raises(ValueError, match=message):
        draw(Board.from_text(LEVEL))


def test_a_solution_is_drawn_from_the_player_to_its_last_cell():
    """Walks are green, pushes orange; cells beside the way are those of the plain image."""
    board = Board.from_text("#######\n#@ $ .#\n#     #\n#######")
    plain, drawn = (np.asarray(image) for image in (render(board, 32), render_solution(board, ["right", "right"], 32)))
    assert tuple(drawn[48, 64]) == (120, 230, 120)  # between the first two cells
    assert tuple(drawn[48, 100]) == (255, 150, 40)  # the push, and the dot at its end
    assert (drawn[64:] == plain[64:]).all() and (drawn[:, 128:] == plain[:, 128:]).all()
    assert (np.asarray(render_solution(board, ["up"], 32)) != plain).any()  # the dot alone: the move is blocked
