"""Every solvable position of a layout with its fewest moves, by playing backwards from the solved positions.

Reverse steps are exact: the player steps back, and may pull the box it has just pushed. A breadth-first search that
starts from all solved positions at once therefore meets each position first at its fewest moves, so no level needs a
solver to be verified.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import lru_cache
from itertools import combinations, islice
from math import comb

from geo_sokoban_pipeline.envs.sokoban.board import Board
from geo_sokoban_pipeline.envs.sokoban.layout import Layout, bits
from geo_sokoban_pipeline.envs.sokoban.symmetry import canonical_bytes

MAX_ENUMERATED_WALLS = 100_000

State = tuple[int, int]  # mask of boxes, index of the player


def distance_layers(layout: Layout, target_mask: int, max_moves: int | None = None) -> Iterator[list[State]]:
    """Positions with as many boxes as targets: layer d holds exactly those that need d moves, layer 0 the solved.

    Args:
        layout: the walls.
        target_mask: mask of the targets, all on floor.
        max_moves: last layer; None goes on until no new position is found.

    Yields:
        Lists of (mask of boxes, index of the player), in the same order in every process.
    """
    floor = layout.floor
    deltas = tuple(layout.deltas.values())
    layer = [(target_mask, player) for player in bits(floor & ~target_mask)]
    seen = set(layer)
    depth = 0
    while layer:
        yield layer
        if depth == max_moves:
            return
        depth += 1
        following: list[State] = []
        for state in layer:
            boxes, player = state
            free = floor & ~boxes
            for delta in deltas:
                back = player - delta
                if not free >> back & 1:
                    continue
                walked = (boxes, back)
                if walked not in seen:
                    seen.add(walked)
                    following.append(walked)
                if boxes >> (player + delta) & 1:
                    pulled = (boxes ^ 1 << player + delta ^ 1 << player, back)
                    if pulled not in seen:
                        seen.add(pulled)
                        following.append(pulled)
        layer = following


def levels_of_layout(
    layout: Layout | Board, boxes: int = 1, min_solution: int = 1, max_solution: int | None = None
) -> Iterator[tuple[Board, int]]:
    """Every level on these walls with `boxes` boxes and targets, each with its fewest moves.

    Levels come by target positions, then by length. Mirror images of one level occur where the walls are symmetric.
    The number grows as floor cells to the power of 2 · boxes + 1: meant for one box, or two on small grids.

    Args:
        layout: walls; of a board only the walls are used.
        boxes: number of boxes, which is also the number of targets.
        min_solution: fewest moves wanted at least.
        max_solution: fewest moves wanted at most; None: no limit.
    """
    walls = layout.layout if isinstance(layout, Board) else layout
    for cells in combinations(bits(walls.floor), boxes):
        targets = sum(1 << cell for cell in cells)
        layers = distance_layers(walls, targets, max_solution)
        for length, layer in islice(enumerate(layers), min_solution, None):
            for box_mask, player in layer:
                yield Board(walls, targets, box_mask, player), length


def default_inner_walls(height: int, width: int) -> tuple[int, int]:
    """Fewest and most walls inside the border by default: 1 to a quarter of the inner cells, 1 to 4 for 6×6."""
    quarter = (height - 2) * (width - 2) // 4
    return min(1, quarter), quarter


def count_wall_choices(height: int, width: int, inner_walls: tuple[int, int]) -> int:
    """In how many ways that many walls can be placed inside the border, symmetric ones counted apart."""
    inner = (height - 2) * (width - 2)
    return sum(comb(inner, walls) for walls in range(inner_walls[0], inner_walls[1] + 1))


def bordered_layout(height: int, width: int, inner: Iterable[int]) -> Layout:
    """Layout with a closed border and the given inner cells (row-major numbers within the border) as walls."""
    border, inner_bits = _border_and_inner_bits(height, width)
    return Layout.of(height, width, border | sum(inner_bits[at] for at in inner))


@lru_cache(maxsize=256)
def _border_and_inner_bits(height: int, width: int) -> tuple[int, tuple[int, ...]]:
    inner = [(row, column) for row in range(1, height - 1) for column in range(1, width - 1)]
    border = {(row, column) for row in range(height) for column in range(width)} - set(inner)
    frame = Layout.from_walls(height, width, border)
    return frame.walls, tuple(1 << frame.index(cell) for cell in inner)


def enumerate_layouts(height: int, width: int, inner_walls: tuple[int, int] | None = None) -> list[Layout]:
    """Distinct wall layouts with a closed border and connected floor, one per class of the eight symmetries.

    Args:
        height: rows, border included.
        width: columns, border included.
        inner_walls: fewest and most walls inside the border; None: `default_inner_walls`.

    Returns:
        Layouts by number of inner walls, in the same order in every process; 258 for 6×6 with 1 to 4.

    Raises:
        ValueError: more than `MAX_ENUMERATED_WALLS` placements would have to be looked at.
    """
    low, high = inner_walls or default_inner_walls(height, width)
    choices = count_wall_choices(height, width, (low, high))
    if choices > MAX_ENUMERATED_WALLS:
        raise ValueError(
            f"inner_walls=({low}, {high}): a {height}×{width} grid has {choices:,} such placements, more than "
            f"{MAX_ENUMERATED_WALLS:,}; lower the walls or the size, or draw layouts at random with generate_levels"
        )
    seen: set[tuple[bytes, bytes]] = set()
    layouts = []
    for walls in range(low, high + 1):
        for inner in combinations(range((height - 2) * (width - 2)), walls):
            layout = bordered_layout(height, width, inner)
            key = canonical_bytes(layout.codes, height, width)
            if key not in seen:
                seen.add(key)
                if layout.is_connected:
                    layouts.append(layout)
    return layouts
