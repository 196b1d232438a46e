"""Two texts for one grid of cell codes, XSB and the symbols of the data set; parsing undoes printing.

XSB rows may end early, and blanks around the walls of a level are no part of it: both are read as wall. `-` and `_` are
always floor. Rows in the data set's symbols are all of one width.

Cell codes are the seed system's: 0 wall, 1 floor, 2 target, 3 box on target, 4 box, 5 player, 6 player on target.
"""

from __future__ import annotations

from collections.abc import Callable

WALL, FLOOR, TARGET, BOX_ON_TARGET, BOX, PLAYER, PLAYER_ON_TARGET = range(7)

XSB = "# .*$@+"
SYMBOLS = "#_O√XPS"

Place = tuple[int, int]  # row, column

_XSB_CODES = {symbol: code for code, symbol in enumerate(XSB)} | {"-": FLOOR, "_": FLOOR}
_SYMBOL_CODES = {symbol: code for code, symbol in enumerate(SYMBOLS)}
# Letters and signs that only one of the two texts uses decide which one it is; "#", "_" and blanks occur in both.
_ONLY_XSB = frozenset(".*$@+-")
_ONLY_SYMBOLS = frozenset("O√XPS\t")


def parse_codes(text: str) -> tuple[int, int, bytes]:
    """Height, width and row-major cell codes of a level given as XSB or in the data set's symbols.

    Blank lines before and after the grid are ignored. In XSB a space is floor within the walls and wall outside of
    them, and columns that hold nothing else are left out; in the data set's text blanks and tabs only separate.

    Raises:
        ValueError: empty grid, symbols of both texts or of neither, a blank row, rows of different width in the data
            set's symbols, not exactly one player.
    """
    lines = _grid_lines(text)
    used = set().union(*lines)
    if used & _ONLY_SYMBOLS and used & _ONLY_XSB:
        raise ValueError(
            f"level text mixes XSB {_show(used & _ONLY_XSB)} with the data set's symbols "
            f"{_show(used & _ONLY_SYMBOLS)}; write it in one of the two: {XSB!r} or {SYMBOLS!r}"
        )
    if used & _ONLY_SYMBOLS:
        rows = ["".join(line.split()) for line in lines]
        _check_symbols(rows, _SYMBOL_CODES)
        _check_widths(rows)
        grid = [[_SYMBOL_CODES[symbol] for symbol in row] for row in rows]
    else:
        _check_symbols(lines, _XSB_CODES)
        grid = _xsb_grid(lines)
    codes = bytes(code for row in grid for code in row)
    players = sum(code in (PLAYER, PLAYER_ON_TARGET) for code in codes)
    if players != 1:
        raise ValueError(
            f"level has {players or 'no'} player{'s' if players else ''}; it needs exactly one ('@', '+', 'P' or 'S')"
        )
    return len(grid), len(grid[0]), codes


def print_xsb(codes: bytes, width: int) -> str:
    """XSB text of row-major codes, rows joined by newlines; floor outside of the walls is written with `-`."""
    grid = [codes[at : at + width] for at in range(0, len(codes), width)]
    if not any(FLOOR in edge for edge in (grid[0], grid[-1], codes[::width], codes[width - 1 :: width])):
        return "\n".join("".join(XSB[code] for code in row) for row in grid)
    floor = {(r, c) for r, row in enumerate(grid) for c, code in enumerate(row) if code == FLOOR}
    explicit = _outside(floor, len(grid), width, lambda r, c: grid[r][c] == WALL)
    rows = [
        "".join("-" if (r, c) in explicit else XSB[code] for c, code in enumerate(row)) for r, row in enumerate(grid)
    ]
    # Only grids without a border have rows of floor alone; as spaces they would be read as blank lines.
    return "\n".join(row if row.strip() else "-" * width for row in rows)


def print_symbols(codes: bytes, width: int) -> str:
    """The data set's text: each symbol between blanks, cells joined by tabs, rows by newlines."""
    return "\n".join(
        "\t".join(f" {SYMBOLS[code]} " for code in codes[at : at + width]) for at in range(0, len(codes), width)
    )


def print_compact(codes: bytes, width: int) -> str:
    """The data set's symbols, cells side by side: the same grid in as few tokens as possible."""
    return "\n".join("".join(SYMBOLS[code] for code in codes[at : at + width]) for at in range(0, len(codes), width))


def _grid_lines(text: str) -> list[str]:
    # Not str.splitlines: it would also cut at form feeds and other rare separators, which are unknown symbols here.
    lines = text.replace("\r\n", "\n").replace("\r", "\n").split("\n")
    while lines and not lines[0].strip():
        del lines[0]
    while lines and not lines[-1].strip():
        del lines[-1]
    if not lines:
        raise ValueError(
            f"empty level text {text!r}; give one line per row, in XSB {XSB!r} or the data set's symbols {SYMBOLS!r}"
        )
    return lines


def _xsb_grid(lines: list[str]) -> list[list[int]]:
    """Codes of XSB rows, outside and the missing ends of rows as wall."""
    blank = next((number for number, line in enumerate(lines) if not line.strip()), None)
    if blank is not None:
        raise ValueError(f"row {blank} of the level is blank; write a row of nothing but floor as '-'")
    height, width = len(lines), max(map(len, lines))
    rows = [line.ljust(width, "\0") for line in lines]  # \0: the row has ended
    empty = {(r, c) for r, row in enumerate(rows) for c, symbol in enumerate(row) if symbol in " \0"}
    outside = _outside(empty, height, width, lambda r, c: rows[r][c] == "#")
    left = next(c for c in range(width) if any((r, c) not in outside for r in range(height)))
    right = next(c for c in reversed(range(width)) if any((r, c) not in outside for r in range(height)))

    def code(r: int, c: int) -> int:
        return WALL if rows[r][c] == "\0" or (r, c) in outside else _XSB_CODES[rows[r][c]]

    return [[code(r, c) for c in range(left, right + 1)] for r in range(height)]


def _outside(empty: set[Place], height: int, width: int, is_wall: Callable[[int, int], bool]) -> set[Place]:
    """Those of the empty cells that lead out of the grid over empty cells, and to nothing else but walls."""
    found: set[Place] = set()
    left = set(empty)
    for start in [(r, c) for r, c in empty if r in (0, height - 1) or c in (0, width - 1)]:
        if start not in left:
            continue
        left.discard(start)
        part, frontier, closed = {start}, [start], True
        while frontier:
            for place in _beside(*frontier.pop()):
                if place in left:
                    left.discard(place)
                    part.add(place)
                    frontier.append(place)
                elif place not in part and 0 <= place[0] < height and 0 <= place[1] < width:
                    closed = closed and is_wall(*place)
        if closed:
            found |= part
    return found


def _beside(row: int, column: int) -> tuple[Place, Place, Place, Place]:
    return (row - 1, column), (row + 1, column), (row, column - 1), (row, column + 1)


def _check_widths(rows: list[str]) -> None:
    width = len(rows[0])
    for number, row in enumerate(rows):
        if len(row) != width:
            raise ValueError(
                f"ragged level: row {number} has {len(row)} cells, row 0 has {width}; pad the rows with walls or floor"
            )


def _check_symbols(rows: list[str], table: dict[str, int]) -> None:
    for number, row in enumerate(rows):
        for column, symbol in enumerate(row):
            if symbol not in table:
                raise ValueError(
                    f"unknown symbol {symbol!r} in row {number}, column {column}; known are {''.join(table)!r}"
                )


def _show(symbols: set[str]) -> str:
    return repr("".join(sorted(symbols)))
