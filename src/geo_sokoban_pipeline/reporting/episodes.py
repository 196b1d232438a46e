"""Boards read back from their pictures, to show what stored episodes leave out: the position after the last move.

An episode stores what the policy saw, so the solved board itself is on no stored picture. Our renderer draws every
cell from one of seven tiles, so such a picture names its board exactly; any other picture is simply not read.
"""

from __future__ import annotations

import io
import json
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from geo_sokoban_pipeline.envs.images import png_data_uri
from geo_sokoban_pipeline.envs.sokoban import Board, render
from geo_sokoban_pipeline.envs.sokoban.board import DIRECTIONS
from geo_sokoban_pipeline.envs.sokoban.drawing import MIN_CELL_PX, render_png
from geo_sokoban_pipeline.reporting.formats import number, plural, signed
from geo_sokoban_pipeline.reporting.run_worlds import RunWorld, run_world
from geo_sokoban_pipeline.rewards.math_answer.default import extract_answer
from geo_sokoban_pipeline.seeding import content_hash
from geo_sokoban_pipeline.trajectories.arrow import SOLVED
from geo_sokoban_pipeline.trajectories.types import Trajectory, Turn

_SAMPLES = ("#@ \n.$*", "+$$")  # together they hold all seven kinds of cell


def play_moves(png: bytes, actions: Iterable[str]) -> bytes | None:
    """Picture of a board after moves on it, which end where the board is solved.

    Args:
        png: picture of the board before.
        actions: up, down, left or right; blocked ones change nothing.

    Returns:
        PNG of the same size; None where the picture is no board of ours or an action no move.
    """
    found = read_board(png)
    if found is None:
        return None
    board, cell_px = found
    for action in actions:
        if action not in DIRECTIONS:
            return None
        board = board.move(action).board
        if board.is_solved:
            break
    return render_png(board, cell_px)


