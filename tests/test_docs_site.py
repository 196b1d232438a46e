"""The docs site builds without a warning: every page is in its navigation, every link and anchor leads somewhere."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import nbformat
import pytest
from mkdocs.config import load_config
from scripts.notebook_pages import write_page

ROOT = Path(__file__).parents[1]


def notebook(outputs: list[Any], source: str = "1 + 1") -> Any:
    code = nbformat.v4.new_code_cell(source, outputs=outputs)
    return nbformat.v4.new_notebook(cells=[nbformat.v4.new_markdown_cell("# A title\n\nText."), code])


OUTPUTS = [
    nbformat.v4.new_output("stream", name="stdout", text="3 < 4\n"),
    nbformat.v4.new_output("stream", name="stderr", text="a warning\n"),
    nbformat.v4.new_output("execute_result", {"text/html": "<table>\n\n<tr></tr>\n</table>", "text/plain": "table"}),
    nbformat.v4.new_output("display_data", {"image/png": "AAAA\n", "text/plain": "<Figure>"}),
]


def test_a_page_has_the_cells_and_their_outputs() -> None:
    plain, executed = notebook([]), notebook(OUTPUTS)
    page = write_page(plain, executed)
    assert page.startswith("# A title\n\nText.\n\n```python\n1 + 1\n```\n\n<pre>3 &lt; 4</pre>\n\n")
    assert '<div class="output" style="overflow-x:auto"><table>\n<tr></tr>\n</table></div>' in page
    assert 'src="data:image/png;base64,AAAA"' in page
    assert "a warning" not in page and "Without outputs" not in page


@pytest.mark.parametrize("executed", [None, notebook(OUTPUTS, "2 + 2")], ids=["never", "before the last change"])
def test_a_page_without_outputs_says_so(executed: Any) -> None:
    page = write_page(notebook([]), executed)
    assert "Without outputs" in page and "1 + 1" in page and "<table>" not in page


def test_every_notebook_is_in_the_navigation() -> None:
    config = load_config(str(ROOT / "mkdocs.yml"))
    (pages,) = [section["Notebooks"] for section in config.nav if "Notebooks" in section]
    listed = [path for page in pages for path in page.values()]
    assert listed == [f"notebooks/{path.stem}.md" for path in sorted((ROOT / "notebooks").glob("*.ipynb"))]


def test_the_site_builds_strictly_and_can_be_searched(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path)],
        cwd=ROOT,
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    pages = {page.stem for page in (ROOT / "docs").glob("*.md")}
    assert {page.stem for page in tmp_path.glob("*.html")} >= pages
    assert "render_solution" in (tmp_path / "notebooks" / "02_sokoban_levels.html").read_text(encoding="utf-8")
    found = json.loads((tmp_path / "search" / "search_index.json").read_text(encoding="utf-8"))["docs"]
    assert {entry["location"].partition(".html")[0] for entry in found} >= pages
