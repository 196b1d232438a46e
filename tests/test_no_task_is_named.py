"""What differs by task is asked of the task: outside its folder, no code names one."""

from __future__ import annotations

import ast
import re
import tokenize
from collections.abc import Container
from pathlib import Path

import pytest

SOURCES = Path(__file__).parents[1] / "src" / "geo_sokoban_pipeline"
WORDS = re.compile(r"(?<!geo[_-])sokoban|geo3k|geometry", re.IGNORECASE)
# Columns, metrics and words of single tasks: knowledge of a task that does not name it.
HIDDEN = re.compile(
    r"dist0|box_target|(level|problem|layout)_hash|by_length|(?<!font-)famil(y|ies)|boxed|deadlock|calc_score|random_legal"
    r"|move_limit|plausible|tool_call|optimal_steps|distance_delta|turn_reward_avg|solution_length|layouts",
    re.IGNORECASE,
)
# The tasks themselves, their rewards (a grader is called `geo3k` after its data set), and the registry.
OWN = ("envs/", "rewards/", "tasks.py")
# Files that still name one, with the reason; an entry that is not needed any more fails the test.
STILL = {"config/launcher_env.py": "variables of the original launchers, which knew these tasks"}


def named_in(path: Path, words: re.Pattern[str]) -> list[str]:
    """`line: text` of names and strings that have one of the words; docstrings and comments may give examples."""
    text = path.read_text(encoding="utf-8")
    if not words.search(text):
        return []
    docstrings = {
        (node.body[0].lineno, node.body[0].col_offset)
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        and ast.get_docstring(node, clean=False) is not None
    }
    found = []
    with path.open("rb") as file:
        for token in tokenize.tokenize(file.readline):
            is_code = token.type in (tokenize.NAME, tokenize.STRING) and token.start not in docstrings
            # `geo_sokoban_pipeline` and the variables GEO_SOKOBAN_… are the project's own name.
            if is_code and words.search(token.string):
                found.append(f"{token.start[0]}: {token.string[:80]}")
    return found


FILES = {path.relative_to(SOURCES).as_posix(): path for path in sorted(SOURCES.rglob("*.py"))}
# One schema for the files of all tasks: its columns are the contract, and null for a task without them.
HIDDEN_STILL = tuple(f"trajectories/{name}.py" for name in ("arrow", "index", "schema", "validation"))
OUTSIDE = [name for name in FILES if not name.startswith(OWN)]


@pytest.mark.parametrize(("words", "still"), [(WORDS, STILL), (HIDDEN, HIDDEN_STILL)], ids=["names", "knowledge"])
def test_no_task_is_named_and_no_knowledge_of_one_hides(words: re.Pattern[str], still: Container[str]) -> None:
    """In the files that are listed it is, or the list is too long."""
    assert {*STILL, *HIDDEN_STILL} <= set(OUTSIDE)
    for name in OUTSIDE:
        found = named_in(FILES[name], words)
        assert bool(found) == (name in still), (name, found)
