"""Processes end with the one that started them; what a server or a study does with it is tested beside them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import psutil
import pytest

from geo_sokoban_pipeline import processes
from geo_sokoban_pipeline.processes import count_cores, kill_group, tethered
from servers import all_gone

SLEEP = [sys.executable, "-c", "import time; print('up', flush=True); time.sleep(600)"]
# Starts a command in a way of `processes`, prints its number once it is up, and waits to be killed.
PARENT = """
import subprocess, sys, time
sys.path.insert(0, sys.argv[1])
from geo_sokoban_pipeline.processes import tethered
child = subprocess.Popen(tethered(sys.argv[2:]), stdout=subprocess.PIPE, text=True)
child.stdout.readline()
print(child.pid, flush=True)
time.sleep(600)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's part is Linux")
def test_a_tethered_command_ends_with_a_parent_that_is_killed() -> None:
    source = os.path.dirname(os.path.dirname(processes.__file__))
    words = [sys.executable, "-c", PARENT, source, *SLEEP]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        child = psutil.Process(pid)
        parent.kill()
    assert all_gone([child], 60.0)


def test_a_tethered_command_of_a_parent_that_is_gone_never_starts() -> None:
    words = tethered([sys.executable, "-c", "print('started')"])
    words[words.index(str(os.getpid()))] = "1"  # this process is not process 1
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert (done.stdout, done.returncode) == ("", 128 + signal.SIGTERM)


def test_group_0_is_never_signalled() -> None:
    """It is this process's own."""
    kill_group(0, signal.SIGKILL)


def test_cores_are_those_this_process_may_use() -> None:
    assert 1 <= count_cores() <= (os.cpu_count() or 1)
