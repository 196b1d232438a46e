"""Previews of catalog entries for kedro-viz: galleries of prompts and of episodes, the result of a run.

kedro-viz drops scripts from the HTML of a preview, and then reads it as Markdown, texts included. So a preview is one
line, its styles stand on its elements, and marks of Markdown in texts are replaced by characters that look like them:
what a policy has written shows as text, and never becomes a link.
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from markupsafe import Markup, escape
from PIL import Image

from geo_sokoban_pipeline.envs.images import encode_png, png_data_uri
from geo_sokoban_pipeline.formats import DASH, count, number, percent, percent_range, shorten, signed
from geo_sokoban_pipeline.reporting.episodes import describe_end, episode_frames
from geo_sokoban_pipeline.tasks import task_or_plain
from geo_sokoban_pipeline.trajectories.types import Trajectory, table_to_trajectories

if TYPE_CHECKING:
    import pyarrow as pa

_MARKS = str.maketrans({"*": "∗", "_": "ˍ", "`": "ˋ", "\n": " ", "\r": " "})
_LINK = ("](", "]\u200b(")  # parted by a character without width, they are no link
_TEXT, _FRAMES = 240, 8  # characters of a text, images of an episode
_SIDE = 240  # pixels of a stored image at most
_CARD = Markup(
    '<div style="flex:none;width:130px"><img alt="" src="{}" style="width:130px;image-rendering:pixelated">'
    '<div style="font-size:12px;overflow-wrap:anywhere">{}</div></div>'
)
_STRIP = Markup('<div style="display:flex;gap:10px;overflow-x:auto;margin:4px 0 16px">{}</div>')
_HEAD = Markup('<div style="font-size:13px"><b>{}</b> {}</div>')


def preview_episodes(table: pa.Table) -> str:
    """Episodes of a trajectory table as strips of their images, with actions, rewards and ends."""
    return _join(_episode(episode) for episode in table_to_trajectories(table)) or "no episodes"


def preview_prompts(rows: Sequence[Mapping[str, Any]]) -> str:
    """Prompts with their first images, texts and answers."""
    return str(_STRIP.format(_join(_prompt(row) for row in rows))) if rows else "no prompts"


def preview_result(summary: Mapping[str, Any]) -> str:
    """The result of a run as in its report: the headline, and a table of policies and baselines."""
    from geo_sokoban_pipeline.reporting.facts import describe_evaluated, write_headline
    from geo_sokoban_pipeline.reporting.report_tables import evaluation_rows

    headline = write_headline(summary)
    words = task_or_plain(summary.get("task")).words
    cell = Markup('<td style="padding:2px 12px 2px 0">{}</td>')
    lines = [("policy", words.solved, "95 % interval", "episodes", "mean reward")]
    for row in evaluation_rows(summary):
        rates = percent(row["solve_rate"]), percent_range(row["low"], row["high"])
        lines.append((row["label"], *rates, count(row["episodes"]), number(row["mean_return"])))
    table = _join(Markup("<tr>{}</tr>").format(_join(cell.format(_plain(text)) for text in line)) for line in lines)
    named = "; ".join(f"{name}: {value}" for name, value in describe_evaluated(summary))
    made = Markup("<div><b>{}</b></div><div>{}</div><table>{}</table>")
    return str(made.format(_plain(headline.main), _plain(named), table))


def _episode(episode: Trajectory) -> Markup:
    cards: list[Markup] = []
    for frame in episode_frames(episode):
        if frame.image is not None and len(cards) < _FRAMES:
            reward = "" if frame.reward is None else signed(frame.reward)
            text = describe_end(episode) if frame.is_end else f"{frame.action or frame.response or ''} {reward}"
            cards.append(_CARD.format(_thumbnail(frame.image), _plain(text)))
    reward = DASH if episode.reward is None else signed(episode.reward)
    head = _HEAD.format(_plain(episode.trajectory_id), _plain(f"reward {reward}; {describe_end(episode)}"))
    shown = cards or [Markup("<div>{}</div>").format(_plain(episode.response))]
    return head + _STRIP.format(_join(shown))


def _prompt(row: Mapping[str, Any]) -> Markup:
    text = str(row.get("prompt") or "").replace("<image>", " ").strip()
    answer = "" if row.get("answer") is None else f" → {row['answer']}"
    images = row.get("images")
    uri = "" if images is None or not len(images) else str(images[0])
    return _CARD.format(uri if uri.startswith("data:image/") else "", _plain(f"{row.get('id', '')} {text}{answer}"))


def _thumbnail(png: bytes) -> str:
    with Image.open(io.BytesIO(png)) as image:
        if max(image.size) <= _SIDE:
            return png_data_uri(png)
        small = image.convert("RGB")
        small.thumbnail((_SIDE, _SIDE))
    return png_data_uri(encode_png(np.asarray(small)))


def _plain(text: str) -> Markup:
    """A text that neither HTML nor Markdown changes."""
    return escape(shorten(str(text), _TEXT).translate(_MARKS).replace(*_LINK))


def _join(parts: Iterable[Markup]) -> Markup:
    return Markup("").join(parts)
