"""The files of one GRPO step that `docs/architecture.md` lists: few and short, and none that the step needs is missing.

The page has three lists below its heading: the files to read, the tools that the step calls, and what is left out, each
with the reason. Who adds an import to a file of the step names its target in one of the three. The page's map names
every module.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import geo_sokoban_pipeline

PACKAGE = Path(geo_sokoban_pipeline.__file__).parent
PAGE = Path(__file__).parents[1] / "docs" / "architecture.md"
MOST_FILES = 20
LOOP = "training/grpo_loop.py"


def read_lists() -> dict[str, list[str]]:
    """Paths of the section's lists, by the bold word above each: files, tools, left (out)."""
    section = PAGE.read_text(encoding="utf-8").split("### The files of one step\n")[1].split("\n## ")[0]
    found: dict[str, list[str]] = {}
    for line in section.splitlines():
        if heading := re.match(r"\*\*(\w+)\*\*", line):
            found[heading[1].lower()] = []
        elif re.match(r"- |\d+\. ", line):
            # The paths stand before the colon of an item; what comes after it explains them.
            list(found.values())[-1].extend(re.findall(r"`([\w/]+(?:\.py|/))`", line.split(": ")[0]))
    return found


LISTS = read_lists()
FILES = LISTS["files"]


def is_in(path: str, places: list[str]) -> bool:
    """Whether a file is among paths, of which those that end with `/` are folders."""
    return any(path == place or (place.endswith("/") and path.startswith(place)) for place in places)


def file_of(module: str) -> str | None:
    """Path of a module of the package, relative to it; None for other modules."""
    name, _, rest = module.partition(".")
    if name != PACKAGE.name:
        return None
    path = PACKAGE / rest.replace(".", "/")
    path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    return path.relative_to(PACKAGE).as_posix() if path.is_file() else None


def imports(tree: ast.AST) -> dict[str, str]:
    """File of the package by each name that is imported from it, wherever the import stands."""
    found = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            for alias in node.names:
                path = file_of(f"{node.module}.{alias.name}") or file_of(node.module)
                if path is not None:
                    found[alias.asname or alias.name] = path
    return found


def calls_of(tree: ast.Module, start: ast.AST) -> Iterator[str]:
    """Names that code calls, and those that the functions of its own file called there call."""
    own = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
    waiting, seen = [start], set()
    while waiting:
        for node in ast.walk(waiting.pop()):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id not in seen:
                seen.add(node.func.id)
                yield node.func.id
                if node.func.id in own:
                    waiting.append(own[node.func.id])


def parse(path: str) -> ast.Module:
    return ast.parse((PACKAGE / path).read_text(encoding="utf-8"))


@pytest.mark.parametrize("path", [path for paths in LISTS.values() for path in paths])
def test_what_the_page_lists_exists_once(path):
    assert (PACKAGE / path).is_dir() if path.endswith("/") else (PACKAGE / path).is_file()
    assert [path for paths in LISTS.values() for path in paths].count(path) == 1


def test_the_files_of_a_step_are_few():
    assert len(FILES) <= MOST_FILES


def test_functions_that_the_step_calls_are_in_the_list():
    """From an iteration of the loop: collect, score, update, sync, validate, commit."""
    tree = parse(LOOP)
    functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
    (iteration,) = [node for node in ast.walk(functions["run_grpo"]) if isinstance(node, ast.For)]
    called = {name: path for name, path in imports(tree).items() if name in set(calls_of(tree, iteration))}
    assert {"build_sample", "split_steps", "validate_policy", "CheckpointWriter", "is_save_due"} <= called.keys()
    assert {name: path for name, path in called.items() if not is_in(path, [*FILES, *LISTS["tools"]])} == {}


@pytest.mark.parametrize("path", FILES)
def test_imports_of_the_files_are_in_the_list_or_named_as_left_out(path):
    known = [path for paths in LISTS.values() for path in paths]
    assert {name: target for name, target in imports(parse(path)).items() if not is_in(target, known)} == {}


def test_what_is_named_beside_the_files_is_imported_by_them():
    """An entry that nothing refers to is out of date."""
    targets = {target for path in FILES for target in imports(parse(path)).values()}
    others = [*LISTS["tools"], *LISTS["left"]]
    assert [place for place in others if not any(is_in(target, [place]) for target in targets)] == []


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
