"""One process at a time; the lock dies with its holder."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from geo_sokoban_pipeline.runs.lock import LOCK_FILE, RunLock, RunLockedError

SOURCE = Path(__file__).parents[1] / "src"

HOLD = """
import os, sys, time
from pathlib import Path
from geo_sokoban_pipeline.runs.lock import RunLock
lock = RunLock(Path(sys.argv[1]))
forks = sys.argv[2] == "fork"
# The child speaks, not its parent: it has then let go of what it inherited.
if not forks or os.fork() == 0:
    print(os.getpid() if forks else 0, flush=True)
time.sleep(60)
"""


def hold(folder: Path, mode: str) -> tuple[subprocess.Popen[str], int]:
    """A process that holds the lock of a folder, and the child that it has forked (0: none)."""
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(folder), mode],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(SOURCE)},
    )
    assert holder.stdout is not None
    return holder, int(holder.stdout.readline())


@pytest.mark.parametrize("mode", ["alone", "fork"])
def test_second_process_stops_and_names_the_first(tmp_path, mode):
    """Until SIGKILL has ended it, whatever forked children it leaves."""
    holder, child = hold(tmp_path / "run", mode)
    try:
        with pytest.raises(RunLockedError) as caught:
            RunLock(tmp_path / "run")
        holder.kill()
        holder.wait()
        RunLock(tmp_path / "run").close()
    finally:
        holder.kill()
        if child:
            os.kill(child, 9)
    message = str(caught.value)
    assert str(tmp_path / "run") in message
    assert f"process {holder.pid} on {os.uname().nodename}, started 2" in message
    assert "--params run_id=" in message


def test_the_lock_names_no_secret(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["kedro", "run", "--params=x.server.environment.T=swordfish,run_id=x"])
    RunLock(tmp_path).close()
    written = (tmp_path / LOCK_FILE).read_text()
    assert "swordfish" not in written and "run_id=x" in written


def test_two_locks_of_one_process_exclude_each_other(tmp_path):
    first = RunLock(tmp_path)
    with pytest.raises(RunLockedError, match=f"process {os.getpid()} "):
        RunLock(tmp_path)
    first.close()
    second = RunLock(tmp_path)
    (tmp_path / LOCK_FILE).write_text("no json")
    with pytest.raises(RunLockedError, match="has not written its name yet"):
        RunLock(tmp_path)
    second.close()
