"""Images of the docs, drawn from runs in the data root: `python scripts/readme_pictures.py sokoban geo3k`.

The rule is the report's: of each optimal length, or family, the first held-out prompt that the final policy solved.
Sokoban is a film of the episodes. Geometry is a card per prompt: its image as the policy saw it, then the first
response of either policy, marked right or wrong, as a self-contained SVG file. Both depend on the episodes alone.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from textwrap import wrap
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from geo_sokoban_pipeline.reporting.training_episodes import PromptPair

ROOT = Path(__file__).resolve().parents[1]
SHOWN = {"sokoban": ("held_out_episodes.gif", 8), "geo3k": ("held_out_problems.svg", 5)}

# Pixels, but for the letters of a line and the lines of a response with its answer.
_CARD, _GAP, _IMAGE, _LINE, _LETTERS, _RESPONSE = 176, 10, 132, 17, 21, 3


def main(words: Sequence[str] | None = None) -> int:
    """Draw the chosen tasks' images and print their paths; 0, or 1 if a task has no finished run."""
    from geo_sokoban_pipeline.reporting.episodes import episodes_gif
    from geo_sokoban_pipeline.reporting.notebook import open_catalog
    from geo_sokoban_pipeline.reporting.training_episodes import choose_gallery

    options = _parse(words)
    catalog = open_catalog(options.env, options.run_id, ROOT)
    for task in options.tasks:
        episodes = catalog[f"train_{task}.held_out_trajectories"]
        pairs = choose_gallery(episodes.load(), 2, SHOWN[task][1]) if episodes.exists() else []
        if not pairs:
            way_out = f"train one: kedro run --pipelines=train_{task}"
            print(f"{task}: no evaluated run {options.run_id}; {way_out}", file=sys.stderr)  # noqa: T201
            return 1
        path = options.output / SHOWN[task][0]
        path.parent.mkdir(parents=True, exist_ok=True)
        films = task == "sokoban"
        path.write_bytes(episodes_gif([pair.after for pair in pairs]) if films else draw_responses(pairs).encode())
        print(path)  # noqa: T201
    return 0


def draw_responses(pairs: Sequence[PromptPair]) -> str:
    """SVG with one card per prompt in a row.

    Args:
        pairs: from `choose_gallery`.

    Raises:
        ValueError: there is no prompt, or one has no image.
    """
    from geo_sokoban_pipeline.envs.images import png_data_uri
    from geo_sokoban_pipeline.reporting.episodes import episode_frames
    from geo_sokoban_pipeline.reporting.pages import make_environment

    if not pairs:
        raise ValueError("no prompts to show: give the episodes of an evaluation, held_out_trajectories")
    cards = []
    for at, pair in enumerate(pairs):
        image = episode_frames(pair.after)[0].image
        if image is None:
            raise ValueError(f"{pair.after.trajectory_id}: the episode has no image")
        cards.append((_GAP + at * (_CARD + _GAP), png_data_uri(image), list(_write(pair))))
    size = {"width": _GAP + len(pairs) * (_CARD + _GAP), "height": _IMAGE + 2 * (_RESPONSE + 2) * _LINE + 2 * _GAP}
    template = make_environment().from_string((ROOT / "scripts/readme_cards.svg.j2").read_text(encoding="utf-8"))
    return str(template.render(cards=cards, card=_CARD, gap=_GAP, image_height=_IMAGE, **size)).strip() + "\n"


def _write(pair: PromptPair) -> Iterator[tuple[str, int, str]]:
    """Class, y and text of a card's lines: for each policy a heading, the response, and its answer."""
    from geo_sokoban_pipeline.reporting.episodes import episode_frames
    from geo_sokoban_pipeline.tasks import task_or_plain

    top = _IMAGE + 3 * _GAP
    for name, episode in (("after SFT", pair.before), ("after GRPO", pair.after)):
        if episode is not None:
            frame = episode_frames(episode)[0]
            # Of the first attempt; without the scoring tool there is only the answer.
            right = episode.metrics.get("first_attempt_correct", episode.metrics["success"]) == 1
            response = (frame.response or "").split("\\boxed", maxsplit=1)[0]
            texts = [("title", name), *(("", text) for text in _lines(response))]
            mark, action = "✓" if right else "✗", frame.action or task_or_plain(episode.task).report.no_action
            texts.append(("right" if right else "wrong", f"{mark} {action}"))
            yield from ((kind, top + at * _LINE, text) for at, (kind, text) in enumerate(texts))
        top += (_RESPONSE + 2) * _LINE


def _lines(text: str) -> list[str]:
    lines = [part for line in text.replace("<|im_end|>", "").splitlines() for part in wrap(line, _LETTERS)]
    return (
        lines if len(lines) <= _RESPONSE - 1 else [*lines[: _RESPONSE - 2], lines[_RESPONSE - 2][: _LETTERS - 1] + "…"]
    )


def _parse(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("tasks", nargs="+", choices=list(SHOWN), help="tasks whose run is shown")
    parser.add_argument("--run-id", default="default", help="run that is shown")
    parser.add_argument("--env", default=None, help="configuration environment of the run")
    parser.add_argument("--output", type=Path, default=ROOT / "docs" / "img", help="folder of the images")
    return parser.parse_args(words)


if __name__ == "__main__":
    raise SystemExit(main())
