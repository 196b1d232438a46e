"""Servers of a run: servers that it needs over the network, and SGLang servers that it launches."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import urllib.error
import urllib.request
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from http.client import HTTPException
from pathlib import Path
from urllib.parse import quote, unquote, urlsplit, urlunsplit

from geo_sokoban_pipeline.config.grpo import TrainOptions
from geo_sokoban_pipeline.config.server import ServerOptions
from geo_sokoban_pipeline.envs.adapters import openenv
from geo_sokoban_pipeline.envs.inspection import Check, State
from geo_sokoban_pipeline.envs.plugins import adapter_of
from geo_sokoban_pipeline.parameters import ProjectParameters
from geo_sokoban_pipeline.preflight.checks import find_cases

TIMEOUT = 5.0  # seconds that a server has to answer
_GROUP = "network"
_FOUND, _REFUSED, _UNKNOWN, _NO_SERVER = 200, (401, 403), 404, (502, 503, 504)


@dataclass(frozen=True)
class NeededServer:
    """A server that a run needs.

    Attributes:
        name: for the table.
        uri: `http(s)://host[:port][/path]`.
        state: of the finding if it does not answer.
        way_out: what to do if it does not answer.
        login: what to do if it refuses this user.
        header: login header, never logged; None: MLflow's login, which no other server gets.
    """

    name: str
    uri: str
    state: State
    way_out: str
    login: str
    header: Mapping[str, str] | None = field(default=None, repr=False)


def needed_servers(parameters: ProjectParameters) -> list[NeededServer]:
    """Servers of a run's parameters."""
    uri = parameters.tracking.uri or ""
    if not parameters.tracking.enabled or not uri.startswith(("http://", "https://")):
        return []
    # Only a warning, because a run works without tracking.
    way_out = "start the server, or set tracking.uri=null or tracking.enabled=false"
    login = "set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, or MLFLOW_TRACKING_TOKEN"
    return [NeededServer("MLflow", uri, "warning", way_out, login)]


def check_servers(servers: list[NeededServer], timeout: float = TIMEOUT) -> list[Check]:
    """Whether each server answers and accepts this user.

    Args:
        timeout: seconds to wait for each server.
    """
    return [_check_server(server, timeout) for server in servers] or [Check(_GROUP, "ports", "ok", "none needed")]


def check_keys(parameters: ProjectParameters, run: str, timeout: float, *, has_policy: bool = False) -> list[Check]:
    """Whether the hub's token gives access to all that comes from the hub; tokens are never shown.

    Args:
        run: namespace of the run.
        timeout: seconds to wait for the hub.
        has_policy: the run has stored its own copy of its starting policy.
    """
    options = getattr(parameters, run)
    data, found = getattr(parameters, options.task), []
    if options.policy.source == "hub" and not has_policy:
        found.append(_check_hub("policy", "models", options.policy.path, timeout))
    if data.source == "hub" and not os.path.isdir(data.hub.dataset):
        found.append(_check_hub("data", "datasets", data.hub.dataset, timeout))
    return found or [Check(_GROUP, "keys", "ok", "none needed: nothing comes from the hub")]


def _check_server(server: NeededServer, timeout: float) -> Check:
    shown = _shown(server.uri)
    try:
        parts = urlsplit(server.uri)
        bare = urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))
        code = _status(bare, timeout, _login_header(parts.username) if server.header is None else server.header)
    except TimeoutError:  # it has taken the connection, and may be busy
        text = f"{shown} has not answered for {timeout:g} s"
        return Check(_GROUP, server.name, "warning", text, server.way_out)
    except (OSError, HTTPException, ValueError) as error:
        text = f"{shown} does not answer ({type(error).__name__}: {getattr(error, 'reason', error)})"
        return Check(_GROUP, server.name, server.state, text, server.way_out)
    if code in _REFUSED:
        return Check(_GROUP, server.name, server.state, f"{shown}: refuses this user ({code})", server.login)
    if code in _NO_SERVER:
        return Check(_GROUP, server.name, server.state, f"{shown} does not answer ({code})", server.way_out)
    return Check(_GROUP, server.name, "ok", f"{shown}: answers")


def _shown(uri: str) -> str:
    """Scheme, host and port of an address: its other parts may be secret."""
    scheme, _, rest = uri.partition("://")
    return f"{scheme}://{rest.partition('/')[0].partition('?')[0].rpartition('@')[2]}"


