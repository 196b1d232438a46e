"""scripts/readme_pictures draws from a stored run."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from PIL import Image

from runs import ROOT

pytestmark = pytest.mark.slow


def test_images_of_a_run(finished_run, tmp_path):
    """Those of the task that was trained are drawn; the other one is named."""
    environment = {**os.environ, "GEO_SOKOBAN_DATA_ROOT": str(finished_run.root), "PYTHONPATH": str(ROOT / "src")}
    words = [str(ROOT / "scripts" / "readme_pictures.py"), "--env=test", f"--output={tmp_path}", "sokoban", "geo3k"]
    done = subprocess.run(
        [sys.executable, *words], check=False, capture_output=True, text=True, env=environment, timeout=120
    )
    assert done.returncode == 1
    assert "geo3k: no evaluated run default; train one: kedro run --pipelines=train_geo3k" in done.stderr
    with Image.open(tmp_path / "held_out_episodes.gif") as film:
        assert film.n_frames > 1
