"""Processes of a Ray cluster before they are given their work."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import ray
from ray._common.usage import usage_lib

from geo_sokoban_pipeline.config.ray import RayOptions
from geo_sokoban_pipeline.distributed.ray_cluster import connected
from geo_sokoban_pipeline.distributed.ray_process import files_of


def test_what_an_actor_imports_before_its_work_is_light() -> None:
    """It takes a process seconds and 300 MB, which the host of a server never needs."""
    heavy = ("torch", "transformers", "pandas", "pyarrow")
    code = (
        "import sys, geo_sokoban_pipeline.distributed.ray_process, geo_sokoban_pipeline.distributed.server_host\n"
        f"print([name for name in {heavy} if name in sys.modules])"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


def test_all_files_but_a_folders_manifests_travel(tmp_path: Path) -> None:
    names = ["b.json", "a/manifest.json", "a/c.safetensors", "manifest.json", "a/d/e.json"]
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    found = {
        pattern: [str(path.relative_to(tmp_path)) for path in files_of(tmp_path, pattern)]
        for pattern in ("*", "*.json")
    }
    assert found == {"*": ["a/c.safetensors", "a/d/e.json", "b.json"], "*.json": ["a/d/e.json", "b.json"]}
    assert files_of(tmp_path) == files_of(tmp_path, "*")


def test_no_usage_data_leave_a_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    """As Ray itself reads the variables that a cluster starts with."""
    monkeypatch.delenv("RAY_USAGE_STATS_ENABLED", raising=False)
    monkeypatch.setattr(ray, "is_initialized", lambda: True)  # so that none is started
    assert usage_lib.usage_stats_enabled()
    with connected(RayOptions(), 1):
        assert not usage_lib.usage_stats_enabled()
