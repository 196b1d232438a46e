"""SGLang servers of a run: their environment, their ports, and settings that the GPUs here cannot compute.

Nothing is launched. What is installed for the servers is asked of their own interpreter, because it is not this one.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path

from geo_sokoban_pipeline.options.server import ServerOptions
from geo_sokoban_pipeline.options.training import TrainOptions
from geo_sokoban_pipeline.preflight.checks import Check
from geo_sokoban_pipeline.preflight.network import Server

_GROUP = "servers"
_TESTED = "0.5.21"
_PACKAGES = ("sglang", "sglang-router", "torch", "nvidia-cudnn-cu12")
_ASK = (
    "import importlib.metadata as m, json, sys\n"
    "found = {d.metadata['Name'].lower(): d.version for d in m.distributions()}\n"
    "print(json.dumps({name: found.get(name) for name in sys.argv[1:]}))"
)
_BLACKWELL = 10  # compute capability from which there is no flash attention 3
_SLOW_CONVOLUTION_BELOW, _FAST_CUDNN = (2, 10), (9, 16)


def needed_sampling_servers(run: str, options: TrainOptions) -> list[Server]:
    """Servers that a run is to attach to."""
    server = options.rollout.server
    if options.rollout.engine != "sglang" or server.mode != "attach":
        return []
    way_out = f"start the server, or let the run launch one: {run}.rollout.server.mode=launch"
    login = f"name the environment variable with its API key in {run}.rollout.server.api_key_variable"
    # A variable that is not set is a finding of `check_sampling_servers`.
    key = None if server.api_key_variable is None else os.environ.get(server.api_key_variable)
    header = {"Authorization": f"Bearer {key.strip()}"} if key else {}
    # Its first page is not found, and asks for the key nevertheless.
    return [Server("SGLang", url, "failure", way_out, login, header) for url in server.urls]


def check_sampling_servers(
    run: str, options: TrainOptions, longest: int | None = None, gpus: list[int] | None = None
) -> list[Check]:
    """Findings about the servers that a run would launch; nothing where it launches none.

    Args:
        run: namespace of the run, for the names in the messages.
        longest: tokens of the longest episode; None: not known.
        gpus: compute capability (major) of each GPU; None: as torch says.

    Raises:
        ValueError: the variable of the servers' API key is not set.
    """
    server = options.rollout.server
    if options.rollout.engine != "sglang":
        return []
    name = f"{run}.rollout.server"
    found = list(_check_cache(name, options, longest))
    if server.mode == "attach":
        server.api_key()
        return [*found, _note_pictures(name)]
    versions = read_versions(server)
    if versions is None:
        text = f"{name}.python={server.python}: no interpreter that runs"
        return [*found, Check(_GROUP, "environment", "failure", text, "make sglang-env")]
    found += check_versions(name, server, versions)
    found += _check_ports(name, server)
    if server.device == "cuda":
        found += check_gpus(name, server, _capabilities() if gpus is None else gpus)
    return found


def check_launch(run: str, options: TrainOptions) -> list[Check]:
    """What of `check_sampling_servers` is known without starting their interpreter.

    Raises:
        ValueError: the variable of the servers' API key is not set.
    """
    server = options.rollout.server
    name = f"{run}.rollout.server"
    if options.rollout.engine != "sglang":
        return []
    if server.mode == "attach":
        server.api_key()
        return []
    if shutil.which(str(Path(server.python).expanduser())) is None:
        text = f"{name}.python={server.python}: no interpreter that runs"
        return [Check(_GROUP, "environment", "failure", text, "make sglang-env")]
    return list(_check_ports(name, server))


def read_versions(server: ServerOptions) -> dict[str, str | None] | None:
    """Versions of the packages that matter in the servers' environment; None where there is none."""
    python = Path(server.python).expanduser().absolute()
    try:
        done = subprocess.run(
            [str(python), "-c", _ASK, *_PACKAGES], capture_output=True, text=True, check=True, timeout=60
        )
        versions: dict[str, str | None] = json.loads(done.stdout)
    except (OSError, subprocess.SubprocessError, json.JSONDecodeError):
        return None
    return versions


