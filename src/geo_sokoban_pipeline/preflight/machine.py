"""The machine and its libraries: versions, accelerator, dtype, attention and threads.

Listed capabilities do not always work, so they are tried: the dtype on a few numbers, the attention on the model's
class.
"""

from __future__ import annotations

import copy
import importlib.metadata
import importlib.util
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from geo_sokoban_pipeline.config.grpo import TrainOptions
from geo_sokoban_pipeline.config.launcher_env import (
    EXTERNAL_RAY,
    NUM_GPUS,
    VARIABLES,
    Variable,
    is_on,
    unknown_variables,
)
from geo_sokoban_pipeline.envs.inspection import Check, State
from geo_sokoban_pipeline.formats import plural
from geo_sokoban_pipeline.preflight.checks import Subject, find_cases
from geo_sokoban_pipeline.processes import count_cores

_GROUP = "machine"
_PACKAGE = "geo-sokoban-pipeline"
_LIBRARY = "libraries"


def check_libraries(requirements: Iterable[str] | None = None) -> list[Check]:
    """Whether the installed versions are in the project's ranges.

    Args:
        requirements: such as `torch==2.13.0`; None: those of the installed package, without its extras.
    """
    from packaging.requirements import Requirement

    lines = importlib.metadata.requires(_PACKAGE) or [] if requirements is None else requirements
    wanted = [Requirement(line) for line in lines]
    wanted = [one for one in wanted if one.marker is None or one.marker.evaluate({"extra": ""})]
    found = find_cases(
        _LIBRARY,
        *(
            (
                version is None or not one.specifier.contains(version, prereleases=True),
                one.name,
                "failure",
                f"{one.name} {version or 'is not installed'}: {one.specifier or 'any'} is needed",
                "make install, or install it by pip",
            )
            for one, version in ((one, installed_version(one.name)) for one in wanted)
        ),
    )
    return found or [Check(_LIBRARY, "versions", "ok", f"{len(wanted)} libraries are within their ranges")]


def check_torchvision() -> Check:
    """Whether torchvision, if installed, fits the installed torch; otherwise it breaks transformers."""
    from packaging.requirements import Requirement

    version, torch = installed_version("torchvision"), installed_version("torch")
    if version is None or torch is None:
        return Check(_LIBRARY, "torchvision", "ok", "not installed and not needed")
    for wanted in map(Requirement, importlib.metadata.requires("torchvision") or []):
        if wanted.name == "torch" and not wanted.specifier.contains(torch, prereleases=True):
            text = f"torchvision {version} is built for torch{wanted.specifier}, {torch} is installed"
            return Check(_LIBRARY, "torchvision", "failure", text, "pip uninstall torchvision, or take its match")
    return Check(_LIBRARY, "torchvision", "ok", f"{version} fits torch {torch}")


def check_byte_code() -> Check:
    """Whether Python finds, or may store, the compiled libraries; else each process spends ten seconds on them."""
    spec = importlib.util.find_spec("torch")
    if not sys.dont_write_bytecode or spec is None or (spec.cached is not None and Path(spec.cached).exists()):
        return Check(_LIBRARY, "byte code", "ok", "compiled once for all processes")
    text = "PYTHONDONTWRITEBYTECODE is set and torch has no byte code: every process compiles the libraries anew"
    return Check(_LIBRARY, "byte code", "warning", text, "unset the variable for one run, or start with make")


def check_threads(
    threads: int | None, processes: int = 1, cores: int | None = None, load: float | None = None
) -> Check:
    """Whether each of torch's threads has its own core: threads that share one wait for each other.

    Args:
        threads: per process; None: all cores.
        processes: parallel training processes.
        cores: available to this process; None: from the system.
        load: runnable processes of the last minute, this one included; None: from the system.
    """
    cores = count_cores() if cores is None else cores
    load = os.getloadavg()[0] if load is None else load
    each = threads or cores
    used = each * processes
    text = f"{plural(each, 'thread')}{f' in {processes} processes' if processes > 1 else ''}, {plural(cores, 'core')}"
    text += f", load {load:.1f}"
    many = "set threads times processes to at most the number of cores"
    busy = "set threads=1, or stop other programs: threads that wait for each other can be ten times slower"
    return find_cases(
        _GROUP,
        (used > cores, "threads", "warning", text, many),
        (each > 1 and load > cores - used + 1, "threads", "warning", text, busy),
        (True, "threads", "ok", text, ""),
    )[0]


def check_accelerator(device: str = "cpu") -> Check:
    """Whether the accelerator that the options name is available."""
    import torch

    build = "CPU build" if torch.version.cuda is None else f"CUDA {torch.version.cuda} build"
    used, visible = f"torch {torch.__version__} ({build})", os.environ.get("CUDA_VISIBLE_DEVICES")
    if torch.cuda.is_available():
        free, whole = torch.cuda.mem_get_info()
        text = f"{used}, {torch.cuda.get_device_name()}, {free / 1e9:.1f} of {whole / 1e9:.1f} GB free"
        return Check(_GROUP, "accelerator", "ok", text)
    return find_cases(
        _GROUP,
        (
            device == "cuda",
            "accelerator",
            "failure",
            f"policy.device=cuda, but {used} sees no GPU",
            "set policy.device=auto or cpu, or check the driver",
        ),
        (
            torch.version.cuda is not None,
            "accelerator",
            "warning",
            f"{used} sees no GPU; CUDA_VISIBLE_DEVICES={visible!r}",
            "check that the driver runs and a GPU is visible",
        ),
        (True, "accelerator", "ok", f"none; {used}", ""),
    )[0]


