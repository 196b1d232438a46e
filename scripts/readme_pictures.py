"""The README's images, drawn from runs in the data root: `python scripts/readme_pictures.py sokoban geo3k`.

The rule is the report's: of each optimal length, or family, the first held-out prompt that the final policy solved.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SHOWN = {"sokoban": ("held_out_episodes.gif", 8), "geo3k": ("held_out_problems.svg", 5)}


def main(words: Sequence[str] | None = None) -> int:
    """Draw the chosen tasks' images and print their paths; 0, or 1 if a task has no finished run."""
    from geo_sokoban_pipeline.reporting.episodes import episodes_gif
    from geo_sokoban_pipeline.reporting.notebook import open_catalog
    from geo_sokoban_pipeline.reporting.showcase import draw_responses
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


def _parse(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("tasks", nargs="+", choices=list(SHOWN), help="tasks whose run is shown")
    parser.add_argument("--run-id", default="default", help="run that is shown")
    parser.add_argument("--env", default=None, help="configuration environment of the run")
    parser.add_argument("--output", type=Path, default=ROOT / "docs" / "img", help="folder of the images")
    return parser.parse_args(words)


if __name__ == "__main__":
    raise SystemExit(main())
