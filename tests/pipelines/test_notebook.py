"""The notebooks run from top to bottom on a finished run."""

from __future__ import annotations

from typing import Any

import pytest

from notebook_runner import execute_notebook
from runs import ROOT

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("name", sorted(path.name for path in (ROOT / "notebooks").glob("*.ipynb")))
def test_notebook_runs(name: str, finished_run: Any) -> None:
    environment = {"GEO_SOKOBAN_ENV": "test", "GEO_SOKOBAN_DATA_ROOT": str(finished_run.root)}
    execute_notebook(ROOT / "notebooks" / name, environment)
