"""A connection to a Ray cluster, and the places in it: their size, and the patience of those that wait for one.

The driver may sit on a machine without a GPU. Ray restarts nothing by itself. The environment is after a connection
what it was before.
"""

from __future__ import annotations

import logging
import os
import secrets
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np

from geo_sokoban_pipeline.config.ray import RayOptions
from geo_sokoban_pipeline.distributed.process import WorkerError
from geo_sokoban_pipeline.processes import count_cores

if TYPE_CHECKING:
    import torch

_ASKING = 5.0  # seconds between two looks at whether what waits for resources is still wanted
# Variables of Ray: no usage data; what a process without a GPU sees; seconds that the start of a node may take.
_SETTINGS = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_raylet_start_wait_time_s": "120",
}


class NoPlaceError(WorkerError):
    """The cluster has not the resources for so many processes."""


@contextmanager
def connected(options: RayOptions, ranks: int) -> Iterator[None]:
    """A connection to a Ray cluster for the `with` block: a given one, or one of this machine that ends with it.

    Args:
        ranks: that a cluster of this machine has room for, however few its cores are.

    Raises:
        ValueError: Ray is not installed.
        WorkerError: the given cluster cannot be reached.
    """
    address = options.address or os.environ.get("RAY_ADDRESS") or None
    environment = dict(_SETTINGS)
    if address is None:
        # Ray listens on the network: whoever reaches it could run code here, if it did not ask for a token.
        environment |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    with _environment({name: value for name, value in environment.items() if name not in os.environ}):
        try:
            import ray
        except ModuleNotFoundError as error:
            raise ValueError(
                "placement=ray needs Ray: pip install 'geo-sokoban-pipeline[ray]', here and on every node."
            ) from error
        if ray.is_initialized():  # by the process in which this runs, which ends it too
            send_tensors_as_arrays()
            yield
            return
        # Ray has read the environment, perhaps before this, or for another cluster.
        ray._raylet.Config.initialize("")
        ray._raylet.AuthenticationTokenLoader.instance().reset_cache()
        chosen: dict[str, Any] = {"address": address}
        if address is None:
            chosen = {
                "address": "local",
                "num_cpus": max(count_cores(), int(np.ceil(ranks * options.cpus))),
                "include_dashboard": False,
                "resources": {name: ranks * amount for name, amount in options.resources.items()} or None,
            }
        handler = signal.getsignal(signal.SIGTERM) if threading.current_thread() is threading.main_thread() else None
        try:
            ray.init(**chosen, logging_level=logging.WARNING, log_to_driver=True)
        except (ConnectionError, RuntimeError, ray.exceptions.RayError) as error:
            raise WorkerError(
                f"no connection to the Ray cluster at {address or 'this machine'}: {first_line(error)}. Check "
                "ray.address and RAY_ADDRESS, and RAY_AUTH_TOKEN where the cluster asks for a token."
            ) from error
        if handler is not None:  # Ray sets one of its own
            signal.signal(signal.SIGTERM, handler)
        try:
            send_tensors_as_arrays()
            yield
        finally:
            ray.shutdown()


@contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Set variables that are not set, for the `with` block; what Ray sets meanwhile is gone after it, too."""
    before = set(os.environ)
    os.environ.update(variables)
    try:
        yield
    finally:
        for name in set(os.environ) - before:
            if name.startswith("RAY_"):
                del os.environ[name]


def connection() -> str | None:
    """Name of this process's connection to a cluster, another one after each; None: there is none."""
    import ray

    return str(ray.get_runtime_context().get_job_id()) if ray.is_initialized() else None


class Bundles:
    """A placement group: resources for so many processes, which are freed with the last of them.

    Args:
        what: takes them, with its verb, for errors.
        gpus: of each.
        is_given_up: whether they are no longer wanted; asked every few seconds.

    Raises:
        NoPlaceError: the cluster has not the resources, or they are not wanted.
    """

    def __init__(
        self, count: int, what: str, options: RayOptions, gpus: int, is_given_up: Callable[[], bool] = lambda: False
    ) -> None:
        import ray
        from ray.util.placement_group import placement_group

        self.bundle, self._users = bundle_of(options, gpus), count
        self.group = placement_group([self.bundle] * count, strategy=options.strategy)
        deadline = time.monotonic() + options.patience
        try:
            while not self.group.wait(min(_ASKING, options.patience)):
                if is_given_up():
                    raise NoPlaceError(f"{what} {_shown(self.bundle)} each are no longer wanted.")
                if time.monotonic() >= deadline:
                    raise NoPlaceError(
                        f"{what} {_shown(self.bundle)} each, ray.strategy={options.strategy}, found no place in "
                        f"{options.patience:g} s: the cluster has {_shown(ray.cluster_resources())}, of which "
                        f"{_shown(ray.available_resources())} are free. Lower processes or what a rank takes "
                        "(ray.cpus, ray.gpus, ray.resources), choose another ray.strategy, or add nodes."
                    )
        except BaseException:
            self.free()
            raise

    def release(self) -> None:
        """One process needs its part no longer."""
        self._users -= 1
        if self._users == 0:
            self.free()

    def free(self) -> None:
        """Free all; processes that still run there end."""
        from ray.util.placement_group import remove_placement_group

        remove_placement_group(self.group)


def bundle_of(options: RayOptions, gpus: int) -> dict[str, float]:
    """Resources of a process."""
    wanted: dict[str, float] = {"CPU": options.cpus, "GPU": gpus, **options.resources}
    return {name: amount for name, amount in wanted.items() if amount} or {"CPU": 0.001}


def gpus_of_a_rank(options: RayOptions, device: str) -> int:
    """GPUs that each rank takes; needs a connection.

    Args:
        device: of the policy's options: `auto`, `cpu` or `cuda`.
    """
    import ray

    if options.gpus is not None:
        return options.gpus
    return int(device == "cuda" or (device == "auto" and ray.cluster_resources().get("GPU", 0) > 0))


def send_tensors_as_arrays() -> None:
    """Have this process send tensors through Ray as arrays, which are copied once in place of several times."""
    import ray
    import torch

    ray.util.register_serializer(torch.Tensor, serializer=_to_array, deserializer=_from_array)


def _to_array(tensor: torch.Tensor) -> tuple[np.ndarray, str, tuple[int, ...]]:
    import torch

    own = tensor.detach().cpu().contiguous()
    return own.view(-1).view(torch.uint8).numpy(), str(own.dtype).removeprefix("torch."), tuple(own.shape)


def _from_array(sent: tuple[np.ndarray, str, tuple[int, ...]]) -> torch.Tensor:
    import torch

    data, dtype, shape = sent
    return torch.from_numpy(data.copy()).view(getattr(torch, dtype)).view(shape)


def first_line(error: BaseException) -> str:
    """Ray's sentence about a death, without its guesses; else the first line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    said = next((line for line in lines if "died" in line or "dead" in line), lines[0] if lines else "")
    return said.partition(" Some common causes")[0]


def logs() -> str:
    """Where the logs of all processes lie, as the end of a sentence."""
    import ray

    node = ray._private.worker._global_node
    return "" if node is None else f" Its log is in {node.get_session_dir_path()}/logs, on its node."


def _shown(resources: Mapping[str, float]) -> str:
    named = {name: amount for name, amount in sorted(resources.items()) if ":" not in name and "_group_" not in name}
    return ", ".join(f"{amount:g} {name}" for name, amount in named.items()) or "nothing"
