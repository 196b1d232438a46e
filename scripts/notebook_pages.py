"""Notebooks on the docs site: as a hook of mkdocs it makes a page of each; run by itself it executes them first.

`python scripts/notebook_pages.py` executes every notebook on the stored runs and leaves copies with their outputs in
`build/notebooks`. A page shows the outputs of a copy that has the same cells as the committed notebook.
"""

from __future__ import annotations

import html
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import nbformat

ROOT = Path(__file__).resolve().parents[1]
NOTEBOOKS, EXECUTED = ROOT / "notebooks", ROOT / "build" / "notebooks"
_SECONDS = 600  # for a cell
_WITHOUT = (
    "!!! note\n    Without outputs: `make docs` executes this notebook where the runs that it reads are stored.\n"
)


def on_files(files: Any, config: Any) -> Any:
    """Add a page for each notebook; mkdocs calls this with the files of the site."""
    from mkdocs.structure.files import File

    for path in sorted(NOTEBOOKS.glob("*.ipynb")):
        page = write_page(nbformat.read(path, as_version=4), _read_executed(path.name))
        files.append(File.generated(config, f"notebooks/{path.stem}.md", content=page))
    return files


def write_page(notebook: Any, executed: Any | None) -> str:
    """Markdown of a notebook.

    Args:
        executed: a copy with outputs; None: there is none. One with other cells counts as none.
    """
    shown = executed if executed is not None and _sources(executed) == _sources(notebook) else None
    parts = []
    for cell in (shown or notebook).cells:
        if cell.cell_type == "markdown":
            parts.append(cell.source)
        elif cell.cell_type == "code":
            parts.append(f"```python\n{cell.source}\n```")
            parts += [_write_output(output) for output in cell.outputs]
    if shown is None:
        parts.insert(1, _WITHOUT)
    return "\n\n".join(filter(None, parts)) + "\n"


def execute(path: Path) -> str | None:
    """Execute a notebook into `build/notebooks`; returns the error that stopped it, or None."""
    from nbclient import NotebookClient
    from nbclient.exceptions import CellExecutionError

    notebook = nbformat.read(path, as_version=4)
    place = {"metadata": {"path": str(path.parent)}}
    target = EXECUTED / path.name
    target.unlink(missing_ok=True)
    try:
        NotebookClient(notebook, timeout=_SECONDS, kernel_name="python3", resources=place).execute()
    except CellExecutionError as error:
        return f"{error.ename}: {error.evalue}"
    target.parent.mkdir(parents=True, exist_ok=True)
    nbformat.write(notebook, target)
    return None


def main() -> int:
    """Execute all notebooks; one whose runs are not stored has no outputs on the site."""
    os.environ.setdefault("PYDEVD_DISABLE_FILE_VALIDATION", "1")
    for path in sorted(NOTEBOOKS.glob("*.ipynb")):
        problem = execute(path)
        print(path.name, "executed" if problem is None else f"left without outputs. {problem}")  # noqa: T201
    return 0


def _read_executed(name: str) -> Any | None:
    path = EXECUTED / name
    return nbformat.read(path, as_version=4) if path.is_file() else None


def _sources(notebook: Any) -> list[tuple[str, str]]:
    return [(cell.cell_type, cell.source) for cell in notebook.cells]


def _write_output(output: Mapping[str, Any]) -> str:
    data = output.get("data") or {}
    if "text/html" in data:
        # Without empty lines it stays one block for Markdown.
        lines = (line for line in data["text/html"].splitlines() if line.strip())
        return f'<div class="output" style="overflow-x:auto">{chr(10).join(lines)}</div>'
    if "image/png" in data:
        return f'<img alt="output of the cell" src="data:image/png;base64,{data["image/png"].strip()}">'
    text = data.get("text/plain") or (output.get("text") if output.get("name") == "stdout" else "")
    return f"<pre>{html.escape(text.rstrip())}</pre>" if text else ""


if __name__ == "__main__":
    sys.exit(main())