@lru_cache(maxsize=1024)
def read_board(png: bytes) -> tuple[Board, int] | None:
    """Board and cell size in pixels of a picture that our renderer drew; None for any other picture."""
    with Image.open(io.BytesIO(png)) as picture:
        pixels = np.asarray(picture.convert("RGB"))
    height, width = pixels.shape[:2]
    for cell_px in range(MIN_CELL_PX, min(height, width) // 3 + 1):
        if height % cell_px == 0 and width % cell_px == 0:
            codes = _read_cells(pixels, cell_px)
            if codes is not None:
                return Board.from_codes(height // cell_px, width // cell_px, codes), cell_px
    return None


def _read_cells(pixels: np.ndarray, cell_px: int) -> bytes | None:
    tiles = _tile_codes(cell_px)
    rows, columns = pixels.shape[0] // cell_px, pixels.shape[1] // cell_px
    cells = pixels.reshape(rows, cell_px, columns, cell_px, 3).swapaxes(1, 2)
    codes = [tiles.get(cells[row, column].tobytes()) for row in range(rows) for column in range(columns)]
    if None in codes or sum(code in (5, 6) for code in codes) != 1:
        return None
    return bytes(code for code in codes if code is not None)


@lru_cache(maxsize=16)
def _tile_codes(cell_px: int) -> dict[bytes, int]:
    """Code of each kind of cell by its pixels."""
    tiles: dict[bytes, int] = {}
    for sample in _SAMPLES:
        board = Board.from_text(sample)
        pixels = np.asarray(render(board, cell_px))
        for at, code in enumerate(board.codes()):
            row, column = divmod(at, board.width)
            cell = pixels[row * cell_px : (row + 1) * cell_px, column * cell_px : (column + 1) * cell_px]
            tiles[cell.tobytes()] = code
    return tiles


# Episodes as frames: what the policy saw, what it replied, what that earned.


@dataclass(frozen=True)
class Frame:
    """One moment of an episode.

    Attributes:
        picture: PNG that the policy saw last; None where there was none.
        observation: text of the user turn, `<image>` where pictures stood; empty on the last frame.
        reply: the model's text; None on the last frame.
        action: what the environment understood, or, of a problem, the answer in the box; None for nothing.
        reward: that the turn was trained on, else what the environment gave for it; advantage: of the turn; None where
            there is none.
    """

    picture: bytes | None
    observation: str = ""
    reply: str | None = None
    action: str | None = None
    reward: float | None = None
    advantage: float | None = None

    @property
    def is_end(self) -> bool:
        """Whether this frame shows the end, after the last reply."""
        return self.reply is None


def episode_frames(trajectory: Trajectory) -> list[Frame]:
    """Frames of an episode in order: one per reply, then the end.

    The end shows the last stored picture, or, where an episode of Sokoban stopped before another one was taken, the
    board as the last actions left it.
    """
    moves = run_world(trajectory.task).world == "sokoban"
    frames: list[Frame] = []
    picture: bytes | None = None
    observation = ""
    for turn in trajectory.turns:
        if turn.role == "assistant":
            action = turn.action if moves else turn.action or extract_answer(turn.text)
            frames.append(Frame(picture, observation, turn.text, action, turn_reward(turn), turn.advantage))
            observation = ""
        else:
            observation = turn.text
            picture = trajectory.images[turn.image_indices[-1]] if turn.image_indices else picture
    last = trajectory.turns[-1] if trajectory.turns else None
    if moves and last is not None and last.role == "assistant" and picture is not None:
        picture = play_moves(picture, read_actions(last)) or picture
    return [*frames, Frame(picture, observation)]


def turn_reward(turn: Turn) -> float | None:
    """What a turn was trained on where credit is per turn, else what the environment gave for it; None for nothing."""
    return turn.reward if turn.credit is None else turn.credit


def deadlock_turn(trajectory: Trajectory) -> int | None:
    """Turn after which a box could no longer reach a target, from 1; None where none did, or no picture shows it."""
    if trajectory.metrics.get("lost", 0.0) < SOLVED:
        return None
    for turn, frame in enumerate(episode_frames(trajectory)[1:], start=1):
        found = None if frame.picture is None else read_board(frame.picture)
        if found is not None and found[0].is_lost:
            return turn
    return None


def read_actions(turn: Turn) -> list[str]:
    """Actions of a reply as the environment parsed them."""
    return [action for action in (turn.action or "").split(",") if action]


def is_solved(trajectory: Trajectory) -> bool:
    """Whether the episode succeeded; one that does not know counts as not solved."""
    return trajectory.metrics.get("success", 0.0) >= SOLVED


def is_greedy(trajectory: Trajectory) -> bool:
    """Whether replies were the likeliest tokens, as `sampling` records it."""
    sampling: dict[str, Any] = json.loads(trajectory.sampling or "{}")
    return bool(sampling.get("greedy"))


def describe_end(trajectory: Trajectory) -> str:
    """How an episode ended, in a few words, with the label of a problem that was missed."""
    words = run_world(trajectory.task).words
    turns = sum(turn.role == "assistant" for turn in trajectory.turns)
    steps = trajectory.metrics.get("steps")
    effort = plural(turns, "turn")
    if steps is not None and int(steps) != turns:
        effort += f", {plural(int(steps), 'move')}"
    if is_solved(trajectory):
        return f"{words.solved.capitalize()} in {effort}."
    label = f" The label is {trajectory.label}." if trajectory.label is not None else ""
    if trajectory.metrics.get("lost", 0.0) >= SOLVED:
        turn = deadlock_turn(trajectory)
        return f"Deadlocked{'' if turn is None else f' at turn {turn}'}: {words.unsolved} after {effort}."
    if trajectory.status == "completed":
        return f"{words.unsolved.capitalize()} after {effort}.{label}"
    reason = f": {trajectory.error}" if trajectory.error else ""
    return f"{trajectory.status.capitalize()} after {effort}{reason}.{label}"


# Tokens of an episode, turn by turn: which were trained, how likely the policy thought them, what they were worth.


TokenTexts = Callable[[Sequence[int]], list[str]]


@dataclass(frozen=True)
class TokenPiece:
    """One token, or a run of image pads.

    Attributes:
        text: as the tokenizer writes it, line ends as ↵; the id where there is no tokenizer.
        token_id: of the token.
        length: tokens of the piece, above 1 only for image pads.
        is_image: whether it stands for a picture.
        is_trained: loss mask 1, which is: the policy wrote it.
        log_prob: under the sampling policy, nats; None where the mask is 0.
    """

    text: str
    token_id: int
    length: int
    is_image: bool
    is_trained: bool
    log_prob: float | None

    @property
    def probability(self) -> float | None:
        """Of the token, in [0, 1]; None where it was not sampled."""
        return None if self.log_prob is None else min(1.0, math.exp(self.log_prob))


@dataclass(frozen=True)
class TokenTurn:
    """Tokens of one turn; the advantage is the turn's own, or the episode's where credit is per episode."""

    role: str
    pieces: tuple[TokenPiece, ...]
    reward: float | None
    advantage: float | None


def token_turns(
    trajectory: Trajectory, image_pad_id: int | None = None, texts: TokenTexts | None = None
) -> list[TokenTurn]:
    """Tokens of all turns.

    Args:
        image_pad_id: from the table's `TableContext`; None shows pads like other tokens.
        texts: text of each id, see `read_token_texts`; None shows ids.
    """
    return [_turn(trajectory, turn, image_pad_id, texts) for turn in trajectory.turns]


def _turn(trajectory: Trajectory, turn: Turn, pad: int | None, texts: TokenTexts | None) -> TokenTurn:
    span = slice(turn.token_start, turn.token_end)
    ids = trajectory.token_ids[span].tolist()
    words = texts(ids) if texts else [str(token) for token in ids]
    rows = zip(
        ids, words, trajectory.loss_mask[span].tolist(), trajectory.rollout_log_probs[span].tolist(), strict=True
    )
    pieces: list[TokenPiece] = []
    for is_image, group in groupby(rows, key=lambda row: row[0] == pad):
        members = list(group)
        if is_image:
            pieces.append(TokenPiece("picture", members[0][0], len(members), True, False, None))
        else:
            pieces += [
                TokenPiece(text.replace("\n", "↵"), token, 1, False, mask == 1, log_prob if mask == 1 else None)
                for token, text, mask, log_prob in members
            ]
    own = turn.role == "assistant"
    advantage = trajectory.advantage if own and turn.advantage is None else turn.advantage
    return TokenTurn(turn.role, tuple(pieces), turn_reward(turn) if own else None, advantage)


def read_token_texts(folder: Path) -> TokenTexts:
    """Texts of token ids by the tokenizer of a policy folder; bytes that are no character alone are shown as �.

    Raises:
        FileNotFoundError: there is no `tokenizer.json` in the folder.
    """
    from tokenizers import Tokenizer

    path = folder / "tokenizer.json"
    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist; give the folder of a policy, such as final_policy.")
    tokenizer = Tokenizer.from_file(str(path))
    return lambda ids: [tokenizer.decode([token], skip_special_tokens=False) for token in ids]


# Episodes for the page's frame-by-frame players: pictures once each by content hash, texts as plain JSON strings.


_SHOWN_REPLY = 6000  # characters; longer replies are cut, with a note


@dataclass
class PlayerData:
    """Everything the page's script reads: `pictures` by key, `episodes` as lists of frames."""

    pictures: dict[str, str] = field(default_factory=dict)
    episodes: list[dict[str, Any]] = field(default_factory=list)

    def add(self, trajectory: Trajectory) -> int:
        """Add an episode.

        Returns:
            Its number, by which a player on the page names it.
        """
        frames = episode_frames(trajectory)
        replies = len(frames) - 1
        silent = run_world(trajectory.task).silent
        shown = [self._describe(frame, at + 1, replies, silent) for at, frame in enumerate(frames[:-1])]
        end = {"picture": self._add_picture(frames[-1].picture), "step": "end", "note": describe_end(trajectory)}
        self.episodes.append({"frames": [*shown, end], "solved": is_solved(trajectory)})
        return len(self.episodes) - 1

    def _describe(self, frame: Frame, number_of: int, replies: int, silent: str) -> dict[str, Any]:
        notes = [frame.action.replace(",", ", ") if frame.action else silent]
        if frame.reward is not None:
            notes.append(f"reward {signed(frame.reward)}")
        if frame.advantage is not None:
            notes.append(f"advantage {signed(frame.advantage)}")
        return {
            "picture": self._add_picture(frame.picture),
            "step": f"{number_of} of {replies}",
            "reply": shorten(frame.reply or ""),
            "note": " · ".join(notes),
        }

    def _add_picture(self, png: bytes | None) -> str | None:
        if png is None:
            return None
        key = content_hash(png)[:16]
        self.pictures.setdefault(key, png_data_uri(png))
        return key


def shorten(text: str, limit: int = _SHOWN_REPLY) -> str:
    """A text, cut after `limit` characters with the number of those left out."""
    left_out = len(text) - limit
    return text if left_out <= 0 else f"{text[:limit]}\n… {number(left_out, 0)} more characters"


# Episodes as animated GIFs, for notebooks and a README: boards that move, with the action below.


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
