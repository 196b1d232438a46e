"""Kedro's settings: hooks of your own, merging of parameters, the environment of the data root."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from geo_sokoban_pipeline.settings import load_extra_hooks

ROOT = Path(__file__).parents[1]


IMPORTED = """
import logging, os, signal, warnings
from kedro.framework.cli.hooks import get_cli_hook_manager
from kedro.framework.project import settings

def state():
    loggers = logging.root.manager.loggerDict.items()
    return {
        "environment": dict(os.environ),
        "warnings": [entry for entry in warnings.filters if entry[1]],  # libraries add some of their own, by class
        "handlers": logging.root.handlers[:],
        "log filters": [name for name, logger in loggers if getattr(logger, "filters", None)],
        "signals": signal.getsignal(signal.SIGINT),
        "command line": set(get_cli_hook_manager().get_plugins()),
    }

before = state()
import geo_sokoban_pipeline.settings
after = state()
assert [name for name in before if before[name] != after[name]] == []
"""


def test_importing_the_settings_changes_nothing():
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    words = [sys.executable, "-c", IMPORTED]
    done = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_hooks_of_your_own():
    first, second = load_extra_hooks("collections:Counter, collections:OrderedDict")
    assert (type(first).__name__, type(second).__name__) == ("Counter", "OrderedDict")
    assert load_extra_hooks("") == ()


@pytest.mark.parametrize("words", ["collections", "no_such_module:Hook", "collections:NoSuchClass", ":Hook"])
def test_hook_that_cannot_be_imported_is_named(words):
    with pytest.raises(ValueError, match=f"GEO_SOKOBAN_EXTRA_HOOKS={words}"):
        load_extra_hooks(words)
