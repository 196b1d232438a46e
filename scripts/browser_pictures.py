"""Screenshots of the browser of episodes for the docs: `python scripts/browser_pictures.py`, with a headless Chromium.

They show the site of `kedro run --pipelines=browse_sokoban --params "browse_sokoban.runs=[seed2]"` after
`kedro run --pipelines=score_sokoban --params score_sokoban.occlusion=4` and `fork_sokoban`: of the scored episodes the
first solved one with an occlusion map, of the groups with solved and unsolved samples the one with the shortest
episodes, and of the unsolved episodes whose turns have values the one that lost most in a turn.
"""

from __future__ import annotations

import argparse
import base64
import io
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from PIL import Image

ROOT = Path(__file__).resolve().parents[1]
TASK = "sokoban"
WIDTH, COLOURS, LARGEST = 1100, 255, 300_000  # pixels, colours, bytes

# Address as an expression of the page, what must be there, the height of the picture, what is scrolled to.
PICTURES = {
    "list": ("href('list', {q: 'split:train success:no', by: 'tags'})", ".breakdown tbody tr", 760, "nav"),
    "episode": ("episodeLink(MAPPED, {channel: 'reliance', map: 'on'})", ".turn .mapped", 1130, "h1"),
    "worth": ("episodeLink(LOST, {channel: 'measured'})", ".turn .worth", 1130, "h1"),
    "group": ("groupLink(GROUP)", ".tree .parts", 1000, "h1"),
    "compare": ("href('compare', {task: cell('task_id', CHANGED)})", ".pair .frame", 820, "nav"),
}
# Rows of the list that the addresses name, all with a page.
ROWS = """(async () => {
  const numbers = Array.from({ length: rows }, (_, row) => row).filter((row) => cell("chunk", row) >= 0);
  const scored = numbers.filter((row) => cell("image_reliance", row) !== null);
  scored.sort((a, b) => cell("success", b) - cell("success", a) || a - b);
  let mapped = null;
  for (const row of scored) if (mapped === null && (await loadEpisode(row))?.maps) mapped = row;
  let lost = null, most = 0;
  for (const row of numbers.filter((row) => cell("split", row) === "train" && cell("success", row) === false)) {
    const found = await loadEpisode(row);
    const worst = found?.valued_by ? largestDrop(prepareEpisode(found)).worst : null;
    if (worst && worst.drop > most) [lost, most] = [row, worst.drop];
  }
  const groups = numbers.filter((row) => cell("split", row) === "train" && cell("sample_index", row) === 0);
  const spread = (row) => new Set(groupRows(row).map((one) => cell("answer", one))).size;
  const longest = (row) => Math.max(...groupRows(row).map((one) => cell("n_turns", one)));
  const mixed = (row) => new Set(groupRows(row).map((one) => cell("success", one))).size > 1;
  const told = groups.filter((row) => spread(row) > 2 && mixed(row));
  const group = told.reduce((best, row) => (longest(row) < longest(best) ? row : best), told[0]);
  const changed = shownTasks(comparedTasks(...chooseSides(listSides(), {})), "")[0];
  return { MAPPED: mapped, LOST: lost, GROUP: group ?? null, CHANGED: changed?.row ?? null };
})()"""


def main(words: Sequence[str] | None = None) -> int:
    """Take the screenshots and print their paths; 0, or 1 if there is no site."""
    sys.path.insert(0, str(ROOT / "tests"))
    from chromium import open_page
    from geo_sokoban_pipeline.reporting.notebook import open_catalog

    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--run-id", default="default")
    parser.add_argument("--env", help="configuration environment of Kedro")
    parser.add_argument("--only", nargs="+", choices=PICTURES, default=list(PICTURES))
    parser.add_argument("--folder", type=Path, default=ROOT / "docs" / "img")
    options = parser.parse_args(words)
    catalog = open_catalog(options.env, options.run_id, ROOT)
    if not catalog[f"browse_{TASK}.site"].exists():
        print(f"no site of {options.run_id}; make one: kedro run --pipelines=browse_{TASK}", file=sys.stderr)  # noqa: T201
        return 1
    with open_page() as page:
        page.open(catalog.load(f"browse_{TASK}.site").as_uri())
        page.wait("document.documentElement.dataset.ready")
        rows = page.run(ROWS)
        wanted = {name: PICTURES[name] for name in options.only}
        used = [name for name in rows if any(name in address for address, *_ in wanted.values())]
        if missing := [name for name in used if rows[name] is None]:
            print(f"the site has no {missing}", file=sys.stderr)  # noqa: T201
            return 1
        for name, (address, shown, height, top) in wanted.items():
            page.look(WIDTH, height)
            named = ", ".join(rows)
            page.follow(page.run(f"((({{ {named} }}) => {address})({json.dumps(rows)}))"))
            page.wait(f"document.querySelector({shown!r}) !== null && [...document.images].every(one => one.complete)")
            page.run("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")
            page.run(f"document.querySelector({top!r}).scrollIntoView()")
            page.run("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")
            path = options.folder / f"browser_{name}.png"
            path.write_bytes(reduce_colours(page))
            print(path)  # noqa: T201
    return 0


def reduce_colours(page: Any) -> bytes:
    """The page as a small PNG.

    Raises:
        ValueError: it has more than 300 kB.
    """
    shot = base64.b64decode(page.send("Page.captureScreenshot", {"format": "png"})["data"])
    buffer = io.BytesIO()
    with Image.open(io.BytesIO(shot)) as image:
        image.convert("RGB").quantize(COLOURS, dither=Image.Dither.NONE).save(buffer, "PNG", optimize=True)
    if len(buffer.getvalue()) > LARGEST:
        raise ValueError(f"a screenshot has {len(buffer.getvalue()):,} bytes, more than {LARGEST:,}")
    return buffer.getvalue()


if __name__ == "__main__":
    sys.exit(main())
