"""The docs site builds without a warning: every page is in its navigation, every link and anchor leads somewhere."""

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


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
    found = json.loads((tmp_path / "search" / "search_index.json").read_text(encoding="utf-8"))["docs"]
    assert {entry["location"].partition(".html")[0] for entry in found} >= pages
