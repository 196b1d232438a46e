"""Fixtures shared by all tests: the folder of real data, and whether its absence is a failure."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Folder of real rows and oracle traces (`GEO_SOKOBAN_SHARED_DATA`, default `../shared/data`).

    Skips where it is missing, but fails in continuous integration, which has it.
    """
    folder = (ROOT / os.environ.get("GEO_SOKOBAN_SHARED_DATA", "../shared/data")).resolve()
    if not folder.is_dir():
        message = f"no real data at {folder}; set GEO_SOKOBAN_SHARED_DATA"
        if os.environ.get("CI") == "true":
            pytest.fail(message)
        pytest.skip(message)
    return folder