def _check_hub(what: str, kind: str, repository: str, timeout: float) -> Check:
    from huggingface_hub import constants, get_token

    token, name = get_token(), f"keys ({what})"
    given = [name for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN") if os.environ.get(name)]
    shown = f"{given[0]} is set" if given else "with the token of `hf auth login`"
    shown = "no token" if token is None else shown
    if constants.HF_HUB_OFFLINE:
        return Check(_GROUP, name, "skipped", f"{repository}: HF_HUB_OFFLINE is set; {shown}")
    header, code = {"Authorization": f"Bearer {token}"} if token else {}, None
    with suppress(OSError, HTTPException, ValueError):
        code = _status(f"{constants.ENDPOINT}/api/{kind}/{quote(repository)}/auth-check", timeout, header)
    return find_cases(
        _GROUP,
        (code == _FOUND, name, "ok", f"{repository}: the hub accepts this user; {shown}", ""),
        (
            code in _REFUSED,
            name,
            "failure",
            f"{repository}: the hub refuses access ({code}); {shown}",
            "accept its terms on the hub and set HF_TOKEN, or give a local folder",
        ),
        (
            code == _UNKNOWN,
            name,
            "failure",
            f"{repository}: the hub has none of this name, or hides it from this user ({code}); {shown}",
            "check the name, set HF_TOKEN, or give a local folder",
        ),
        (
            True,
            name,
            "warning",
            f"{repository}: the hub {'does not answer' if code is None else f'answers {code}'}; {shown}",
            "check the network and try again, or give a local folder; cached files are used",
        ),
    )[0]


def _status(uri: str, timeout: float, header: Mapping[str, str]) -> int:
    """Status code of a GET."""
    try:
        with urllib.request.urlopen(urllib.request.Request(uri, headers=dict(header)), timeout=timeout) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return int(error.code)


def _login_header(user: str | None) -> dict[str, str]:
    """Login of MLflow from the environment; the address may contain the user, but no password."""
    if token := os.environ.get("MLFLOW_TRACKING_TOKEN"):
        return {"Authorization": f"Bearer {token}"}
    user = os.environ.get("MLFLOW_TRACKING_USERNAME") or unquote(user or "")
    if user and (password := os.environ.get("MLFLOW_TRACKING_PASSWORD")):
        return {"Authorization": f"Basic {base64.b64encode(f'{user}:{password}'.encode()).decode()}"}
    return {}


def needed_environment_servers(run: str, options: TrainOptions) -> list[NeededServer]:
    """Servers that hold a run's environments."""
    if adapter_of(options.env.factory) != openenv.SCHEME:
        return []
    way_out = f"start the server, or correct its address in {run}.env.factory"
    url = openenv.http_url(openenv.server_url(options.env.factory))
    return [NeededServer("OpenEnv", url, "failure", way_out, "take a server that needs no login", {})]


# SGLang servers of a run: their environment, their ports, and settings that this machine's GPUs do not support.


_SAMPLING = "servers"
_TESTED = "0.5.21"
_PACKAGES = ("sglang", "sglang-router", "torch", "nvidia-cudnn-cu12")
_LIST_VERSIONS = (
    "import importlib.metadata as m, json, sys\n"
    "found = {d.metadata['Name'].lower(): d.version for d in m.distributions()}\n"
    "print(json.dumps({name: found.get(name) for name in sys.argv[1:]}))"
)
_BLACKWELL = 10  # compute capability from which there is no flash attention 3
_SLOW_CONVOLUTION_BELOW, _FAST_CUDNN = (2, 10), (9, 16)


def needed_sampling_servers(run: str, options: TrainOptions) -> list[NeededServer]:
    """Servers that a run attaches to."""
    server = options.rollout.server
    if options.rollout.engine != "sglang" or server.mode != "attach":
        return []
    way_out = f"start the server, or let the run launch one: {run}.rollout.server.mode=launch"
    login = f"name the environment variable with its API key in {run}.rollout.server.api_key_variable"
    # `check_sampling_servers` reports a variable that is not set.
    key = None if server.api_key_variable is None else os.environ.get(server.api_key_variable)
    header = {"Authorization": f"Bearer {key.strip()}"} if key else {}
    # The root path is not found, but it requires the key nevertheless.
    return [NeededServer("SGLang", url, "failure", way_out, login, header) for url in server.urls]


def check_sampling_servers(
    run: str, options: TrainOptions, longest: int | None = None, gpus: list[int] | None = None
) -> list[Check]:
    """Findings about the SGLang servers of a run; none without SGLang.

    Args:
        run: namespace of the run, for the names in the messages.
        longest: tokens of the longest episode; None: not known.
        gpus: compute capability (major) of each GPU; None: from torch.

    Raises:
        ValueError: the variable of the servers' API key is not set.
    """
    server = options.rollout.server
    if options.rollout.engine != "sglang":
        return []
    name = f"{run}.rollout.server"
    found = _check_cache(name, options, longest)
    if server.mode == "attach":
        server.api_key()
        text = f"{name}.urls: attached servers may cache image features, which become stale when vision weights change"
        return [*found, Check(_SAMPLING, "image cache", "warning", text, "start them with SGLANG_VLM_CACHE_SIZE_MB=0")]
    if options.places_servers:
        text = f"{name}.python={server.python}: on the nodes of a Ray cluster, where each server looks for it"
        return [*found, Check(_SAMPLING, "environment", "skipped", text)]
    if (versions := read_versions(server)) is None:
        return [*found, _no_interpreter(name, server)]
    found += [*check_versions(name, server, versions), *_check_ports(name, server)]
    if server.device == "cuda":
        found += check_gpus(name, server, _capabilities() if gpus is None else gpus)
        found += _check_update(name, options)
    return found


def _no_interpreter(name: str, server: ServerOptions) -> Check:
    text = f"{name}.python={server.python}: no working interpreter"
    return Check(_SAMPLING, "environment", "failure", text, "make sglang-env")


def check_launch(run: str, options: TrainOptions) -> list[Check]:
    """The part of `check_sampling_servers` that does not start the servers' interpreter.

    Raises:
        ValueError: the variable of the servers' API key is not set.
    """
    server, name = options.rollout.server, f"{run}.rollout.server"
    if options.rollout.engine == "sglang" and server.mode == "attach":
        server.api_key()
    if options.rollout.engine != "sglang" or server.mode == "attach" or options.places_servers:
        return []
    if shutil.which(str(Path(server.python).expanduser())) is None:
        return [_no_interpreter(name, server)]
    return _check_ports(name, server)


def read_versions(server: ServerOptions) -> dict[str, str | None] | None:
    """Versions of the relevant packages in the servers' environment; None without a working interpreter."""
    python = Path(server.python).expanduser().absolute()
    try:
        done = subprocess.run(
            [str(python), "-c", _LIST_VERSIONS, *_PACKAGES], capture_output=True, text=True, check=True, timeout=60
        )
        return dict(json.loads(done.stdout))
    except (OSError, subprocess.SubprocessError, json.JSONDecodeError):
        return None


def check_versions(name: str, server: ServerOptions, versions: Mapping[str, str | None]) -> list[Check]:
    """Findings about the packages of the servers' environment."""
    sglang, torch, cudnn = versions.get("sglang"), versions.get("torch"), versions.get("nvidia-cudnn-cu12")
    lacking = find_cases(
        _SAMPLING,
        (
            sglang is None,
            "environment",
            "failure",
            f"{name}.python={server.python}: no sglang there",
            "make sglang-env",
        ),
        (torch is None, "environment", "failure", "no torch beside sglang", "make sglang-env"),
        (
            server.router != "none" and versions.get("sglang-router") is None,
            "router",
            "failure",
            f"{name}.router={server.router}: no sglang-router in that environment",
            "make sglang-env, or router=none",
        ),
    )
    old = _numbers(torch) < _SLOW_CONVOLUTION_BELOW and _numbers(cudnn) < _FAST_CUDNN
    found = lacking[:1] or find_cases(
        _SAMPLING,
        (
            sglang != _TESTED,
            "environment",
            "warning",
            f"sglang {sglang}; this project is tested with {_TESTED}",
            "make sglang-env",
        ),
        (
            server.device == "cuda" and old,
            "cuDNN",
            "failure",
            f"torch {torch} with cuDNN {cudnn or 'unknown'}: the vision tower's convolution is very slow",
            "install nvidia-cudnn-cu12==9.16.0.29 there, or torch 2.10 or later",
        ),
    )
    return found or [Check(_SAMPLING, "environment", "ok", f"sglang {sglang}, torch {torch}")]


def check_gpus(name: str, server: ServerOptions, capabilities: list[int]) -> list[Check]:
    """Findings about GPUs: their number, and the attention backends that they support."""
    wanted = server.first_gpu + server.count * server.tensor_parallel
    first = f" from GPU {server.first_gpu} on" if server.first_gpu else ""
    backends = (("attention_backend", "triton"), ("mm_attention_backend", "sdpa"))
    found = find_cases(
        _SAMPLING,
        (
            len(capabilities) < wanted,
            "GPUs",
            "failure",
            f"{name}.count={server.count} servers of {server.tensor_parallel} GPUs{first}; {len(capabilities)} are "
            "visible",
            "lower count, tensor_parallel or first_gpu, or device=cpu",
        ),
    ) or find_cases(
        _SAMPLING,
        *(
            (
                getattr(server, option) == "fa3" and max(capabilities, default=0) >= _BLACKWELL,
                "attention",
                "failure",
                f"{name}.{option}=fa3: this GPU has no flash attention 3",
                f"set {option}={other}",
            )
            for option, other in backends
        ),
    )
    return found or [Check(_SAMPLING, "GPUs", "ok", f"{wanted} of {len(capabilities)}")]


def _check_update(name: str, options: TrainOptions) -> list[Check]:
    """Whether the way of weights suits the place of the servers; the trainer's ranks have GPUs 0, 1 and so on."""
    from geo_sokoban_pipeline.rollout.engines.sglang.launcher import ALLOCATORS

    server, ranks, on_cpu = options.rollout.server, options.processes, options.policy.device == "cpu"
    expandable = [name for name in ALLOCATORS if "expandable_segments:True" in os.environ.get(name, "")]
    return find_cases(
        _SAMPLING,
        (
            on_cpu and server.update == "ipc",
            "weights",
            "failure",
            f"{name}.update=ipc: the policy is on the CPU (policy.device=cpu)",
            "take update=group",
        ),
        (
            # Those that take turns with ranks are in a group of gloo.
            not (on_cpu or server.colocated) and server.way(on_gpu=True) == "group" and server.first_gpu < ranks,
            "weights",
            "failure",
            f"{name}.update={server.update or 'null'} sends weights by a group, and server 0 shares GPU "
            f"{server.first_gpu} with a rank; nccl takes one process a GPU",
            f"take update=ipc, or first_gpu={ranks}",
        ),
        (
            not on_cpu and server.way(on_gpu=True) == "ipc" and expandable,
            "weights",
            "warning",
            f"{name}.update={server.update or 'null'} lets servers open the trainer's GPU memory (ipc), and "
            f"{', '.join(expandable)} has expandable_segments:True: such memory is open only to a process that may "
            "trace the trainer, which containers and ptrace_scope=1 forbid",
            "leave expandable_segments out, or take update=group",
        ),
    )


def _check_ports(name: str, server: ServerOptions) -> list[Check]:
    from geo_sokoban_pipeline.rollout.engines.sglang.launcher import is_free

    taken = [port for port in server.ports or () if not is_free(server.host, port)]
    text = f"{name}.ports: {', '.join(map(str, taken))} of {server.host} are taken"
    return find_cases(_SAMPLING, (taken, "ports", "failure", text, "give others, or null for free ones"))


def _check_cache(name: str, options: TrainOptions, longest: int | None) -> list[Check]:
    server, pool = options.rollout.server, options.rollout.server.max_total_tokens
    if longest is None or pool is None:
        return []
    servers = server.count if server.mode == "launch" else len(server.urls)
    together = options.grpo.groups * options.grpo.group_size * longest
    text = f"{name}.max_total_tokens={pool}: "
    return find_cases(
        _SAMPLING,
        (longest > pool, "cache", "failure", f"{text}an episode has up to {longest}", "raise it"),
        (
            longest <= pool and together > pool * servers,
            "cache",
            "warning",
            f"{text}an iteration's episodes have up to {together}, so that turns are prefilled again",
            "raise it if memory allows",
        ),
    )


def _capabilities() -> list[int]:
    import torch

    return [torch.cuda.get_device_capability(number)[0] for number in range(torch.cuda.device_count())]


def _numbers(version: str | None) -> tuple[int, ...]:
    """The first two numbers of a version; of none, fewer than those of any."""
    return tuple(int(part) for part in (version or "").partition("+")[0].split(".")[:2] if part.isdigit())
