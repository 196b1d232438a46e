"""Processes that are forks of one that has imported the heavy libraries: the seconds of those imports are paid once.

`ForkedCommand` behaves like the `subprocess.Popen` of the same words. Arguments, environment, folder, output, signals
and exit code are the command's own; only modules of other packages are there before it begins. What a library reads
from the environment while it is imported is therefore not heard, and memory is shared with other forks: tests of
either take a process of their own. The ranks and workers of a command are forks of the same server as those of the
tests, which is the parent of all in the eyes of the system. Each fork imports this module, so it imports nothing of the
project.
"""

from __future__ import annotations

import atexit
import gc
import os
import runpy
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from multiprocessing import forkserver, get_context
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from typing import Any

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


class ForkedCommand:
    """`python -m <words>`, whose standard output and error are one text."""

    def __init__(self, words: Sequence[str], cwd: Path, env: Mapping[str, str]) -> None:
        descriptor, output = tempfile.mkstemp(prefix="command-", suffix=".txt")
        os.close(descriptor)
        self._output = Path(output)
        server = fork_server()
        self._process: ForkServerProcess = server.Process(
            target=_run_module, args=(list(words), str(cwd), dict(env), output, _address()), name=" ".join(words[:2])
        )
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


def start_fork(target: Callable[..., Any], *args: Any, daemon: bool = False) -> ForkServerProcess:
    """A process that calls a function; both must pickle. Ranks and workers that it starts are forks too."""
    process = fork_server().Process(target=_run_function, args=(_address(), target, args), daemon=daemon)
    process.start()
    return process


@cache
def fork_server() -> ForkServerContext:
    """The context of `multiprocessing` whose processes are forks."""
    context = get_context("forkserver")
    context.set_forkserver_preload(HEAVY)
    return context


def _run_module(words: list[str], cwd: str, env: dict[str, str], output: str, address: str) -> None:
    """The fork's whole life; it ends as an interpreter does, so that handlers of `atexit` run."""
    descriptor = os.open(output, os.O_WRONLY | os.O_APPEND)
    _take_over(env, cwd, [descriptor] * 2)
    sys.argv = list(words)
    sys.path[:0] = env.get("PYTHONPATH", "").split(os.pathsep)
    code = 0
    try:
        _join(address)
        runpy.run_module(words[0], run_name="__main__", alter_sys=True)
    except SystemExit as ending:
        code = ending.code if isinstance(ending.code, int) else int(ending.code is not None)
    except BaseException:
        traceback.print_exc()
        code = 1
    finally:
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


def _run_function(address: str, target: Callable[..., Any], args: Sequence[Any]) -> None:
    _join(address)
    target(*args)


def _take_over(env: Mapping[str, str], cwd: str, output: Sequence[int]) -> None:
    """Take environment, folder, standard output and error of who has asked for this fork."""
    # What has been imported is neither visited nor copied, not even by a training that first unfreezes what it froze.
    gc.freeze()
    gc.unfreeze = _keep_frozen
    for number, descriptor in enumerate(output, start=1):
        os.dup2(descriptor, number)
    os.environ.clear()
    os.environ.update(env)
    os.chdir(cwd)


def _keep_frozen() -> None:
    """In place of `gc.unfreeze`, which knows all or nothing."""


def _address() -> str:
    """Address of the server of the forks, which Python tells nobody."""
    fork_server()
    forkserver.ensure_running()
    address: str = forkserver._forkserver._forkserver_address  # type: ignore[attr-defined]
    return address


def _join(address: str) -> None:
    """In a fork, further ones are of the same server; Python would start another one."""
    server: Any = forkserver._forkserver  # type: ignore[attr-defined]
    server._forkserver_address, server.ensure_running = address, lambda: None
