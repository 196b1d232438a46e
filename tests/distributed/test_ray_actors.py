"""Processes of a Ray cluster before they are given their work."""

from __future__ import annotations

import subprocess
import sys


def test_the_module_of_actors_imports_no_torch() -> None:
    """It takes a process seconds and 300 MB, which the host of a server never needs."""
    heavy = ("torch", "transformers", "pandas", "pyarrow")
    code = (
        "import sys, geo_sokoban_pipeline.distributed.ray_actors\n"
        f"print([name for name in {heavy} if name in sys.modules])"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"
