"""A name means one thing: no two modules and no two public classes of the package share one with different meaning.

A reader who searches for a name finds the one place, or places that all play the role given here. Names that begin with
an underscore belong to the package alone: tests and benchmarks use public ones, so moving code does not touch them.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

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
SUBJECTS |= {"servers", "sokoban", "stored", "study"}


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
