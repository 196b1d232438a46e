"""Code of the user's: which files it is, what is loaded of it, and where in it an error arose."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from geo_sokoban_pipeline.envs.plugins import PluginError, load_object
from geo_sokoban_pipeline.runs.own_code import explain, forget_edited, hash_own_code, own_files

FILES = {
    "task.py": "import numpy\nimport prices\nfrom parts import drawing\n\ndef reward(): return prices.PRICE\n",
    "prices.py": "PRICE = 1\n",
    "parts/__init__.py": "",
    "parts/drawing.py": "def draw():\n    from . import colours\n    return colours.BLACK\n",
    "parts/colours.py": "BLACK = 0\n",
    "parts/unused.py": "1 / 0\n",
    "unused.py": "1 / 0\n",
}
FOLLOWED = ["task.py", "parts/__init__.py", "parts/colours.py", "parts/drawing.py", "prices.py"]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder of own code; what it adds to this process is taken away afterwards."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    before = set(sys.modules)
    for name, text in FILES.items():
        path = tmp_path / "own" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    yield tmp_path / "own"
    for name in set(sys.modules) - before:
        if str(tmp_path) in str(getattr(sys.modules[name], "__file__", None)):
            del sys.modules[name]


def test_imports_are_followed_within_the_folder(folder):
    assert list(own_files(f"{folder}/task.py:reward")) == FOLLOWED
    assert list(own_files(f"{folder}/task.py")) == FOLLOWED
    assert own_files(f"{folder}/prices.py") == {"prices.py": folder / "prices.py"}


def test_dotted_paths_are_followed_too(folder, monkeypatch):
    monkeypatch.syspath_prepend(folder)
    assert list(own_files("parts.drawing.draw")) == ["parts/drawing.py", "parts/__init__.py", "parts/colours.py"]
    assert list(own_files("task.reward")) == FOLLOWED


def test_of_an_installed_package_only_its_own_files_count():
    files = own_files("kedro.io.core.DatasetError")
    assert next(iter(files)) == "kedro/io/core.py"
    assert {name.partition("/")[0] for name in files} == {"kedro"}


@pytest.mark.parametrize(
    "spec",
    [
        "geo_sokoban_pipeline.envs.sokoban.env.build_env",
        "src/geo_sokoban_pipeline/envs/sokoban/env.py",
        "json.loads",
        "math.sin",
        "no_such.thing",
        "missing.py",
        "nothing",
    ],
)
def test_code_that_is_nobodys_own(spec, monkeypatch):
    monkeypatch.chdir(Path(__file__).parents[1])
    assert own_files(spec) == {}


@pytest.mark.parametrize("name", FOLLOWED)
def test_a_hash_tells_an_edit_of_each_file(folder, name):
    spec = f"{folder}/task.py"
    before = hash_own_code(spec)
    (folder / name).write_text((folder / name).read_text() + "# edited\n")
    after = hash_own_code(spec)
    assert [file for file in FOLLOWED if before[file] != after[file]] == [name]


def test_what_is_loaded_is_what_is_hashed_until_the_next_command(folder):
    spec = f"{folder}/task.py:reward"
    before = hash_own_code(spec)
    assert load_object(spec)() == 1  # with its imports, though the folder was on no path
    (folder / "prices.py").write_text("PRICE = 22\n")
    assert load_object(spec)() == 1 and hash_own_code(spec) == before
    forget_edited()
    assert load_object(spec)() == 22 and hash_own_code(spec) != before


def test_a_file_with_the_name_of_another_module_is_refused(folder):
    (folder / "string.py").write_text("")
    (folder / "task.py").write_text("import string\n")
    with pytest.raises(PluginError, match=r"own/string\.py, but .*string\.py already has the name 'string'; rename"):
        load_object(f"{folder}/task.py:reward")


@pytest.mark.parametrize(
    ("call", "cause"),
    [
        ("json.loads(text)", "JSONDecodeError: Expecting value: line 1 column 1 (char 0)"),  # of the standard library
        ("packaging.version.Version(text)", "InvalidVersion: Invalid version: 'x'"),
    ],
)
def test_errors_are_told_with_the_last_own_line(folder, monkeypatch, call, cause):
    monkeypatch.chdir(folder.parent)
    (folder / "task.py").write_text("import json\nimport prices\n\ndef reward():\n    return prices.of('x')\n")
    (folder / "prices.py").write_text(f"import json, packaging.version\n\ndef of(text):\n    return {call}\n")
    reward = load_object("own/task.py:reward")
    with pytest.raises(Exception) as caught:  # noqa: PT011 - of the library's own
        reward()
    assert explain(caught.value) == f"{cause}, in own/prices.py, line 4: return {call}"


def test_a_file_that_is_no_program_is_told_with_its_line(folder, monkeypatch):
    monkeypatch.chdir(folder.parent)
    (folder / "broken.py").write_text("\ndef (\n")
    with pytest.raises(SyntaxError) as broken:
        load_object("own/broken.py:reward")
    assert explain(broken.value) == "SyntaxError: invalid syntax, in own/broken.py, line 2"


def test_errors_without_own_code_have_no_line():
    error = ValueError("invalid literal")
    assert explain(error) == "ValueError: invalid literal"
