"""How many pushes a lone box needs to each target, and which cells doom a box: facts about walls and targets alone.

Found by pulling a box away from each target, ignoring other boxes and the player's way round. Pushes counted so are
never more than a real solution needs, and a cell from which no target can be reached is dead in every position.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from geo_sokoban_pipeline.envs.sokoban.distance import INFINITE
from geo_sokoban_pipeline.envs.sokoban.layout import Layout, bits


@dataclass(frozen=True, eq=False)
class PushTable:
    """Push counts of a layout with targets.

    Attributes:
        pushes: by box index, the pushes to each target in row-major order, `INFINITE` where it cannot get there.
            Equal rows are one object: thousands of tables may be kept, and most rows of a table are equal.
        dead: mask of cells, walls included, from which a box reaches no target.
    """

    pushes: tuple[tuple[int, ...], ...]
    dead: int


@lru_cache(maxsize=4096)
def push_table(layout: Layout, target_mask: int) -> PushTable:
    """The push table of these walls and targets."""
    cells = (layout.height + 2) * layout.stride
    columns = [_pulls_from(layout, target, cells) for target in bits(target_mask)]
    shared: dict[tuple[int, ...], tuple[int, ...]] = {}
    rows = zip(*columns, strict=True) if columns else [()] * cells
    pushes = tuple(shared.setdefault(row, row) for row in rows)
    live = sum(1 << index for index, row in enumerate(pushes) if any(count < INFINITE for count in row))
    return PushTable(pushes, (1 << cells) - 1 & ~live)


def _pulls_from(layout: Layout, target: int, cells: int) -> list[int]:
    counts = [INFINITE] * cells
    if not layout.floor >> target & 1:
        return counts
    counts[target] = 0
    frontier = [target]
    while frontier:
        following = []
        for box in frontier:
            for delta in layout.deltas.values():
                source, player = box - delta, box - 2 * delta
                # The pusher stands one cell behind the box's source; outside the padding there is no cell at all.
                if (
                    player >= 0
                    and layout.floor >> source & 1
                    and layout.floor >> player & 1
                    and counts[source] == INFINITE
                ):
                    counts[source] = counts[box] + 1
                    following.append(source)
        frontier = following
    return counts


def frozen_boxes(box: int, boxes: int, solid: int, dead: int, stride: int) -> int:
    """Mask of boxes that can never move again because of the one at index `box`, itself included; 0 if it may move.

    A box is stuck along an axis where a wall or a stuck box touches it, or where both cells are dead. A box under
    examination counts as solid, so that boxes which hold each other are found.

    Args:
        box: index of the box in question.
        boxes: mask of all boxes.
        solid: mask of walls and of boxes under examination.
        dead: mask of dead cells.
        stride: index difference of vertical neighbours.
    """
    bit = 1 << box
    solid |= bit
    frozen = bit
    for step in (1, stride):
        low, high = bit >> step, bit << step
        if (low | high) & solid or (low & dead and high & dead):
            continue
        for side in (low, high):
            held = frozen_boxes(side.bit_length() - 1, boxes, solid, dead, stride) if side & boxes else 0
            if held:
                frozen |= held
                break
        else:
            return 0
    return frozen
