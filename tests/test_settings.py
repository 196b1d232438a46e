"""Kedro's settings: hooks of your own, merging of parameters, the environment of the data root."""

from __future__ import annotations

from pathlib import Path

import pytest
from kedro.config import OmegaConfigLoader

from geo_sokoban_pipeline.settings import CONFIG_LOADER_ARGS, load_extra_hooks

ROOT = Path(__file__).parents[1]


def test_hooks_of_your_own():
    first, second = load_extra_hooks("collections:Counter, collections:OrderedDict")
    assert (type(first).__name__, type(second).__name__) == ("Counter", "OrderedDict")
    assert load_extra_hooks("") == ()


@pytest.mark.parametrize("words", ["collections", "no_such_module:Hook", "collections:NoSuchClass", ":Hook"])
def test_hook_that_cannot_be_imported_is_named(words):
    with pytest.raises(ValueError, match=f"GEO_SOKOBAN_EXTRA_HOOKS={words}"):
        load_extra_hooks(words)


def test_environments_change_single_parameters(tmp_path):
    for env, text in (("base", "section: {a: 1, inner: {b: 2, c: 3}}"), ("test", "section: {inner: {c: 4}}")):
        (tmp_path / env).mkdir()
        (tmp_path / env / "parameters.yml").write_text(text)
    loader = OmegaConfigLoader(str(tmp_path), env="test", **CONFIG_LOADER_ARGS)
    assert loader["parameters"] == {"section": {"a": 1, "inner": {"b": 2, "c": 4}}}


@pytest.mark.parametrize(
    ("env", "default"), [("local", "data"), ("test", "data/test"), ("slime_exact", "data/slime_exact")]
)
def test_data_root_moves_with_its_variable(env, default, monkeypatch):
    monkeypatch.delenv("GEO_SOKOBAN_DATA_ROOT", raising=False)
    assert OmegaConfigLoader(str(ROOT / "conf"), env=env, **CONFIG_LOADER_ARGS)["globals"]["data_root"] == default
    monkeypatch.setenv("GEO_SOKOBAN_DATA_ROOT", "/elsewhere/with space")
    loader = OmegaConfigLoader(str(ROOT / "conf"), env=env, **CONFIG_LOADER_ARGS)
    assert loader["globals"]["data_root"] == "/elsewhere/with space"