def check_attention(name: str, config: Any) -> Check:
    """Whether the model's class supports an attention implementation, tried on the `meta` device.

    Args:
        config: of the model.
    """
    import torch
    from transformers import AutoModelForImageTextToText

    text = f"policy.attention={name}"
    try:
        with torch.device("meta"):
            AutoModelForImageTextToText.from_config(copy.deepcopy(config), attn_implementation=name)
    except (ImportError, OSError, RuntimeError, ValueError) as error:
        reason = " ".join(str(error).split()).partition(". ")[0]
        return Check(_GROUP, "attention", "failure", f"{text}: {reason}", "set policy.attention=sdpa")
    return Check(_GROUP, "attention", "ok", f"{text}: {config.model_type} supports it")


def check_type(dtype: str) -> Check:
    """Whether the CPU computes attention and an optimizer step in a dtype, tried on a few numbers."""
    import torch

    text = f"policy.dtype={dtype}"
    try:
        weight = torch.ones(8, 8, dtype=getattr(torch, dtype), requires_grad=True)
        mixed = torch.nn.functional.scaled_dot_product_attention(weight[None], weight[None], weight[None])
        mixed.sum().backward()
        torch.optim.AdamW([weight], fused=True).step()
    except RuntimeError as error:
        return Check(_GROUP, "type", "failure", f"{text}: {error}", "set policy.dtype=float32")
    if dtype == "float16":
        way_out = "take bfloat16 or float32"
        return Check(_GROUP, "type", "warning", f"{text}: gradients below 6e-8 vanish without loss scaling", way_out)
    return Check(_GROUP, "type", "ok", text)


def installed_version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


# Variables of slime's launchers: a row with the effect of each one that is set.


_LAUNCHER = "launch variables"
WANDB_KEY = "WANDB_API_KEY"
_UNREAD = "only --env=qwen3vl and --env=cluster read it, and --params comes before it"


def check_variables(subject: Subject, environment: Mapping[str, str] | None = None) -> list[Check]:
    """One row per variable that is set, and one for the key of W&B: whether runs are tracked there as well.

    Args:
        environment: None: of this process.
    """
    environment = os.environ if environment is None else environment
    values = subject.parameters.model_dump(mode="json")
    found = [
        _check_external_ray(environment[EXTERNAL_RAY], subject)
        if variable.name == EXTERNAL_RAY
        else _check(variable, environment[variable.name], subject, values)
        for variable in VARIABLES
        if environment.get(variable.name)
    ]
    for name, near in unknown_variables(environment).items():
        hint = f"did you mean {near}?" if near else "see docs/full_size.md for the known variables"
        found.append(Check(_LAUNCHER, name, "warning", "no launcher knows this variable", hint))
    tracking, version = subject.parameters.tracking, installed_version("wandb")
    mode = environment.get("WANDB_MODE") or "online"
    of_wandb = find_cases(
        _LAUNCHER,
        (not tracking.enabled, WANDB_KEY, "ok", "set but not used: tracking.enabled=false", ""),
        (not tracking.wandb, WANDB_KEY, "ok", "set but not used: tracking.wandb=false", ""),
        (
            version is None,
            WANDB_KEY,
            "warning",
            "set, but the package wandb is not installed: runs are tracked by MLflow alone",
            "install it (pip install 'geo-sokoban-pipeline[wandb]'), or set tracking.wandb=false",
        ),
        (True, WANDB_KEY, "ok", f"set: runs are tracked by Weights & Biases too (wandb {version}, {mode})", ""),
    )
    return [*found, *(of_wandb[:1] if environment.get(WANDB_KEY) else [])]


def _check(variable: Variable, value: str, subject: Subject, values: Mapping[str, Any]) -> Check:
    is_in_ray = subject.options.placement == "ray"
    paths = [path.format(run=subject.run) for path in variable.parameters]
    if variable.name == NUM_GPUS and is_in_ray:
        paths = [f"{subject.run}.processes"]
    here = [path for path in paths if path.split(".")[0] in (subject.task, subject.run)]
    in_force = {path: _value_at(values, path) for path in here}
    unread, name = _unread(here, values), variable.name
    found = find_cases(
        _LAUNCHER,
        (paths and not here, name, "ok", f"{value}: not of this task, sets {', '.join(paths)}", ""),
        (not paths, name, "warning", f"{value}: sets nothing here", variable.note),
        (unread, name, "warning", f"{value}: changes nothing, {unread}", variable.note),
    )
    if variable.name == NUM_GPUS and not found:
        return _count_gpus(value, here[0], subject, values)
    text = "; ".join(f"{path} is {found}" for path, found in in_force.items())
    return [
        *found,
        *find_cases(
            _LAUNCHER,
            (
                any(_names(now, value) for now in in_force.values()),
                name,
                "ok",
                f"{value}: sets {', '.join(here)}",
                "",
            ),
            (True, name, "warning", f"{value}: changes nothing, {text}", _UNREAD),
        ),
    ][0]


