"""Launches servers and the router in front of them: command, environment, port and process.

A launched program runs under a supervisor (`processes.supervise`), which ends it and all its descendants when this
process ends in any way. A server can be restarted; `servers` decides when.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from geo_sokoban_pipeline.config.server import ServerOptions
from geo_sokoban_pipeline.policies.weights import published_specs
from geo_sokoban_pipeline.processes import kill_group, supervised
from geo_sokoban_pipeline.rollout.engines.sglang.client import SPARE_TOKENS, ServerLost
from geo_sokoban_pipeline.rollout.engines.sglang.wire import ban
from geo_sokoban_pipeline.runs.policy_folder import link_policy
from geo_sokoban_pipeline.runs.scratch import Scratch
from geo_sokoban_pipeline.seeding import content_hash

if TYPE_CHECKING:
    from geo_sokoban_pipeline.policies.policy import Policy

_ROUTER_POLICIES = {"cache_aware": "cache_aware", "sticky": "manual"}
# Variables that point a program to this process's libraries. Without PYTHONDONTWRITEBYTECODE a server stores its
# compiled modules and starts three times as fast.
_OWN = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "PYTHONSTARTUP", "PYTHONDONTWRITEBYTECODE")
# Settings of torch's memory on a GPU, by their two names.
ALLOCATORS = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
_PORT_TAKEN = "address already in use"
_TAIL_LINES, _TAIL_BYTES = 15, 16_384
_MARGIN = 15.0  # seconds for the supervisor, on top of the program's grace


class OwnServer(Protocol):
    """A server that this run starts, restarts and ends, wherever its process is.

    Attributes:
        number: of the server, from 0.
        released: memory that its process has given up; doing so twice, or taking it back twice, would end it.
    """

    options: ServerOptions
    number: int
    released: set[str]

    @property
    def url(self) -> str:
        """Address of the server."""

    @property
    def pid(self) -> int:
        """Process id of the server on its machine; 0: it has none."""

    @property
    def log(self) -> Path:
        """Log file of its output, on its machine."""

    @property
    def alive(self) -> bool:
        """Whether its process runs."""

    def start(self, *, same_port: bool = True) -> None:
        """Start or restart the server; returns before it is ready.

        Args:
            same_port: keep the previous port; False takes a free one unless the options name the ports.

        Raises:
            ServerLost: it cannot be started.
        """

    def lost(self) -> str | None:
        """Why its process has ended, with the last log lines; None while it runs."""

    def found_port_taken(self) -> bool:
        """Whether the process exited because its port was taken."""

    def end(self) -> None:
        """End the server; it cannot be started again."""


@dataclass(frozen=True)
class ServedModel:
    """The facts about a policy that the command of a server needs; picklable.

    Attributes:
        dtype: of the policy; used if the options name none.
        longest: tokens of its longest conversation.
        bias: default logit bias of requests, because the router removes it from them.
    """

    dtype: str
    longest: int
    bias: Mapping[str, float]

    @classmethod
    def of(cls, policy: Policy) -> ServedModel:
        """Of a policy, which may be empty."""
        dtype = str(policy.model.dtype).removeprefix("torch.")
        longest = int(policy.model.config.text_config.max_position_embeddings)
        return cls(dtype, longest, ban(policy.banned_ids.tolist()))


class ServerProgram:
    """A server as a process below this one; see `OwnServer`.

    Args:
        folder: of the policy.
        logs: folder of its log.
        gpu: number of its first GPU, of those that it sees. None: it follows from the options.
        variables: from which its environment is made. None: those of this process.
    """

    def __init__(
        self,
        options: ServerOptions,
        model: ServedModel,
        folder: Path,
        number: int,
        logs: Path,
        gpu: int | None = None,
        variables: Mapping[str, str] | None = None,
    ) -> None:
        self.options = options
        self.number = number
        self.released: set[str] = set()
        self._model, self._folder, self._logs, self._gpu = model, folder, logs, gpu
        self._variables = os.environ if variables is None else variables
        self._process: ServerProcess | None = None
        # Two threads may start and end the server at once; after `end` no start has an effect.
        self._lock = threading.Lock()
        self._ended = False
        self.port = options.ports[number] if options.ports is not None else find_ports(options.host, 1)[0]

    @property
    def url(self) -> str:
        """Address of the server."""
        return f"http://{self.options.reachable_host}:{self.port}"

    @property
    def pid(self) -> int:
        """Process id of the server, which leads its process group."""
        return self._process.pid if self._process is not None else 0

    @property
    def log(self) -> Path:
        """Log file of its output."""
        return self._logs / f"server_{self.number}.log"

    @property
    def alive(self) -> bool:
        """Whether its process runs."""
        return self._process is not None and self._process.alive

    def start(self, *, same_port: bool = True) -> None:
        """Start or restart the server; returns before it is ready.

        Args:
            same_port: keep the previous port; False takes a free one unless the options name the ports.

        Raises:
            ServerLost: its interpreter is missing, or its port is taken.
        """
        with self._lock:
            if self._ended:
                return
            self._end_process()
            if not same_port and self.options.ports is None:
                self.port = find_ports(self.options.host, 1)[0]
            _check_start(self.options, self.port)
            command = server_command(self.options, self._folder, self._model, self.port, self.number, gpu=self._gpu)
            environment = server_environment(self.options, self._variables)
            self._process = ServerProcess(command, environment, self.log, self.options.faults.grace)
            self.released.clear()

    def lost(self) -> str | None:
        """Exit code and last log lines of an exited process; None while it runs."""
        return None if self._process is None else self._process.lost()

    def found_port_taken(self) -> bool:
        """Whether the process exited because its port was taken."""
        return self._process is not None and self._process.found_port_taken()

    def end(self) -> None:
        """End the server; it cannot be started again."""
        with self._lock:
            self._ended = True
            self._end_process()

    def _end_process(self) -> None:
        if self._process is not None:
            self._process.end()
            self._process = None


class LaunchedServer(ServerProgram):
    """A server that this process launches from a policy."""

    def __init__(self, options: ServerOptions, policy: Policy, number: int) -> None:
        from geo_sokoban_pipeline.policies.policy import save_policy  # needs torch, without which actors start programs

        self._scratch = Scratch()
        folder = self._scratch.path / "policy"
        folder.mkdir()
        if policy.folder is not None and policy.folder.is_dir():
            link_policy(policy.folder, {})(folder)
        else:
            save_policy(policy, folder)
        logs = self._scratch.path if options.log_folder is None else Path(options.log_folder)
        super().__init__(options, ServedModel.of(policy), folder, number, logs)

    def end(self) -> None:
        super().end()
        self._scratch.cleanup()


class ServerProcess:
    """A program under supervision.

    Args:
        command: program and arguments.
        environment: its complete environment.
        log: file to which its output is appended.
        grace: seconds between its termination and its kill.
    """

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], log: Path, grace: float) -> None:
        self.log = log
        self.grace = grace
        log.parent.mkdir(parents=True, exist_ok=True)
        self._began_at = log.stat().st_size if log.exists() else 0
        with log.open("ab") as output:
            self._supervisor = subprocess.Popen(
                supervised(list(command), grace),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=output,
                env=dict(environment),
                start_new_session=True,
            )
        assert self._supervisor.stdout is not None
        first = self._supervisor.stdout.readline().split()
        self.pid = int(first[1]) if len(first) == 2 else 0

    @property
    def alive(self) -> bool:
        """Whether the program runs."""
        return self._supervisor.poll() is None

    @property
    def exit_code(self) -> int | None:
        """Its exit code, 128 + n after signal n; None while it runs."""
        return self._supervisor.poll()

    def lost(self) -> str | None:
        """Exit code and last log lines, once it has exited; None while it runs."""
        return None if self.alive else f"exit code {self.exit_code}; last lines of {self.log}:\n{self.tail()}"

    def found_port_taken(self) -> bool:
        """Whether it has exited because its port was taken."""
        if self.alive:
            return False
        with self.log.open("rb") as file:
            file.seek(self._began_at)
            return any(_PORT_TAKEN in line.decode("utf-8", "replace").lower() for line in file)

    def tail(self) -> str:
        """Last lines of its output."""
        with self.log.open("rb") as file:
            file.seek(max(self._began_at, self.log.stat().st_size - _TAIL_BYTES))
            lines = file.read().decode("utf-8", "replace").splitlines()
        return "\n".join(line[:300] for line in lines[-_TAIL_LINES:])

    def end(self) -> None:
        """End the program and its descendants, and wait for that."""
        if self._supervisor.stdin is not None and not self._supervisor.stdin.closed:
            self._supervisor.stdin.close()
        try:
            self._supervisor.wait(self.grace + _MARGIN)
        except subprocess.TimeoutExpired:
            kill_group(self.pid)
            kill_group(self._supervisor.pid)
            self._supervisor.wait()
        if self._supervisor.stdout is not None:
            self._supervisor.stdout.close()


class LaunchedRouter(ServerProcess):
    """SGLang's router in front of servers."""

    def __init__(self, options: ServerOptions, workers: Sequence[str]) -> None:
        self._scratch = Scratch()
        folder = Path(options.log_folder) if options.log_folder is not None else self._scratch.path
        port, metrics_port = find_ports(options.host, 2)
        _check_start(options, port)
        self.url = f"http://{options.reachable_host}:{port}"
        command = router_command(options, workers, port, metrics_port)
        environment = server_environment(options, os.environ)
        super().__init__(command, environment, folder / "router.log", options.faults.grace)

    def end(self) -> None:
        super().end()
        self._scratch.cleanup()


