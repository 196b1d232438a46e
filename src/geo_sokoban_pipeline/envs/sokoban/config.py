"""The seed's `env_config`: a level as plain numbers, checked on the way in, sorted on the way out.

Sizes and box numbers follow from the grid; where the config states them too and they differ, that is an error, never
a guess.
"""

from __future__ import annotations

from typing import Any

from geo_sokoban_pipeline.envs.sokoban.layout import Cell
from geo_sokoban_pipeline.envs.sokoban.text import BOX, BOX_ON_TARGET, FLOOR, PLAYER, PLAYER_ON_TARGET, TARGET, WALL

_STATE_KEYS = ("initial_base_grid", "initial_boxes", "initial_player")
_BASE = {BOX_ON_TARGET: TARGET, BOX: FLOOR, PLAYER: FLOOR, PLAYER_ON_TARGET: TARGET}


def config_from_codes(height: int, width: int, codes: bytes) -> dict[str, Any]:
    """The part of `env_config` that holds the level: sizes, base grid, sorted boxes, player."""
    cells = list(enumerate(codes))
    boxes = [list(divmod(at, width)) for at, code in cells if code in (BOX, BOX_ON_TARGET)]
    player = next(list(divmod(at, width)) for at, code in cells if code in (PLAYER, PLAYER_ON_TARGET))
    base = [_BASE.get(code, code) for code in codes]
    return {
        "grid_size": [height, width],
        "num_boxes": len(boxes),
        "initial_base_grid": [base[at : at + width] for at in range(0, height * width, width)],
        "initial_boxes": boxes,
        "initial_player": player,
    }


def codes_from_config(config: dict[str, Any]) -> tuple[int, int, bytes]:
    """Height, width and row-major cell codes of an `env_config`; nested lists, tuples and numpy arrays are fine.

    Raises:
        ValueError: a key is missing, a grid value or coordinate is out of range, a box or the player stands in a wall,
            or the stated grid_size or num_boxes contradicts the grid. The message names the key and the value.
    """
    missing = [key for key in _STATE_KEYS if config.get(key) is None]
    if missing:
        raise ValueError(f"env_config: {', '.join(missing)} missing; the level needs all of {', '.join(_STATE_KEYS)}")
    grid = [[int(value) for value in row] for row in config["initial_base_grid"]]
    _check_grid(grid)
    height, width = len(grid), len(grid[0])
    codes = bytearray(value for row in grid for value in row)
    boxes = [_free_cell("initial_boxes", box, grid) for box in config["initial_boxes"]]
    player = _free_cell("initial_player", config["initial_player"], grid)
    if len(set(boxes)) != len(boxes) or player in boxes:
        raise ValueError(
            f"env_config: initial_boxes={boxes}, initial_player={player} share a cell; each needs one of its own"
        )
    for row, column in boxes:
        codes[row * width + column] = BOX_ON_TARGET if grid[row][column] == TARGET else BOX
    codes[player[0] * width + player[1]] = PLAYER_ON_TARGET if grid[player[0]][player[1]] == TARGET else PLAYER
    _check_stated(config, (height, width), len(boxes))
    return height, width, bytes(codes)


def _check_grid(grid: list[list[int]]) -> None:
    if not grid or not grid[0]:
        raise ValueError("env_config: initial_base_grid is empty; give rows of 0 (wall), 1 (floor), 2 (target)")
    if len({len(row) for row in grid}) > 1:
        raise ValueError(
            f"env_config: initial_base_grid has rows of {sorted({len(row) for row in grid})} cells; make them equal"
        )
    unknown = {value for row in grid for value in row} - {WALL, FLOOR, TARGET}
    if unknown:
        raise ValueError(
            f"env_config: initial_base_grid holds {sorted(unknown)}; only 0 (wall), 1 (floor), 2 (target) are known"
        )


def _free_cell(key: str, value: Any, grid: list[list[int]]) -> Cell:
    pair = [int(number) for number in value]
    if len(pair) != 2:
        raise ValueError(f"env_config: {key}={pair}: a cell is [row, column]")
    row, column = pair
    if not (0 <= row < len(grid) and 0 <= column < len(grid[0])):
        raise ValueError(f"env_config: {key}={pair} lies outside the {len(grid)}×{len(grid[0])} grid")
    if grid[row][column] == WALL:
        raise ValueError(f"env_config: {key}={pair} stands in a wall; move it to a floor or target cell")
    return row, column


def _check_stated(config: dict[str, Any], size: tuple[int, int], boxes: int) -> None:
    stated_size, stated_boxes = config.get("grid_size"), config.get("num_boxes")
    if stated_size is not None and tuple(int(side) for side in stated_size) != size:
        raise ValueError(
            f"env_config: grid_size={list(stated_size)}, but initial_base_grid is {list(size)}; "
            "drop grid_size or correct it"
        )
    if stated_boxes is not None and int(stated_boxes) != boxes:
        raise ValueError(
            f"env_config: num_boxes={stated_boxes}, but initial_boxes holds {boxes}; drop num_boxes or correct it"
        )
