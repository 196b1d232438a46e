"""Episodes as animated GIFs, for notebooks and a README: boards that move, with the action below.

A film depends on the episodes and the settings alone, so a picture that is made again does not change.
"""

from __future__ import annotations

import io
from collections.abc import Sequence

from PIL import Image, ImageDraw, ImageFont

from geo_sokoban_pipeline.reporting.episodes import Frame, episode_frames, is_solved
from geo_sokoban_pipeline.reporting.run_worlds import RunWorld, run_world
from geo_sokoban_pipeline.trajectories import Trajectory

_PAPER, _INK, _GOOD, _BAD = (255, 255, 255), (40, 44, 52), (24, 128, 72), (176, 58, 46)
_GAP = 8  # pixels between boards


def episode_gif(trajectory: Trajectory, *, board_px: int = 240, seconds: float = 0.7) -> bytes:
    """Animated GIF of one episode.

    Args:
        board_px: longer side of the picture in pixels, without the line of text.
        seconds: how long a frame stays; the end stays three times as long.
    """
    return episodes_gif([trajectory], columns=1, board_px=board_px, seconds=seconds)


def episodes_gif(
    trajectories: Sequence[Trajectory], *, columns: int = 4, board_px: int = 160, seconds: float = 0.7
) -> bytes:
    """Animated GIF of several episodes side by side; those that are over wait for the longest.

    Args:
        columns: episodes in a row.
        board_px: longer side of a picture in pixels, without the line of text.
        seconds: how long a frame stays; the end stays three times as long.

    Raises:
        ValueError: there is no episode, or columns or board_px is not positive.
    """
    if not trajectories or columns < 1 or board_px < 1:
        raise ValueError(f"{len(trajectories)} episodes, columns={columns}, board_px={board_px}: all must be positive")
    films = [_draw_film(trajectory, board_px) for trajectory in trajectories]
    length = max(len(film) for film in films)
    sheets = [_lay_out([film[min(at, len(film) - 1)] for film in films], columns) for at in range(length)]
    palette = [sheet.quantize(64, dither=Image.Dither.NONE) for sheet in sheets]
    times = [round(seconds * 1000)] * (length - 1) + [round(seconds * 3000)]
    buffer = io.BytesIO()
    palette[0].save(
        buffer, "GIF", save_all=True, append_images=palette[1:], duration=times, loop=0, disposal=1, optimize=False
    )
    return buffer.getvalue()


def _draw_film(trajectory: Trajectory, board_px: int) -> list[Image.Image]:
    frames = episode_frames(trajectory)
    solved = is_solved(trajectory)
    world = run_world(trajectory.task)
    return [_draw_frame(frame, number, board_px, solved, world) for number, frame in enumerate(frames, start=1)]


def _draw_frame(frame: Frame, number: int, board_px: int, solved: bool, world: RunWorld) -> Image.Image:
    board = _enlarge(frame.picture, board_px)
    line = max(16, board_px // 10)
    sheet = Image.new("RGB", (board.width, board.height + line + 6), _PAPER)
    sheet.paste(board, (0, 0))
    colour = _INK
    silent = "no move" if world.world == "sokoban" else world.silent
    text = f"{number}  {(frame.action or silent).replace(',', ', ')}"
    if frame.is_end:
        text, colour = (world.words.solved, _GOOD) if solved else (world.words.unsolved, _BAD)
    font = ImageFont.load_default(size=line * 0.8)
    ImageDraw.Draw(sheet).text((board.width / 2, board.height + 3), text, fill=colour, font=font, anchor="ma")
    return sheet


def _enlarge(png: bytes | None, board_px: int) -> Image.Image:
    if png is None:
        return Image.new("RGB", (board_px, board_px), _PAPER)
    with Image.open(io.BytesIO(png)) as picture:
        factor = board_px / max(picture.size)
        size = (max(1, round(picture.width * factor)), max(1, round(picture.height * factor)))
        # Cells keep hard edges when they grow; when they shrink, averaging keeps thin lines visible.
        method = Image.Resampling.NEAREST if factor >= 1 else Image.Resampling.BOX
        return picture.convert("RGB").resize(size, method)


def _lay_out(frames: Sequence[Image.Image], columns: int) -> Image.Image:
    columns = min(columns, len(frames))
    rows = -(-len(frames) // columns)
    width, height = max(frame.width for frame in frames), max(frame.height for frame in frames)
    sheet = Image.new("RGB", (columns * (width + _GAP) + _GAP, rows * (height + _GAP) + _GAP), _PAPER)
    for at, frame in enumerate(frames):
        row, column = divmod(at, columns)
        sheet.paste(frame, (_GAP + column * (width + _GAP), _GAP + row * (height + _GAP)))
    return sheet
