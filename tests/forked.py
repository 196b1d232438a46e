"""Commands in forks of a process that has imported the heavy libraries: the seconds of those imports are paid once.

`ForkedCommand` behaves like the `subprocess.Popen` of the same words. Arguments, environment, folder, output, signals
and exit code are the command's own; only modules of other packages are there before it begins. What a library reads
from the environment while it is imported is therefore not heard, and memory is shared with other forks: tests of
either take a process of their own. A fork starts its ranks and workers as any command does, as forks of the same
process. Each fork imports this module, so it imports nothing of the project.
"""

from __future__ import annotations

import atexit
import gc
import os
import runpy
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from multiprocessing import forkserver, get_context, resource_tracker
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path

# What `kedro run --pipelines=train_<task>` imports before its last node is done.
HEAVY = [
    "aiohttp",
    "ibis",
    "kedro.framework.cli.cli",
    "kedro.framework.session",
    "kedro.runner",
    "kedro_datasets.pandas",
    "matplotlib.figure",
    "megatron.core.models.gpt.gpt_model",
    "omegaconf",
    "pandas",
    "pyarrow.dataset",
    "pyarrow.parquet",
    "requests",
    "rich.progress",
    "sympy",
    "torch._dynamo",
    "torch.distributed.tensor",
    "transformers.models.qwen2_vl.image_processing_pil_qwen2_vl",
    "transformers.models.qwen3_vl.modeling_qwen3_vl",
]

_SERVER = forkserver._forkserver  # type: ignore[attr-defined]
if _SERVER._forkserver_alive_fd is not None and _SERVER._forkserver_pid is None:
    # This process is a fork. Its own processes are forks of the same server, in place of another one, whose imports
    # take ten seconds: Python looks for a server that this process has started itself.
    _SERVER.ensure_running = resource_tracker.ensure_running


class ForkedCommand:
    """`python -m <words>`, or `python <words>` of a script; its standard output and error are one text."""

    def __init__(self, words: Sequence[str], cwd: Path, env: Mapping[str, str]) -> None:
        descriptor, output = tempfile.mkstemp(prefix="command-", suffix=".txt")
        os.close(descriptor)
        self._output = Path(output)
        given = (list(words), str(cwd), dict(env), output)
        self._process: ForkServerProcess = fork_server().Process(target=_run, args=given, name=" ".join(words[:2]))
        self._process.start()
        self.returncode: int | None = None  # minus the signal that ended it

    def communicate(self, timeout: float | None = None) -> tuple[str, None]:
        """Wait for the end; what the command has written, and None in place of standard error.

        Raises:
            subprocess.TimeoutExpired: it still runs after so many seconds.
        """
        if self.returncode is None:
            self._process.join(timeout)
            self.returncode = self._process.exitcode
        output = self._output.read_text(encoding="utf-8", errors="replace") if self._output.exists() else ""
        if self.returncode is None:
            raise subprocess.TimeoutExpired(self._process.name, timeout or 0.0, output)
        self._process.close()  # its descriptors are many commands'
        self._output.unlink(missing_ok=True)
        return output, None

    def kill(self) -> None:
        if self.returncode is None:
            self._process.kill()


def fork_server() -> ForkServerContext:
    """The context of `multiprocessing` whose processes are forks; its first process starts the server."""
    context = get_context("forkserver")
    context.set_forkserver_preload(HEAVY)
    return context


def _run(words: list[str], cwd: str, env: dict[str, str], output: str) -> None:
    """The fork's whole life; handlers of `atexit` run, as at the end of an interpreter."""
    gc.freeze()  # what is not visited is not copied
    descriptor = os.open(output, os.O_WRONLY | os.O_APPEND)
    for number in (1, 2):
        os.dup2(descriptor, number)
    os.environ.clear()
    os.environ.update(env)
    os.chdir(cwd)
    sys.argv = list(words)
    sys.path[:0] = env.get("PYTHONPATH", "").split(os.pathsep)
    try:
        if words[0].endswith(".py"):
            sys.path.insert(0, os.path.dirname(os.path.abspath(words[0])))
            runpy.run_path(words[0], run_name="__main__")
        else:
            runpy.run_module(words[0], run_name="__main__", alter_sys=True)
    finally:
        atexit._run_exitfuncs()
