"""Scratch folders: a process that was killed leaves none for longer than until the next command or process starts."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from geo_sokoban_pipeline.runs.scratch import sweep
from runs import finish, kedro_command

MAKE = """
from geo_sokoban_pipeline.runs.scratch import Scratch
scratch = Scratch()
folder = scratch.path
(folder / "weights").write_bytes(b"1")
print(folder.name, flush=True)
if input() == "end":
    scratch.cleanup()
"""


def start(place: Path) -> tuple[subprocess.Popen[str], Path]:
    """A process that has made a folder, and waits; and the folder."""
    environment = {**os.environ, "TMPDIR": str(place)}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    process = subprocess.Popen([sys.executable, "-c", MAKE], env=environment, text=True, **pipes)
    assert process.stdout is not None
    return process, place / process.stdout.readline().strip()


def test_folders_of_processes_that_have_ended_are_removed_and_no_others(
    tmp_path: Path,
) -> None:
    others = [tmp_path / name for name in (".geo_sokoban-being-made", "elsewhere", "another-geo_sokoban-1")]
    for folder in others:
        folder.mkdir()
    (tmp_path / "geo_sokoban-file").touch()
    (tmp_path / "geo_sokoban-link").symlink_to(tmp_path / "elsewhere")
    others += [tmp_path / "geo_sokoban-file", tmp_path / "geo_sokoban-link"]
    (dead, left), (living, held) = start(tmp_path), start(tmp_path)
    try:
        assert (left / "weights").is_file(), "its process was alive when the other one started"
        dead.kill()
        dead.wait()
        third, own = start(tmp_path)
        third.communicate("\n")
        assert not own.exists(), "it has ended as it should"
        assert sorted(tmp_path.iterdir()) == sorted([held, *others])
        assert (held / "weights").is_file()
    finally:
        dead.kill()
        living.kill()


@pytest.mark.slow
def test_a_command_removes_what_a_killed_one_has_left(
    tmp_path: Path,
) -> None:
    dead, left = start(tmp_path)
    dead.kill()
    dead.wait()
    assert left.is_dir()
    words = {"data_root": tmp_path / "data", "own_interpreter": True, "TMPDIR": str(tmp_path)}
    finish(kedro_command("--pipelines=data_sokoban", **words))
    assert not left.exists()


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="only where shared memory has names in the file system")
def test_shared_memory_that_no_process_maps_is_removed_once_it_is_old() -> None:
    def make(name: str, age: float) -> Path:
        path = Path("/dev/shm", f"{name}_of_a_test_{os.getpid()}.shm")
        path.write_bytes(b"." * 4096)
        os.utime(path, (time.time() - age,) * 2)
        return path

    old, young = make("sglang_loads_old", 600.0), make("sglang_loads_young", 0.0)
    mapped, others = make("sgl_shm_mm_mapped", 600.0), make("others", 600.0)
    try:
        with mapped.open("r+b") as file, mmap.mmap(file.fileno(), 0):
            sweep()
            assert [path.exists() for path in (old, young, mapped, others)] == [False, True, True, True]
        sweep()
        assert [path.exists() for path in (young, mapped, others)] == [True, False, True]
    finally:
        for path in (old, young, mapped, others):
            path.unlink(missing_ok=True)
