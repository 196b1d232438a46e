"""The docs of a study: results, figure and tables, written from one JSON value; prose around the markers stays."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from geo_sokoban_pipeline.reporting.markers import read_section, replace_section
from geo_sokoban_pipeline.reporting.study_figure import draw_study
from geo_sokoban_pipeline.reporting.study_readme import render_readme, render_readme_line
from geo_sokoban_pipeline.reporting.study_tables import render_study
from geo_sokoban_pipeline.storage import write_atomic, write_json

# Studies of which the README says something, with the name of the markers there: a table, or one line.
_TABLES = {"default": "readme:results"}
_LINES = {name: f"readme:{name}" for name in ("from_zero", "long", "geo3k", "geo3k_multi_turn")}
README_MARKERS = {**_TABLES, **_LINES}


def study_marker(name: str) -> str:
    """Name of the markers around a study's section."""
    return f"study:{name}"


def check_docs(docs: Path, name: str) -> None:
    """See that the documents are there and have their markers, before the runs that take hours.

    Raises:
        FileNotFoundError: a document is missing.
        MarkerError: it has no markers.
    """
    for path, marker in _documents(docs, name):
        if not path.is_file():
            raise FileNotFoundError(f"study.docs={docs}: there is no {path}. Give the folder of the docs, or null.")
        read_section(path.read_text(encoding="utf-8"), marker, path)


def write_study(docs: Path, results: Mapping[str, Any]) -> list[Path]:
    """Write everything that follows from a study's results; returns the paths."""
    name = results["study"]
    stored, picture = docs / "results" / f"{name}.json", docs / "img" / f"learning_{name}.svg"
    write_json(stored, results)
    _write_text(picture, draw_study(results))
    for (path, marker), content in zip(_documents(docs, name), render_sections(results), strict=True):
        _write_text(path, replace_section(path.read_text(encoding="utf-8"), marker, content, path))
    return [stored, picture, *(path for path, _ in _documents(docs, name))]


def render_sections(results: Mapping[str, Any]) -> list[str]:
    """Text of each document's section, in the order of the documents."""
    name = results["study"]
    render = {**dict.fromkeys(_TABLES, render_readme), **dict.fromkeys(_LINES, render_readme_line)}
    return [render_study(results), *([render[name](results)] if name in render else [])]


def _documents(docs: Path, name: str) -> list[tuple[Path, str]]:
    """(document, marker) of each section that a study fills."""
    readme = [(docs.parent / "README.md", README_MARKERS[name])] if name in README_MARKERS else []
    return [(docs / "learning.md", study_marker(name)), *readme]


def _write_text(path: Path, text: str) -> None:
    def write(temporary: Path) -> None:
        temporary.write_text(text, encoding="utf-8")

    write_atomic(path, write)
