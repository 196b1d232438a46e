"""Programs under supervision end with all they have started, however they or their parent end.

The programs are small ones of the standard library; what a supervisor does is the same for a server.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from geo_sokoban_pipeline.rollout.engines.sglang.client import ServerLost
from geo_sokoban_pipeline.rollout.engines.sglang.launcher import ServerProcess, find_ports, is_free
from geo_sokoban_pipeline.rollout.engines.sglang.servers import start_router
from ray_cluster import wait_until
from servers import all_gone, launch_options

pytestmark = pytest.mark.xdist_group("sglang")

# A program with a child in its group, and one that has left it, as daemons do; all three deaf to SIGTERM if asked.
FAMILY = """
import os, signal, subprocess, sys, time
if sys.argv[1] == "deaf":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
sleep = [sys.executable, "-c", "import time; time.sleep(600)"]
children = [subprocess.Popen(sleep), subprocess.Popen(sleep, start_new_session=True)]
print("pids", *[child.pid for child in children], flush=True)
time.sleep(600)
"""


def family(tmp_path: Path, kind: str = "plain", grace: float = 1.0) -> tuple[ServerProcess, list[psutil.Process]]:
    process = ServerProcess([sys.executable, "-c", FAMILY, kind], os.environ, tmp_path / "log", grace)
    wait_until(lambda: "pids" in process.tail(), "it has not begun", 60)
    pids = [process.pid, *map(int, process.tail().split("pids")[1].split())]
    return process, [psutil.Process(pid) for pid in pids]


@pytest.mark.parametrize("kind", ["plain", "deaf"])
def test_ending_ends_the_whole_family(tmp_path, kind):
    process, members = family(tmp_path, kind)
    assert process.alive
    process.end()
    assert not process.alive
    assert all_gone(members, 1.0)
    process.end()  # a second time does nothing


def test_a_killed_program_takes_its_family_along(tmp_path):
    process, members = family(tmp_path)
    os.kill(process.pid, signal.SIGKILL)
    assert all_gone(members)
    process.end()  # waits for the supervisor, which sees the death a moment later
    assert process.exit_code == 128 + signal.SIGKILL


def test_a_halted_program_is_ended(tmp_path):
    process, members = family(tmp_path)
    os.kill(process.pid, signal.SIGSTOP)
    process.end()
    assert all_gone(members, 1.0)


PARENT = """
import os, signal, sys, time
from pathlib import Path
signal.signal(signal.SIGINT, signal.default_int_handler)  # a command in the background ignores it, and so its children
sys.path[:0] = sys.argv[2:]
from test_process_family import FAMILY
from geo_sokoban_pipeline.rollout.engines.sglang.launcher import ServerProcess
process = ServerProcess([sys.executable, "-c", FAMILY, "deaf"], os.environ, Path(sys.argv[1]), 0.5)
while "pids" not in process.tail():
    time.sleep(0.05)
print(process.pid, process.tail().split("pids")[1], flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("ending", [signal.SIGKILL, signal.SIGINT])
def test_it_ends_with_its_parent(tmp_path, ending):
    (tmp_path / "test_process_family.py").write_text(f"FAMILY = {FAMILY!r}")
    source = Path(__file__).parents[4] / "src"
    words = [sys.executable, "-c", PARENT, str(tmp_path / "log"), str(tmp_path), str(source)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as parent:
        assert parent.stdout is not None
        members = [psutil.Process(int(pid)) for pid in parent.stdout.readline().split()]
        assert len(members) == 3
        parent.send_signal(ending)
        parent.wait(60)
    assert all_gone(members)


def test_a_program_that_ends_by_itself_leaves_its_words(tmp_path):
    code = "import sys; print('too little memory'); sys.exit(3)"
    process = ServerProcess([sys.executable, "-c", code], os.environ, tmp_path / "a" / "log", 1.0)
    wait_until(lambda: not process.alive, "it has not ended", 60)
    assert (process.exit_code, process.tail()) == (3, "too little memory")
    process.end()


def test_a_program_that_never_had_a_pid_ends_nobody_else(tmp_path, monkeypatch):
    process = ServerProcess([sys.executable, "-c", "import time; time.sleep(600)"], os.environ, tmp_path / "log", 1.0)
    program = psutil.Process(process.pid)
    supervisor = psutil.Process(program.ppid())
    supervisor.suspend()  # so that it does not end in time, and is killed
    process.pid, hit = 0, []
    process.grace = -14.0  # it is given a second
    end_group = os.killpg
    monkeypatch.setattr(os, "killpg", lambda group, number: (hit.append(group), group and end_group(group, number)))
    process.end()
    assert hit == [supervisor.pid]
    monkeypatch.undo()
    with suppress(psutil.NoSuchProcess):  # a supervisor that was killed itself has ended nobody
        program.kill()


def test_a_program_that_does_not_exist(tmp_path):
    process = ServerProcess([str(tmp_path / "nothing")], os.environ, tmp_path / "log", 1.0)
    wait_until(lambda: not process.alive, "it has not ended", 60)
    assert "FileNotFoundError" in process.tail()
    process.end()


def test_ports():
    ports = find_ports("127.0.0.1", 3)
    assert len(set(ports)) == 3
    assert is_free("127.0.0.1", ports[0])
    import socket

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", ports[0]))
        taken.listen()
        assert not is_free("127.0.0.1", ports[0])


ROUTER = """\
#!{python}
import sys, http.server, pathlib
words = dict(zip(sys.argv, sys.argv[1:]))
tries = pathlib.Path({tries!r})
with tries.open("a") as file:
    file.write(words["--port"] + "\\n")
if len(tries.read_text().splitlines()) <= {taken}:
    sys.exit("Error: Address already in use (os error 98)")

class Ready(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.send_header("content-length", "0")
        self.end_headers()

http.server.HTTPServer((words["--host"], int(words["--port"])), Ready).serve_forever()
"""


@pytest.mark.parametrize(("taken", "starts"), [(2, True), (3, False)])
def test_a_router_whose_port_was_taken_meanwhile_tries_another_one(tmp_path: Path, taken: int, starts: bool) -> None:
    program, tries = tmp_path / "python", tmp_path / "tries"
    program.write_text(ROUTER.format(python=sys.executable, tries=str(tries), taken=taken))
    program.chmod(0o755)
    options = launch_options(python=str(program), router="sticky")

    async def start() -> None:
        router, client = await start_router(options, ["http://127.0.0.1:1"], 1)
        try:
            assert await client.is_ready("/readiness")
        finally:
            await client.close()
            router.end()

    if starts:
        asyncio.run(start())
    else:
        with pytest.raises(ServerLost, match="Address already in use"):
            asyncio.run(start())
    ports = tries.read_text().splitlines()
    assert len(ports) == min(taken + 1, 3) == len(set(ports))