def kind_of(options: ServerOptions, policy: Policy) -> str:
    """Hash of all that interchangeable servers have in common: everything but their weights."""
    # Not the whole configuration: saving a policy changes it.
    shape = json.dumps([(name, spec.shape) for name, spec in published_specs(policy.model).items()])
    left_out = {"count", "update", "bucket_bytes", "update_folder", "faults", "router", "environment"}
    settings = options.model_dump_json(exclude=left_out)
    variables = json.dumps(options.hashed_environment, sort_keys=True)
    return content_hash(shape, settings, variables, *policy.codec.hashes().values())


def server_command(
    options: ServerOptions,
    folder: Path,
    model: ServedModel,
    port: int,
    number: int,
    *,
    gpu: int | None = None,
) -> list[str]:
    """Command of server `number`.

    Args:
        folder: of the policy.
        gpu: number of the first GPU. None: servers follow each other from `first_gpu` on.
    """
    if gpu is None:
        gpu = options.first_gpu + number * options.tensor_parallel
    flags: dict[str, object | None] = {
        "--model-path": folder,
        "--host": options.host,
        "--port": port,
        "--device": options.device,
        "--dtype": options.dtype or model.dtype,
        "--tp-size": options.tensor_parallel,
        "--random-seed": options.random_seed + number,
        "--mem-fraction-static": options.memory_fraction,
        "--max-total-tokens": options.max_total_tokens,
        "--context-length": options.context_tokens and min(options.context_tokens + SPARE_TOKENS, model.longest),
        "--attention-backend": options.attention_backend,
        "--mm-attention-backend": options.mm_attention_backend,
        "--preferred-sampling-params": json.dumps({"logit_bias": dict(model.bias)}),
        "--base-gpu-id": gpu if options.device == "cuda" else None,
    }
    words = [str(_interpreter(options)), "-m", "sglang.launch_server"]
    words += [str(word) for name, value in flags.items() if value is not None for word in (name, value)]
    if sizes := options.cuda_graph_batch_sizes:
        words += ["--cuda-graph-bs-decode", *map(str, sizes)]
    switches = {
        "--disable-cuda-graph": sizes is not None and not sizes,
        "--trust-remote-code": options.trust_remote_code,
        "--enable-deterministic-inference": options.deterministic,
        "--enable-memory-saver": options.colocated and options.device == "cuda",
    }
    words += [switch for switch, is_on in switches.items() if is_on]
    # An idle scheduler would keep a core busy; a warm-up would sample before the server has the run's weights.
    return [*words, "--sleep-on-idle", "--skip-server-warmup", *options.extra_arguments]


