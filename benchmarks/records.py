"""Results of the benchmarks: JSON in `docs/results`, and text between markers of the docs, made from it alone.

Both are written only where it is asked for: `make bench BENCH_DOCS=1`, likewise `make bench-memory`,
`make bench-backends` and `make bench-peer`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.peer import report as peer
from benchmarks.tables import (
    draw_backends,
    draw_scaling,
    render_ahead,
    render_audit,
    render_backends,
    render_browser,
    render_engine,
    render_index,
    render_maker,
    render_memory,
    render_notebook,
    render_plan,
    render_ranks,
    render_scaling,
    render_speed,
    render_weights,
    render_workers,
    render_writing,
)

from geo_sokoban_pipeline.reporting.study_docs import replace_section
from geo_sokoban_pipeline.runs.provenance import describe_maker

ROOT = Path(__file__).parents[1]
Found = dict[str, Any]
RENDERERS: dict[str, Callable[[Found], str]] = {
    "peer": peer.render_docs,
    "scaling": render_scaling,
    "ranks": render_ranks,
    "writing": render_writing,
    "memory": render_memory,
    "engine": render_engine,
    "browser": render_browser,
    "index": render_index,
    "audit": render_audit,
    "notebook": render_notebook,
    "plan": render_plan,
    "weights": render_weights,
    "workers": render_workers,
    "ahead": render_ahead,
    "backends": render_backends,
}
FIGURES = {"scaling": draw_scaling, "backends": draw_backends}


def keep(name: str, found: Found, root: Path = ROOT) -> None:
    """Print the results of a benchmark; write them and their docs, if `BENCH_DOCS=1` is set."""
    print(f"\n{RENDERERS[name](found)}")
    if os.environ.get("BENCH_DOCS") != "1":
        return
    write_json(root / "docs" / "results" / f"bench_{name}.json", add_maker(found, root))
    for place, text in shown_texts(root).items():
        place.write_text(text, encoding="utf-8")


def add_maker(found: Found, root: Path) -> Found:
    """The results with `made_with`: versions, commit (`…+` where program or benchmarks differ), machine."""
    return {"made_with": describe_maker(root, benchmarks=True), **found}


def shown_texts(root: Path) -> dict[Path, str]:
    """The files of the docs with benchmarks, made from the stored results."""
    page, readme = root / "docs/benchmarks.md", root / "README.md"
    stored = {name: _read(root, name) for name in RENDERERS}
    text = page.read_text(encoding="utf-8")
    for name, found in stored.items():
        shown = f"{RENDERERS[name](found)}\n\n{render_maker(found)}" if found else ""
        text = replace_section(text, f"bench:{name}", shown, page)
    front = replace_section(readme.read_text(encoding="utf-8"), "readme:speed", render_speed(stored), readme)
    drawn = {root / f"docs/img/{name}.svg": draw(found) for name, draw in FIGURES.items() if (found := stored[name])}
    return {page: text, readme: front, **drawn}


def write_json(path: Path, value: Found) -> None:
    """Write results, readable by people too."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")


def _read(root: Path, name: str) -> Found | None:
    path = root / "docs" / "results" / f"bench_{name}.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None
