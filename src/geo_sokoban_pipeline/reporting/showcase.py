"""Showcase: responses to the same problems before and after GRPO, as a self-contained SVG file.

A card per problem: its image as the policy saw it, then the first response of either policy, marked right or wrong. The
drawing depends on the episodes alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from textwrap import wrap

from geo_sokoban_pipeline.envs.images import png_data_uri
from geo_sokoban_pipeline.reporting.episodes import Frame, episode_frames
from geo_sokoban_pipeline.reporting.report import make_environment
from geo_sokoban_pipeline.reporting.training_episodes import LevelPair

# Pixels, but for the letters of a line and the lines of a response with its answer.
_CARD, _GAP, _IMAGE, _LINE, _LETTERS, _RESPONSE = 176, 10, 132, 17, 21, 3


def draw_responses(pairs: Sequence[LevelPair]) -> str:
    """SVG with one card per problem in a row.

    Args:
        pairs: from `choose_gallery`.

    Raises:
        ValueError: there is no problem, or one has no image.
    """
    if not pairs:
        raise ValueError("no problems to show: give the episodes of an evaluation, held_out_trajectories")
    cards = []
    for at, pair in enumerate(pairs):
        image = episode_frames(pair.after)[0].image
        if image is None:
            raise ValueError(f"{pair.after.trajectory_id}: the episode has no image")
        cards.append((_GAP + at * (_CARD + _GAP), png_data_uri(image), list(_write(pair))))
    size = {"width": _GAP + len(pairs) * (_CARD + _GAP), "height": _IMAGE + 2 * (_RESPONSE + 2) * _LINE + 2 * _GAP}
    template = make_environment().get_template("showcase.svg.j2")
    return str(template.render(cards=cards, card=_CARD, gap=_GAP, image_height=_IMAGE, **size)).strip() + "\n"


def _write(pair: LevelPair) -> Iterator[tuple[str, int, str]]:
    """Class, y and text of a card's lines: for each policy a heading, the response, and its answer."""
    top = _IMAGE + 3 * _GAP
    for name, episode in (("after SFT", pair.before), ("after GRPO", pair.after)):
        if episode is not None:
            frame = episode_frames(episode)[0]
            right = episode.metrics.get("first_attempt_correct", episode.metrics.get("success", 0.0)) >= 0.5
            texts = [("title", name), *(("", text) for text in _lines(frame))]
            texts.append(("right" if right else "wrong", f"{'✓' if right else '✗'} {frame.action or 'no answer'}"))
            yield from ((kind, top + at * _LINE, text) for at, (kind, text) in enumerate(texts))
        top += (_RESPONSE + 2) * _LINE


def _lines(frame: Frame) -> list[str]:
    # The line below shows the content of the box.
    text = (frame.response or "").split("\\boxed")[0].replace("<|im_end|>", "")
    lines = [part for line in text.splitlines() for part in wrap(line, _LETTERS)]
    return (
        lines if len(lines) <= _RESPONSE - 1 else [*lines[: _RESPONSE - 2], lines[_RESPONSE - 2][: _LETTERS - 1] + "…"]
    )
