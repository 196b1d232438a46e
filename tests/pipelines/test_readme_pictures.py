"""scripts/readme_pictures draws from a stored run."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from PIL import Image

from runs import ROOT

pytestmark = pytest.mark.slow


def draw(data_root, output, *words):
    environment = {**os.environ, "GEO_SOKOBAN_DATA_ROOT": str(data_root), "PYTHONPATH": str(ROOT / "src")}
    command = [sys.executable, str(ROOT / "scripts" / "readme_pictures.py"), "--env=test", f"--output={output}", *words]
    return subprocess.run(command, check=False, capture_output=True, text=True, env=environment, timeout=120)


def test_images_of_a_run(finished_run, tmp_path):
    process = draw(finished_run.root, tmp_path, "sokoban")
    assert process.returncode == 0, process.stderr
    with Image.open(tmp_path / "held_out_episodes.gif") as film:
        assert film.n_frames > 1
    process = draw(finished_run.root, tmp_path, "geo3k")
    assert process.returncode == 1
    assert "geo3k: no evaluated run default; train one: kedro run --pipelines=train_geo3k" in process.stderr