def check_versions(name: str, server: ServerOptions, versions: Mapping[str, str | None]) -> list[Check]:
    """Findings about what is installed for the servers."""
    sglang, torch, cudnn = versions.get("sglang"), versions.get("torch"), versions.get("nvidia-cudnn-cu12")
    if sglang is None or torch is None:
        text = f"{name}.python={server.python}: no sglang there" if sglang is None else "no torch beside sglang"
        return [Check(_GROUP, "environment", "failure", text, "make sglang-env")]
    if server.router != "none" and versions.get("sglang-router") is None:
        text = f"{name}.router={server.router}: no sglang-router in that environment"
        return [Check(_GROUP, "router", "failure", text, "make sglang-env, or router=none")]
    found = []
    if sglang != _TESTED:
        text = f"sglang {sglang}; this project is tested with {_TESTED}"
        found.append(Check(_GROUP, "environment", "warning", text, "make sglang-env"))
    old = _numbers(torch) < _SLOW_CONVOLUTION_BELOW and (cudnn is None or _numbers(cudnn) < _FAST_CUDNN)
    if server.device == "cuda" and old:
        text = f"torch {torch} with cuDNN {cudnn or 'unknown'}: the vision tower's convolution is very slow"
        way_out = "install nvidia-cudnn-cu12==9.16.0.29 there, or torch 2.10 or later"
        found.append(Check(_GROUP, "cuDNN", "failure", text, way_out))
    return found or [Check(_GROUP, "environment", "ok", f"sglang {sglang}, torch {torch}")]


def check_gpus(name: str, server: ServerOptions, capabilities: list[int]) -> list[Check]:
    """Findings about GPUs: as many as the servers take, and attentions that they have."""
    wanted = server.count * server.tensor_parallel
    if len(capabilities) < wanted:
        text = f"{name}.count={server.count} servers of {server.tensor_parallel} GPUs; {len(capabilities)} are visible"
        return [Check(_GROUP, "GPUs", "failure", text, "lower count or tensor_parallel, or device=cpu")]
    found = []
    for field in ("attention_backend", "mm_attention_backend"):
        chosen = getattr(server, field)
        if chosen == "fa3" and max(capabilities, default=0) >= _BLACKWELL:
            text = f"{name}.{field}=fa3: this GPU has no flash attention 3"
            other = "sdpa" if field.startswith("mm") else "triton"
            found.append(Check(_GROUP, "attention", "failure", text, f"set {field}={other}"))
    return found or [Check(_GROUP, "GPUs", "ok", f"{wanted} of {len(capabilities)}")]


def _check_ports(name: str, server: ServerOptions) -> Iterator[Check]:
    from geo_sokoban_pipeline.rollout.engines.sglang.ports import is_free

    taken = [port for port in server.ports or () if not is_free(server.host, port)]
    if taken:
        text = f"{name}.ports: {', '.join(map(str, taken))} of {server.host} are taken"
        yield Check(_GROUP, "ports", "failure", text, "give others, or null for free ones")


def _check_cache(name: str, options: TrainOptions, longest: int | None) -> Iterator[Check]:
    server, pool = options.rollout.server, options.rollout.server.max_total_tokens
    if longest is None or pool is None:
        return
    servers = server.count if server.mode == "launch" else len(server.urls)
    together = options.grpo.groups * options.grpo.group_size * longest
    text = f"{name}.max_total_tokens={pool}: "
    if longest > pool:
        yield Check(_GROUP, "cache", "failure", f"{text}an episode has up to {longest}", "raise it")
    elif together > pool * servers:
        yield Check(
            _GROUP,
            "cache",
            "warning",
            f"{text}an iteration's episodes have up to {together}, so that turns are read again",
            "raise it where memory allows",
        )


def _note_pictures(name: str) -> Check:
    text = f"{name}.urls: given servers do not say whether they cache picture features, which outlive vision weights"
    return Check(_GROUP, "picture cache", "warning", text, "start them with SGLANG_VLM_CACHE_SIZE_MB=0")


def _capabilities() -> list[int]:
    import torch

    return [torch.cuda.get_device_capability(number)[0] for number in range(torch.cuda.device_count())]


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.partition("+")[0].split(".")[:2] if part.isdigit())
