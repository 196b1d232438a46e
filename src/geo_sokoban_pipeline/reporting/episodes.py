"""Episodes for readers: frame by frame for the page, token by token, and as animated GIFs."""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

from PIL import Image, ImageDraw, ImageFont

from geo_sokoban_pipeline.envs.base import Task
from geo_sokoban_pipeline.envs.images import png_data_uri
from geo_sokoban_pipeline.formats import plural, shorten, signed
from geo_sokoban_pipeline.seeding import content_hash
from geo_sokoban_pipeline.tasks import task_or_plain
from geo_sokoban_pipeline.trajectories.arrow import SOLVED
from geo_sokoban_pipeline.trajectories.types import Trajectory, Turn

_PAPER, _INK, _GOOD, _BAD = (255, 255, 255), (40, 44, 52), (24, 128, 72), (176, 58, 46)
_GAP = 8  # pixels between images
TokenTexts = Callable[[Sequence[int]], list[str]]

# Episodes as frames: image, response, reward.


@dataclass(frozen=True)
class Frame:
    """One moment of an episode.

    Attributes:
        image: latest PNG of the observations; None if there was none.
        observation: text of the user turn, `<image>` where images stood; empty on the last frame.
        response: the model's text; None on the last frame.
        action: parsed action, as the task reads it; None for nothing.
        reward: credit of the turn in training, else the environment's reward for it; None: there is none.
        advantage: of the turn; None: there is none.
    """

    image: bytes | None
    observation: str = ""
    response: str | None = None
    action: str | None = None
    reward: float | None = None
    advantage: float | None = None

    @property
    def is_end(self) -> bool:
        """Whether this frame shows the end, after the last response."""
        return self.response is None


def episode_frames(trajectory: Trajectory) -> list[Frame]:
    """Frames of an episode in order: one per response, then the end.

    The end shows the state after the last actions if the task can draw it, else the last stored image.
    """
    report = task_or_plain(trajectory.task).report
    frames: list[Frame] = []
    image, observation = None, ""
    for turn in trajectory.turns:
        if turn.role == "assistant":
            action = report.read_action(turn)
            frames.append(Frame(image, observation, turn.text, action, turn_reward(turn), turn.advantage))
            observation = ""
        else:
            observation = turn.text
            image = trajectory.images[turn.image_indices[-1]] if turn.image_indices else image
    if image is not None and trajectory.turns and trajectory.turns[-1].role == "assistant":
        image = report.last_image(image, trajectory.turns[-1]) or image
    return [*frames, Frame(image, observation)]


def turn_reward(turn: Turn) -> float | None:
    """Credit of a turn if credit is per turn, else the environment's reward for it; None if there is neither."""
    return turn.reward if turn.credit is None else turn.credit


def lost_turn(trajectory: Trajectory) -> int | None:
    """Turn after which the prompt could no longer be solved, from 1; None if there is none, or no image shows it."""
    if trajectory.metrics.get("lost", 0.0) < SOLVED:
        return None
    report = task_or_plain(trajectory.task).report
    frames = enumerate(episode_frames(trajectory)[1:], start=1)
    return next((turn for turn, frame in frames if frame.image and report.is_lost(frame.image)), None)


def is_solved(trajectory: Trajectory) -> bool:
    """Whether the episode succeeded; one without the metric counts as not solved."""
    return trajectory.metrics.get("success", 0.0) >= SOLVED


def describe_end(trajectory: Trajectory) -> str:
    """Result of an episode in a few words, with the label of a prompt that was not solved."""
    task = task_or_plain(trajectory.task)
    words, report = task.words, task.report
    turns = sum(turn.role == "assistant" for turn in trajectory.turns)
    effort = plural(turns, "turn")
    if (steps := int(trajectory.metrics.get("steps", turns))) != turns:
        effort += f", {plural(steps, report.step)}"
    if is_solved(trajectory):
        return f"{words.solved.capitalize()} in {effort}."
    label = f" The label is {trajectory.label}." if trajectory.label is not None else ""
    if trajectory.metrics.get("lost", 0.0) >= SOLVED:
        at = "" if (turn := lost_turn(trajectory)) is None else f" at turn {turn}"
        return f"{report.lost.capitalize()}{at}: {words.unsolved} after {effort}."
    if trajectory.status == "completed":
        return f"{words.unsolved.capitalize()} after {effort}.{label}"
    reason = f": {trajectory.error}" if trajectory.error else ""
    return f"{trajectory.status.capitalize()} after {effort}{reason}.{label}"


# Tokens of an episode, turn by turn: loss mask, probability, advantage.