def _count_gpus(value: str, path: str, subject: Subject, values: Mapping[str, Any]) -> Check:
    """Whether so many GPUs are there for servers, or in a cluster are taken by ranks and servers."""
    options = subject.options
    if options.placement != "ray":
        first = _value_at(values, path.replace("server.count", "server.first_gpu"))
        return _check_gpus(value, path, _value_at(values, path), first)
    server = options.rollout.server
    # GPUs that servers take beside those of the ranks.
    servers = server.count * server.tensor_parallel if options.places_servers and not server.colocated else 0
    used = options.processes + servers
    text, way_out = f"{value}: {options.processes} ranks take {used}", "only --env=cluster reads it"
    if servers:
        text = f"{value}: {options.processes} ranks and servers on {servers} GPUs of their own take {used}"
        way_out = f"lower {path} or rollout.server.count, or let them take turns (colocated=true)"
    state: State = "ok" if value == str(used) else "warning"
    return Check(_LAUNCHER, NUM_GPUS, state, text, "" if state == "ok" else way_out)


def _check_external_ray(value: str, subject: Subject) -> Check:
    placement, address = subject.options.placement, subject.options.ray.address
    nothing = f"{value}: changes nothing, {subject.run}"
    return find_cases(
        _LAUNCHER,
        (placement != "ray", EXTERNAL_RAY, "warning", f"{nothing}.placement is {placement}", "take --env=cluster"),
        (is_on(value) == (address is not None), EXTERNAL_RAY, "ok", f"{value}: sets {subject.run}.ray.address", ""),
        (
            True,
            EXTERNAL_RAY,
            "warning",
            f"{nothing}.ray.address is {address}",
            "only --env=cluster reads it, and --params comes before it",
        ),
    )[0]


def check_ray(options: TrainOptions) -> Check:
    """Whether Ray is there, and which cluster the ranks will be in; nothing is joined or started."""
    if (version := installed_version("ray")) is None:
        text, way_out = "placement=ray, but Ray is not installed", "pip install 'geo-sokoban-pipeline[ray]'"
        return Check("machine", "Ray", "failure", text, way_out)
    address = options.ray.address or os.environ.get("RAY_ADDRESS")
    server, workers = options.rollout.server, options.rollout.workers
    place = "on the ranks' GPUs" if server.colocated else f"of {server.tensor_parallel} GPUs"
    place = place if server.device == "cuda" else "on the CPU"
    who = f"{options.processes} ranks{f' and {workers} rollout workers' if workers else ''}"
    who += f" and {server.count} servers {place}" if options.places_servers else ""
    where = f"{who} in the cluster at {address}" if address else f"{who} in a cluster of this machine alone"
    return Check("machine", "Ray", "ok", f"{version}: {where}, ray.strategy={options.ray.strategy}")


def _unread(paths: Sequence[str], values: Mapping[str, Any]) -> str:
    """The setting that makes a parameter ineffective; empty if it is effective."""
    for path in paths:
        section, _, rest = path.partition(".")
        source, engine = _value_at(values, f"{section}.source"), _value_at(values, f"{section}.rollout.engine")
        if rest.startswith(("hub.", "file.")) and not rest.startswith(f"{source}."):
            return f"{section}.source is {source}"
        if rest.startswith("rollout.server.") and engine != "sglang":
            return f"{section}.rollout.engine is {engine}"
    return ""


def _check_gpus(value: str, path: str, count: Any, first: int) -> Check:
    import torch

    if value != str(count):
        way_out = "only --env=qwen3vl reads it, and --params comes before it"
        return Check(_LAUNCHER, NUM_GPUS, "warning", f"{value}: changes nothing, {path} is {count}", way_out)
    there = torch.cuda.device_count()
    text = f"{value} asked for, from GPU {first} on; torch sees {there}"
    if value.isdigit() and first + int(value) <= there:
        return Check(_LAUNCHER, NUM_GPUS, "ok", text)
    way_out = "lower it, or rollout.server.first_gpu, or take rollout.engine=transformers"
    return Check(_LAUNCHER, NUM_GPUS, "warning", text, way_out)


def _value_at(values: Any, path: str) -> Any:
    for part in path.split("."):
        values = values.get(part) if isinstance(values, Mapping) else None
    return values


def _names(found: Any, value: str) -> bool:
    """Whether a parameter's value was made from a variable's: `Qwen/<name>`, `<folder>/train.parquet`, in any case."""
    if not isinstance(found, str):
        return False
    text, given = found.lower(), os.path.expanduser(value).lower().rstrip("/")
    return text == given or text.endswith(f"/{given}") or text == f"{given}/train.parquet"
