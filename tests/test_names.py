"""A name means one thing: no two modules and no two public classes of the package share one with different meaning.

A reader who searches for a name finds the one place, or places that all play the role given here. Names that begin with
an underscore belong to the package alone: tests and benchmarks use public ones, so moving code does not touch them.
"""

from __future__ import annotations

import ast
import re
import tokenize
from collections import Counter
from collections.abc import Container, Iterator
from itertools import chain
from pathlib import Path

import pytest

import geo_sokoban_pipeline

PACKAGE = Path(geo_sokoban_pipeline.__file__).parent
ROOT = Path(__file__).parents[1]
# Kedro's names, and what a folder's other modules build on.
BY_CONVENTION = {"base", "nodes", "pipeline"}
# Each task has these files; some have a counterpart for what all tasks share.
OF_EACH_TASK = {"config", "data", "data_steps", "drawing", "env", "evaluation", "expert", "inspection", "report"}
OF_EACH_TASK |= {"sources", "task"}
# Subjects that several layers have a file on: its options (`config`), its checks (`preflight`), its hooks, datasets and
# pipelines, or its reward. `metrics`: of episodes, those that a task uses and those built on them. `backend`: of a run,
# and Megatron's.
SUBJECTS = {"audit", "backend", "geo3k", "grpo", "metrics", "own_code", "parameters", "policy", "rollout", "runs"}
SUBJECTS |= {"credit", "estimate", "estimators", "servers", "sokoban", "stored", "study"}


def test_modules():
    files = [path for path in PACKAGE.rglob("*.py") if path.stem != "__init__"]
    names = Counter([path.stem for path in files] + [folder.name for folder in {path.parent for path in files}])
    repeated = {name for name, count in names.items() if count > 1}
    assert repeated == BY_CONVENTION | OF_EACH_TASK | SUBJECTS


def test_public_classes():
    seen: dict[str, Path] = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        for name, bases in re.findall(
            r"^class ([^_]\w*)(?:\((.*)\))?:", path.read_text(encoding="utf-8"), re.MULTILINE
        ):
            # A class may specialise the one of the same name, as a task's defaults do.
            if name not in re.split(r"\W+", bases):
                assert name not in seen, f"{name} in {path} and in {seen[name]}"
                seen[name] = path
    assert len(seen) > 100


def test_no_test_uses_private_names():
    """Nor does a benchmark or a script: not as an attribute, an import, or a text that `setattr` gets."""
    of_the_package = set(chain.from_iterable(private_names(path.read_text("utf-8")) for path in PACKAGE.rglob("*.py")))
    found = []
    for path in chain.from_iterable((ROOT / folder).rglob("*.py") for folder in ("tests", "benchmarks", "scripts")):
        text = path.read_text(encoding="utf-8")
        foreign = of_the_package & set(re.findall(r"\b_\w+", text)) - private_names(text)
        used = used_names(ast.parse(text)) if foreign else ()
        found += [f"{path.relative_to(ROOT)}:{line}: {name}" for line, name in used if name in foreign]
    assert {"_remember", "_keys", "_decode"} < of_the_package, "methods, attributes and functions are seen"
    assert found == []


def private_names(text: str) -> set[str]:
    """Names with one leading underscore that a file defines: classes, functions, variables, attributes of `self`."""
    defined = r"(?:def |class |self\.)(_[^\W_]\w*)|^ *(_[^\W_]\w*)(?:: .*)? = "
    return set(chain.from_iterable(re.findall(defined, text, re.MULTILINE)))


def used_names(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Line and name of each attribute, import, and text that `setattr` or `getattr` gets (its last part)."""
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(attr=name):
                yield node.lineno, name
            case ast.ImportFrom(names=names):
                yield from ((node.lineno, alias.name) for alias in names)
            case ast.Call(func=ast.Attribute(attr=called) | ast.Name(called), args=given) if "attr" in called:
                texts = (word.value for word in given if isinstance(word, ast.Constant) and isinstance(word.value, str))
                yield from ((node.lineno, text.rpartition(".")[2]) for text in texts)


# What differs by task is asked of the task: outside its folder, no code names one.

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


FILES = {path.relative_to(PACKAGE).as_posix(): path for path in sorted(PACKAGE.rglob("*.py"))}
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
