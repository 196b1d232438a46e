"""Loading by name: dotted paths, files, and errors that say what was tried."""

from __future__ import annotations

import pytest

from geo_sokoban_pipeline.envs.plugins import PluginError, load_object
from geo_sokoban_pipeline.envs.sokoban import build_env

SOURCE = """
from dataclasses import dataclass

@dataclass
class World:
    size: int = 3

def build_env(sample, args):
    return World()
"""


@pytest.fixture
def setup(tmp_path):
    file = tmp_path / "world.py"
    file.write_text(SOURCE)
    return file


def test_dotted_paths_and_files(setup, monkeypatch, tmp_path):
    assert load_object("geo_sokoban_pipeline.envs.sokoban.build_env") is build_env
    assert load_object("geo_sokoban_pipeline.envs.sokoban.env.build_env") is build_env
    assert load_object(f"{setup}:World")().size == 3
    named = load_object(f"{setup}:build_env", default_name="other")
    assert load_object(str(setup), default_name="build_env") is named
    monkeypatch.chdir(tmp_path)  # relative files start here
    assert load_object("world.py:build_env") is named
    other = tmp_path / "other" / "world.py"  # files of one name do not collide
    other.parent.mkdir()
    other.write_text("build_env = 7\n")
    assert load_object(f"{other}:build_env") == 7
    assert load_object(f"{setup}:build_env") is named
    with pytest.raises(PluginError, match="has no 'make'; it defines World, build_env, dataclass"):
        load_object(f"{setup}:make")


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("build_env", "is not the name of an object; write package.module.name"),
        ("", "is not the name of an object"),
        ("a b.c", "is not the name of an object"),
        ("json.", "is not the name of an object"),
        ("json:loads", "is not the name of an object"),
        ("no_such_package.module.name", "there is no module 'no_such_package'"),
        ("json.no_such_module.name", "there is no module 'json.no_such_module'"),
        ("json.no_such_name", "json has no 'no_such_name'; it defines"),
        ("missing.py:build_env", "there is no file .*missing.py; relative paths start at"),
    ],
)
def test_errors_say_what_was_tried(spec, message):
    with pytest.raises(PluginError, match=message):
        load_object(spec)


@pytest.mark.parametrize(
    ("source", "error"),
    [("1 / 0", ZeroDivisionError), ("import no_such_thing", ModuleNotFoundError), ("def", SyntaxError)],
)
def test_errors_inside_user_code_pass_through_every_time(tmp_path, monkeypatch, source, error):
    """Of a file, and of a module, where a missing import is no missing module."""
    file = tmp_path / "my_broken_world.py"
    file.write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    for spec in (f"{file}:build_env", "my_broken_world.build_env") * 2:
        with pytest.raises(error):
            load_object(spec)
