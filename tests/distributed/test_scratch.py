"""Scratch folders: a process that was killed leaves none for longer than until the next one starts."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

MAKE = """
from geo_sokoban_pipeline.distributed.scratch import make_scratch
folder = make_scratch()
(folder / "weights").write_bytes(b"1")
print(folder.name, flush=True)
input()
"""


@pytest.fixture
def start(tmp_path: Path) -> Callable[[], tuple[subprocess.Popen[str], Path]]:
    """Starts a process that makes a folder, and waits; returns both."""

    def start() -> tuple[subprocess.Popen[str], Path]:
        environment = {**os.environ, "TMPDIR": str(tmp_path)}
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        process = subprocess.Popen([sys.executable, "-c", MAKE], env=environment, text=True, **pipes)
        assert process.stdout is not None
        return process, tmp_path / process.stdout.readline().strip()

    return start


def test_folders_of_processes_that_have_ended_are_removed_and_no_others(
    start: Callable[[], tuple[subprocess.Popen[str], Path]], tmp_path: Path
) -> None:
    others = [tmp_path / name for name in (".geo_sokoban-being-made", "elsewhere", "another-geo_sokoban-1")]
    for folder in others:
        folder.mkdir()
    (tmp_path / "geo_sokoban-file").touch()
    (tmp_path / "geo_sokoban-link").symlink_to(tmp_path / "elsewhere")
    others += [tmp_path / "geo_sokoban-file", tmp_path / "geo_sokoban-link"]
    (dead, left), (living, held) = start(), start()
    try:
        assert (left / "weights").is_file(), "its process was alive when the other one started"
        dead.kill()
        dead.wait()
        third, own = start()
        third.communicate("\n")
        assert sorted(tmp_path.iterdir()) == sorted([held, own, *others])
        assert (held / "weights").is_file()
    finally:
        dead.kill()
        living.kill()
