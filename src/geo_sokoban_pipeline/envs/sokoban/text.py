"""Two texts for one grid of cell codes, XSB and the symbols of the data set; parsing undoes printing.

Cell codes are the seed system's: 0 wall, 1 floor, 2 target, 3 box on target, 4 box, 5 player, 6 player on target.
"""

from __future__ import annotations

WALL, FLOOR, TARGET, BOX_ON_TARGET, BOX, PLAYER, PLAYER_ON_TARGET = range(7)

XSB = "# .*$@+"
SYMBOLS = "#_O√XPS"

_XSB_CODES = {symbol: code for code, symbol in enumerate(XSB)} | {"-": FLOOR, "_": FLOOR}
_SYMBOL_CODES = {symbol: code for code, symbol in enumerate(SYMBOLS)}
# Letters and signs that only one of the two texts uses decide which one it is; "#", "_" and blanks occur in both.
_ONLY_XSB = frozenset(".*$@+-")
_ONLY_SYMBOLS = frozenset("O√XPS\t")


def parse_codes(text: str) -> tuple[int, int, bytes]:
    """Height, width and row-major cell codes of a level given as XSB or in the data set's symbols.

    Blank lines before and after the grid are ignored. In XSB a space is floor; in the data set's text blanks and tabs
    only separate.

    Raises:
        ValueError: empty grid, symbols of both texts or of neither, rows of different width, not exactly one player.
    """
    lines = _grid_lines(text)
    used = set().union(*lines)
    if used & _ONLY_SYMBOLS and used & _ONLY_XSB:
        raise ValueError(
            f"level text mixes XSB {_show(used & _ONLY_XSB)} with the data set's symbols "
            f"{_show(used & _ONLY_SYMBOLS)}; write it in one of the two: {XSB!r} or {SYMBOLS!r}"
        )
    if used & _ONLY_SYMBOLS:
        table, rows = _SYMBOL_CODES, ["".join(line.split()) for line in lines]
    else:
        table, rows = _XSB_CODES, lines
    _check_symbols(rows, table)
    widths = [len(row) for row in rows]
    if len(set(widths)) > 1:
        row = next(i for i, width in enumerate(widths) if width != widths[0])
        raise ValueError(
            f"ragged level: row {row} has {widths[row]} cells, row 0 has {widths[0]}; pad the rows with walls or floor"
        )
    codes = bytes(table[symbol] for row in rows for symbol in row)
    players = sum(code in (PLAYER, PLAYER_ON_TARGET) for code in codes)
    if players != 1:
        raise ValueError(
            f"level has {players or 'no'} player{'s' if players else ''}; it needs exactly one ('@', '+', 'P' or 'S')"
        )
    return len(rows), widths[0], codes


def print_xsb(codes: bytes, width: int) -> str:
    """XSB text of row-major codes, rows joined by newlines; a row of nothing but floor is written with `-`."""
    rows = ["".join(XSB[code] for code in codes[at : at + width]) for at in range(0, len(codes), width)]
    # Only grids without a border have such rows; as spaces they would be read as blank lines around the level.
    return "\n".join(row if row.strip() else "-" * width for row in rows)


def print_symbols(codes: bytes, width: int) -> str:
    """The data set's text: each symbol between blanks, cells joined by tabs, rows by newlines."""
    return "\n".join(
        "\t".join(f" {SYMBOLS[code]} " for code in codes[at : at + width]) for at in range(0, len(codes), width)
    )


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


def _check_symbols(rows: list[str], table: dict[str, int]) -> None:
    for number, row in enumerate(rows):
        for column, symbol in enumerate(row):
            if symbol not in table:
                raise ValueError(
                    f"unknown symbol {symbol!r} in row {number}, column {column}; known are {''.join(table)!r}"
                )


def _show(symbols: set[str]) -> str:
    return repr("".join(sorted(symbols)))
