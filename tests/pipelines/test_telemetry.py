"""A run sends no usage data: neither Kedro's plugin nor MLflow opens a connection, by whichever way a run starts."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from runs import ROOT

WATCHED = """
import atexit, os, socket, sys
asked = []
atexit.register(lambda: print("asked for:", asked))  # registered first, so that it runs after what libraries send last

def refuse(name, *words, **options):
    asked.append(name)
    raise OSError("no network")

def refuse_connection(made, address):
    asked.append(address)
    raise OSError("no network")

socket.getaddrinfo = refuse
socket.socket.connect = refuse_connection
"""
COMMAND = """
sys.argv = ["kedro", "run", "--env=test", "--pipelines=train_sokoban", "--params=tracking.enabled=true"]
sys.argv += ["--from-nodes=train_sokoban.write_report"]
from kedro.framework.cli import main
main()
"""
SESSION = """
from kedro.framework.session import KedroSession
from kedro.framework.startup import bootstrap_project
bootstrap_project(".")
before = dict(os.environ)
with KedroSession.create(".", env="test", runtime_params={"tracking": {"enabled": True}}) as session:
    session.run(pipeline_names=["train_sokoban"], from_nodes=["train_sokoban.write_report"])
assert "mlflow" in sys.modules
changed = {name for name in {*before, *os.environ} if before.get(name) != os.environ.get(name)}
assert not {name for name in changed if "TELEMETRY" in name or "LOGGING" in name or "TRACK" in name}, changed
"""
# With these, libraries send nothing for reasons of their own.
AUTOMATIC = ("CI", "PYTEST_CURRENT_TEST", "GITHUB_ACTIONS", "DO_NOT_TRACK", "KEDRO_DISABLE_TELEMETRY")


@pytest.mark.slow
def test_nothing_is_sent(stored_run, tmp_path: Path) -> None:
    """By a session first, then by the command in the same process."""
    environment = {name: value for name, value in os.environ.items() if name not in AUTOMATIC}
    environment |= {"GEO_SOKOBAN_DATA_ROOT": str(stored_run("sokoban").root), "PYTHONPATH": str(ROOT / "src")}
    words = [sys.executable, "-c", WATCHED + SESSION + COMMAND]
    done = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "asked for: []"
