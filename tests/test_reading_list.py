"""docs/architecture.md: its list of an iteration is that of a traced one, and its map names every module."""

from __future__ import annotations

import re
from pathlib import Path

from scripts.reading_list.page import PAGE, modules, read_page, trace

import geo_sokoban_pipeline

PACKAGE = Path(geo_sokoban_pipeline.__file__).parent


def test_the_list_names_the_modules_of_an_iteration(tmp_path: Path) -> None:
    """In both processes, with their threads."""
    listed = read_page(PAGE.read_text(encoding="utf-8"), "iteration")
    assert listed == modules(trace(tmp_path, 1)[2]), "python -m scripts.reading_list writes the list"


def read_map() -> dict[str, set[str]]:
    """Words of the map by folder; "" has those of the package itself."""
    entries: dict[str, set[str]] = {"": set()}
    parents: list[str] = []
    for line in PAGE.read_text(encoding="utf-8").split("## The map\n")[1].split("```")[1].splitlines():
        if heading := re.match(r"((?:  ){0,2})(\w+)/ ", line):
            parents = [*parents[: len(heading[1]) // 2], heading[2]]
        entries.setdefault("/".join(parents), set()).update(re.findall(r"\w+", line))
    return entries


def test_the_map_names_every_module():
    """In the entry of its folder; a folder without an entry is itself named in the one above."""
    entries = read_map()
    assert {"envs/geo3k/figures", "rollout/engines/sglang"} < entries.keys()
    missing = []
    for path in PACKAGE.rglob("*.py"):
        folder, name = path.parent.relative_to(PACKAGE).as_posix().removeprefix("."), path.stem
        while folder not in entries:
            folder, _, name = folder.rpartition("/")
        if path.name != "__init__.py" and name not in entries[folder]:
            missing.append(path.relative_to(PACKAGE).as_posix())
    assert missing == []
    stray = [folder for folder in entries if not (PACKAGE / folder).is_dir()]
    assert stray == [], "the map has folders that are gone"
