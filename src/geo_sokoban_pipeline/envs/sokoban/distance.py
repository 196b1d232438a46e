"""Distance of boxes from targets as sums of Manhattan distances: the seed's greedy rule, and the smallest matching.

Both are 0 where there is no box or no target, and equal for one box and one target; neither sees walls.
"""

from __future__ import annotations

from collections.abc import Sequence

Cell = tuple[int, int]

INFINITE = 1 << 30


def greedy_distance(boxes: Sequence[Cell], targets: Sequence[Cell]) -> int:
    """The seed's rule: each box in sorted order goes to its nearest remaining target.

    That target is then taken, while more than one remains. Ties go to the first target in row-major order.
    """
    if not boxes or not targets:
        return 0
    left, total = sorted(targets), 0
    for row, column in sorted(boxes):
        distances = [abs(row - r) + abs(column - c) for r, c in left]
        nearest = min(distances)
        total += nearest
        if len(left) > 1:
            del left[distances.index(nearest)]
    return total


def assignment_distance(boxes: Sequence[Cell], targets: Sequence[Cell]) -> int:
    """Smallest summed Manhattan distance over matchings; boxes beyond the number of targets are left out."""
    if not boxes or not targets:
        return 0
    rows, columns = (boxes, targets) if len(boxes) <= len(targets) else (targets, boxes)
    return smallest_matching([[abs(r - s) + abs(c - d) for s, d in columns] for r, c in rows])


def smallest_matching(costs: Sequence[Sequence[int]]) -> int:
    """Smallest sum that gives every row a column of its own; `INFINITE` or more where that needs an infinite entry.

    Hungarian method with potentials, cubic in the size. There must be at least as many columns as rows.
    """
    columns = len(costs[0])
    row_potential, potential = [0] * (len(costs) + 1), [0] * (columns + 1)
    owner = [0] * (columns + 1)  # row of each column, counted from 1; column 0 holds the row being placed
    for row in range(1, len(costs) + 1):
        owner[0], column = row, 0
        slack, source, used = [INFINITE * 4] * (columns + 1), [0] * (columns + 1), [False] * (columns + 1)
        while owner[column]:
            used[column] = True
            current, delta, following = owner[column], INFINITE * 4, 0
            line, lift = costs[current - 1], row_potential[current]
            for j in range(1, columns + 1):
                if used[j]:
                    continue
                reduced = line[j - 1] - lift - potential[j]
                if reduced < slack[j]:
                    slack[j], source[j] = reduced, column
                if slack[j] < delta:
                    delta, following = slack[j], j
            for j in range(columns + 1):
                if used[j]:
                    row_potential[owner[j]] += delta
                    potential[j] -= delta
                else:
                    slack[j] -= delta
            column = following
        while column:
            owner[column], column = owner[source[column]], source[column]
    return -potential[0]
