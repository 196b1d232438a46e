"""No pickle: source that neither imports it nor calls what reads or writes it; one module makes what a server takes."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src"
FORBIDDEN_TEXT = ["torch." + "load", "torch." + "save", "job" + "lib", "allow_" + "pickle"]
FORBIDDEN_MODULES = {"pickle", "cPickle", "_pickle", "cloudpickle", "dill", "shelve", "marshal", "job" + "lib"}
FILES = sorted(SOURCE.rglob("*.py"))
# SGLang takes weights over HTTP as a pickle; this module makes one and reads none.
SENDER = SOURCE / "geo_sokoban_pipeline/rollout/engines/sglang/sender.py"


def imported_modules(source: str) -> set[str]:
    """Top names of all modules that a source imports, at any depth of its code."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.add(node.module)
    return {name.split(".", maxsplit=1)[0] for name in names}


@pytest.mark.parametrize(
    ("source", "modules"),
    [
        ("import pickle", {"pickle"}),
        ("def f():\n    from pickle import loads", {"pickle"}),
        ("import os.path as p, cloudpickle as c", {"os", "cloudpickle"}),
        ("from . import pickle_free", set()),
    ],
)
def test_imports_are_found(source: str, modules: set[str]) -> None:
    assert imported_modules(source) == modules


def test_source_is_free_of_pickle() -> None:
    assert len(FILES) > 100
    for path in FILES:
        source = path.read_text(encoding="utf-8")
        assert [text for text in FORBIDDEN_TEXT if text in source] == [], path
        assert imported_modules(source) & FORBIDDEN_MODULES == ({"pickle"} if path == SENDER else set()), path


def test_the_sender_reads_no_pickle() -> None:
    calls = {node.attr for node in ast.walk(ast.parse(SENDER.read_text())) if isinstance(node, ast.Attribute)}
    assert "Pickler" in calls
    assert calls & {"load", "loads", "Unpickler"} == set()