def router_command(options: ServerOptions, workers: Sequence[str], port: int, metrics_port: int) -> list[str]:
    """Command of the router in front of servers."""
    return [
        *(str(_interpreter(options)), "-m", "sglang_router.launch_router"),
        *("--worker-urls", *workers),
        *("--host", options.host, "--port", str(port), "--prometheus-port", str(metrics_port)),
        *("--policy", _ROUTER_POLICIES[options.router], "--assignment-mode", "min_group"),
        *("--request-timeout-secs", str(int(options.faults.reply_timeout) + 1)),
        # This process restarts servers and retries requests itself: a restarted server is used at once, and a busy one
        # that is slow to answer health checks stays in use.
        *("--disable-retries", "--disable-circuit-breaker", "--disable-health-check"),
        *("--log-level", "warn"),
    ]


def server_environment(options: ServerOptions, own: Mapping[str, str]) -> dict[str, str]:
    """Environment of launched programs, made from that of this process."""
    kept = {name: value for name, value in own.items() if name not in _OWN}
    if options.colocated:  # what gives up memory (torch_memory_saver) does not start beside expandable segments
        for name in kept.keys() & ALLOCATORS:
            words = kept[name].split(",")
            kept[name] = ",".join(word for word in words if not word.strip().startswith("expandable_segments"))
    fixed = {
        "HF_HUB_OFFLINE": "1",  # the policy is a folder
        # SGLang caches image features by image and keeps them across updates: with trained vision weights, a known
        # image would get features of old weights.
        "SGLANG_VLM_CACHE_SIZE_MB": "0",
        "SGLANG_RETURN_ORIGINAL_LOGPROB": "0",  # log-probs after temperature
        "PYTHONUNBUFFERED": "1",
    }
    if options.device == "cpu":
        fixed |= {"SGLANG_USE_CPU_ENGINE": "1", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    return {**kept, **fixed, **{name: value.get_secret_value() for name, value in options.environment.items()}}


def find_ports(host: str, count: int) -> list[int]:
    """Distinct ports that are free at the moment."""
    held = [_bound(host, 0) for _ in range(count)]
    ports = [int(one.getsockname()[1]) for one in held]
    for one in held:
        one.close()
    return ports


def is_free(host: str, port: int) -> bool:
    """Whether a port is free."""
    try:
        _bound(host, port).close()
    except OSError:
        return False
    return True


def _bound(host: str, port: int) -> socket.socket:
    one = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    try:
        if port:  # as servers do, so that a closed connection does not block the port
            one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        one.bind((host, port))
    except BaseException:
        one.close()
        raise
    return one


def _check_start(options: ServerOptions, port: int) -> None:
    if not Path(options.python).expanduser().is_file():
        raise ServerLost(
            f"rollout.server.python={options.python}: no such interpreter. `make sglang-env` makes the servers' "
            "environment, `make sglang-env SGLANG=gpu` the one for NVIDIA GPUs; or name another interpreter, or attach "
            "to running servers."
        )
    if not is_free(options.host, port):
        raise ServerLost(
            f"rollout.server.ports: port {port} of {options.host} is taken. Stop the program that listens there, give "
            "another port, or null for free ones."
        )


def _interpreter(options: ServerOptions) -> Path:
    # Not resolved: Python finds its virtual environment by the unresolved link.
    return Path(options.python).expanduser().absolute()