@dataclass(frozen=True)
class TokenPiece:
    """One token, or a run of image pads.

    Attributes:
        text: decoded, line ends as ↵; the id if there is no tokenizer.
        token_id: of the token.
        length: tokens of the piece, above 1 only for image pads.
        is_image: whether it stands for an image.
        is_trained: loss mask 1, so the policy sampled it.
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
        """Of the token, in [0, 1]; None if it was not sampled."""
        return None if self.log_prob is None else min(1.0, math.exp(self.log_prob))


@dataclass(frozen=True)
class TokenTurn:
    """Tokens of one turn; the advantage is the turn's, or the episode's if credit is per episode."""

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
            pieces.append(TokenPiece("image", members[0][0], len(members), True, False, None))
        else:
            pieces += [
                TokenPiece(text.replace("\n", "↵"), token, 1, False, mask == 1, log_prob if mask == 1 else None)
                for token, text, mask, log_prob in members
            ]
    own = turn.role == "assistant"
    advantage = trajectory.advantage if own and turn.advantage is None else turn.advantage
    return TokenTurn(turn.role, tuple(pieces), turn_reward(turn) if own else None, advantage)


def read_token_texts(folder: Path) -> TokenTexts:
    """Texts of token ids by the tokenizer of a policy folder; incomplete characters are shown as �.

    Raises:
        FileNotFoundError: there is no `tokenizer.json` in the folder.
    """
    from tokenizers import Tokenizer

    if not (path := folder / "tokenizer.json").is_file():
        raise FileNotFoundError(f"{path} does not exist; give the folder of a policy, such as final_policy.")
    tokenizer = Tokenizer.from_file(str(path))
    return lambda ids: [tokenizer.decode([token], skip_special_tokens=False) for token in ids]


# Episodes for the page's script: each image once, by content hash; texts as JSON strings.


@dataclass
class PlayerData:
    """Data of the page's script: `images` by key, `episodes` as lists of frames; their `numbers` by trajectory id."""

    images: dict[str, str] = field(default_factory=dict)
    episodes: list[dict[str, Any]] = field(default_factory=list)
    numbers: dict[str, int] = field(default_factory=dict)

    def add(self, trajectory: Trajectory, end: str, solved: bool) -> None:
        """Add an episode, with its result in words."""
        frames = episode_frames(trajectory)
        silent = task_or_plain(trajectory.task).report.no_action
        shown = [self._describe(frame, at + 1, len(frames) - 1, silent) for at, frame in enumerate(frames[:-1])]
        last = {"image": self._add_image(frames[-1].image), "step": "end", "note": end}
        self.numbers[trajectory.trajectory_id] = len(self.episodes)
        self.episodes.append({"frames": [*shown, last], "solved": solved})

    def _describe(self, frame: Frame, number_of: int, responses: int, silent: str) -> dict[str, Any]:
        values = {"reward": frame.reward, "advantage": frame.advantage}
        known = [f"{name} {signed(value)}" for name, value in values.items() if value is not None]
        return {
            "image": self._add_image(frame.image),
            "step": f"{number_of} of {responses}",
            "response": shorten(frame.response or ""),
            "note": " · ".join([frame.action.replace(",", ", ") if frame.action else silent, *known]),
        }

    def _add_image(self, png: bytes | None) -> str | None:
        if png is None:
            return None
        key = content_hash(png)[:16]
        self.images.setdefault(key, png_data_uri(png))
        return key


# Episodes as animated GIFs for notebooks and the README: images with the action below.


def episodes_gif(
    trajectories: Sequence[Trajectory], *, columns: int = 4, board_px: int = 160, seconds: float = 0.7
) -> bytes:
    """Animated GIF of several episodes side by side; short ones show their end until the longest is over.

    Args:
        columns: episodes in a row.
        board_px: longer side of an image in pixels, without the line of text.
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
    solved, task = is_solved(trajectory), task_or_plain(trajectory.task)
    frames = enumerate(episode_frames(trajectory), start=1)
    return [_draw_frame(frame, number, board_px, solved, task) for number, frame in frames]


def _draw_frame(frame: Frame, number: int, board_px: int, solved: bool, task: Task) -> Image.Image:
    image = _enlarge(frame.image, board_px)
    line = max(16, board_px // 10)
    sheet = Image.new("RGB", (image.width, image.height + line + 6), _PAPER)
    sheet.paste(image, (0, 0))
    text, colour = f"{number}  {(frame.action or task.report.no_action).replace(',', ', ')}", _INK
    if frame.is_end:
        text, colour = (task.words.solved, _GOOD) if solved else (task.words.unsolved, _BAD)
    font = ImageFont.load_default(size=line * 0.8)
    ImageDraw.Draw(sheet).text((image.width / 2, image.height + 3), text, fill=colour, font=font, anchor="ma")
    return sheet


def _enlarge(png: bytes | None, board_px: int) -> Image.Image:
    if png is None:
        return Image.new("RGB", (board_px, board_px), _PAPER)
    with Image.open(io.BytesIO(png)) as opened:
        factor = board_px / max(opened.size)
        size = (max(1, round(opened.width * factor)), max(1, round(opened.height * factor)))
        # Cells keep hard edges when they grow; when they shrink, averaging keeps thin lines visible.
        return opened.convert("RGB").resize(size, Image.Resampling.NEAREST if factor >= 1 else Image.Resampling.BOX)


def _lay_out(frames: Sequence[Image.Image], columns: int) -> Image.Image:
    columns = min(columns, len(frames))
    rows = -(-len(frames) // columns)
    width, height = max(frame.width for frame in frames), max(frame.height for frame in frames)
    sheet = Image.new("RGB", (columns * (width + _GAP) + _GAP, rows * (height + _GAP) + _GAP), _PAPER)
    for at, frame in enumerate(frames):
        row, column = divmod(at, columns)
        sheet.paste(frame, (_GAP + column * (width + _GAP), _GAP + row * (height + _GAP)))
    return sheet
