"""Showcase: what a policy replied to the same problems before and after GRPO, as an SVG file that stands alone.

A card per problem: its picture as the policy saw it, then the first reply of either policy, marked right or wrong. The
drawing depends on the episodes alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from textwrap import wrap

from markupsafe import Markup

from geo_sokoban_pipeline.envs.images import png_data_uri
from geo_sokoban_pipeline.reporting.episodes import Frame, episode_frames
from geo_sokoban_pipeline.reporting.training_episodes import LevelPair
from geo_sokoban_pipeline.trajectories.types import Trajectory

# Pixels, but for the letters of a line and the lines of a reply with its answer.
_CARD, _GAP, _PICTURE, _LINE, _LETTERS, _REPLY = 176, 10, 132, 17, 21, 3
_STYLE = """
.paper{fill:#fff;stroke:#dfe3e8}text{font:12px ui-monospace,'SF Mono',Menlo,Consolas,monospace;fill:#5b6472}
.title{font:600 13px system-ui,-apple-system,'Segoe UI',Roboto,sans-serif;fill:#1c2330}
.right{fill:#0e7a45;font-weight:600}.wrong{fill:#b0392e;font-weight:600}
@media (prefers-color-scheme:dark){.paper{fill:#14171c;stroke:#2e343d}text{fill:#9aa4b2}.title{fill:#e6e9ee}
.right{fill:#7fc069}.wrong{fill:#f08a7f}}
"""


def draw_replies(pairs: Sequence[LevelPair]) -> str:
    """SVG with one card per problem, side by side.

    Args:
        pairs: from `choose_gallery`.

    Raises:
        ValueError: there is no problem, or one has no picture.
    """
    if not pairs:
        raise ValueError("no problems to show: give the episodes of an evaluation, held_out_trajectories")
    cards = [_draw_card(pair, _GAP + at * (_CARD + _GAP)) for at, pair in enumerate(pairs)]
    width = _GAP + len(pairs) * (_CARD + _GAP)
    height = _card_height() + _GAP
    return str(
        Markup(
            '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {w} {h}" width="{w}" height="{h}">\n'
            "<style>{style}</style>\n{cards}\n</svg>\n"
        ).format(w=width, h=height, style=Markup(_STYLE), cards=Markup("\n").join(cards))
    )


def _draw_card(pair: LevelPair, left: int) -> Markup:
    picture = episode_frames(pair.after)[0].picture
    if picture is None:
        raise ValueError(f"{pair.after.trajectory_id}: the episode has no picture")
    lines = [
        Markup('<rect class="paper" x="{}" y="0.5" width="{}" height="{}" rx="6"/>').format(
            left, _CARD, _card_height()
        ),
        Markup('<image x="{}" y="{}" width="{}" height="{}" href="{}"/>').format(
            left + 1, _GAP, _CARD - 2, _PICTURE, png_data_uri(picture)
        ),
    ]
    top = _PICTURE + 3 * _GAP
    for name, played in (("after imitation", pair.before), ("after GRPO", pair.after)):
        if played is not None:
            lines += _write_reply(name, played, left + _GAP, top)
        top += (_REPLY + 2) * _LINE
    return Markup("").join(lines)


def _card_height() -> int:
    return _PICTURE + 2 * (_REPLY + 2) * _LINE + 2 * _GAP


def _write_reply(name: str, played: Trajectory, left: int, top: int) -> list[Markup]:
    """Heading, the reply in at most so many lines, and what it answered."""
    frame = episode_frames(played)[0]
    right = played.metrics.get("first_attempt_correct", played.metrics.get("success", 0.0)) >= 0.5
    texts = [("title", name), *(("", text) for text in _lines(frame))]
    texts.append(("right" if right else "wrong", f"{'✓' if right else '✗'} {frame.action or 'no answer'}"))
    return [
        Markup('<text class="{}" x="{}" y="{}">{}</text>').format(kind, left, top + at * _LINE, text)
        for at, (kind, text) in enumerate(texts)
    ]


def _lines(frame: Frame) -> list[str]:
    # The box is what the line below says.
    text = (frame.reply or "").split("\\boxed")[0].replace("<|im_end|>", "")
    lines = [part for line in text.splitlines() for part in wrap(line, _LETTERS)]
    return lines if len(lines) <= _REPLY - 1 else [*lines[: _REPLY - 2], lines[_REPLY - 2][: _LETTERS - 1] + "…"]
