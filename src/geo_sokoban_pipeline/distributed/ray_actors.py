"""The processes of a run in a Ray cluster, as actors: ranks, processes with a link, and hosts of servers.

None of them imports torch before it is given its work, so that an actor is placed at once, and the host of a server
never does.
"""

from __future__ import annotations

import logging
import os
import queue
import shutil
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from geo_sokoban_pipeline.config.server import ServerOptions
from geo_sokoban_pipeline.distributed.messages import Conversation, Done, Failed, Job, Line, converse_safely
from geo_sokoban_pipeline.distributed.scratch import make_scratch
from geo_sokoban_pipeline.rollout.engines.sglang.client import ServerLost
from geo_sokoban_pipeline.rollout.engines.sglang.launcher import ServedModel, ServerProgram
from geo_sokoban_pipeline.runs.storage import MANIFEST

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

CHUNK_BYTES = 64 << 20  # of a file that travels; two are on their way at a time
POLICY = "policy"  # folder of a server's policy, among the files of its actor
_SLOW = 2.0  # seconds of a job from which its end is logged


@dataclass(frozen=True)
class ActorPlace:
    """Where an actor runs.

    Attributes:
        node: Ray's id of the node.
        address: at which the other nodes reach it.
        scratch: the actor's own folder there.
        gpus: ids of those that Ray has assigned to it, by which another process of the node can be shown them.
    """

    node: str
    address: str
    pid: int
    scratch: str
    gpus: tuple[str, ...] = ()


class Actor:
    """What all actors have: a name, and a scratch folder, into which files are moved.

    Its working folder is its scratch folder, which holds nothing but the files it is given.

    Args:
        files: contents by relative name.
        imports: names of folders of them that modules are imported from.
    """

    def __init__(self, title: str, files: Mapping[str, bytes], imports: Sequence[str]) -> None:
        self._title = title
        logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(message)s", stream=sys.stdout)
        logging.getLogger(__package__.partition(".")[0]).setLevel(logging.INFO)
        self._scratch = str(make_scratch())
        os.chdir(self._scratch)
        for name, content in files.items():
            Path(name).parent.mkdir(parents=True, exist_ok=True)
            Path(name).write_bytes(content)
        sys.path += [f"{self._scratch}/{name}" for name in imports]
        # What comes from Ray's object store is read-only; nothing here writes into it.
        warnings.filterwarnings("ignore", "The given NumPy array is not writable", UserWarning)

    def __repr__(self) -> str:
        """The name that Ray writes before the lines of this process."""
        return self._title

    def place(self) -> ActorPlace:
        """Where this actor runs."""
        import ray

        context = ray.get_runtime_context()
        gpus = tuple(context.get_accelerator_ids().get("GPU", ()))
        return ActorPlace(context.get_node_id(), ray.util.get_node_ip_address(), os.getpid(), self._scratch, gpus)

    def store(self, path: str, chunk: np.ndarray) -> None:
        """Append bytes to a file."""
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        with open(path, "ab") as file:
            file.write(chunk.data)

    def remove(self, folder: str) -> None:
        """Remove a folder; no error if it is absent."""
        shutil.rmtree(folder, ignore_errors=True)


class Rank(Actor):
    """The actor of a rank: builds its state, and runs the jobs it is sent."""

    def __init__(self, title: str, files: Mapping[str, bytes], imports: Sequence[str]) -> None:
        super().__init__(title, files, imports)
        self._state, self._began = None, 0.0

    def build(self, build: Callable[[], Any]) -> Done | Failed:
        """Make the state that jobs receive."""
        send_tensors_as_arrays()
        try:
            self._state = build()
        except Exception as error:
            return _failure(error)
        self._began = time.process_time()
        return Done(None, 0.0)

    def run(self, job: Job) -> Done | Failed:
        """Run a job; its failure is returned, with the traceback."""
        began = time.perf_counter()
        try:
            result = job(self._state)
        except Exception as error:
            return _failure(error)
        seconds = time.perf_counter() - began
        if seconds > _SLOW:
            logger.info("%s: %.1f s", type(job).__name__, seconds)
        return Done(result, time.process_time() - self._began)

    def files(self, folder: str) -> list[tuple[str, int]]:
        """Names and sizes of the files in a folder and below, sorted."""
        root = Path(folder)
        return [(str(path.relative_to(root)), path.stat().st_size) for path in files_of(root)]

    def load(self, path: str, first: int) -> np.ndarray:
        """Bytes of a file from a place on, at most `CHUNK_BYTES`."""
        return np.fromfile(path, np.uint8, CHUNK_BYTES, offset=first)


class Talker(Actor):
    """The actor of a process with a link, such as a rollout worker; several of its calls run at a time."""

    def __init__(self, title: str, files: Mapping[str, bytes], imports: Sequence[str]) -> None:
        super().__init__(title, files, imports)
        self._said: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._line = Line(self._said.put)

    def talk(self, talk: Conversation) -> None:
        """Hold a conversation until the link closes."""
        send_tensors_as_arrays()
        converse_safely(self._line, talk)

    def tell(self, message: Any) -> None:
        """Take a message of the owner."""
        self._line.arrive(message)

    def hear(self) -> list[Any]:
        """Messages for the owner, one at least."""
        messages = [self._said.get()]
        while not self._said.empty():
            messages.append(self._said.get())
        return messages


@dataclass(frozen=True)
class Started:
    """A server that an actor has started.

    Attributes:
        url: at which the driver and the rollout workers reach it.
        refusal: why it was not started; None: it was.
    """

    url: str = ""
    pid: int = 0
    log: Path = Path()
    refusal: str | None = None


class ServerHost(Actor):
    """The actor of a server, which is a process below it on its node. Several of its calls run at a time."""

    def __init__(self, title: str, files: Mapping[str, bytes], imports: Sequence[str]) -> None:
        super().__init__(title, files, imports)
        self._program: ServerProgram | None = None

    def start(
        self, options: ServerOptions, model: ServedModel, number: int, gpus: Sequence[str] | None, *, same_port: bool
    ) -> Started:
        """Start or restart the server; returns before it is ready.

        Args:
            gpus: ids of those that it computes on. None: those that Ray has assigned to this actor.
        """
        if self._program is None:
            # A server is no process of Ray, and has no business with its token.
            variables = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
            if gpus is not None:
                variables["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
            folder = Path(self._scratch) / POLICY
            self._program = ServerProgram(options, model, folder, number, _own_logs(), 0, variables)
        try:
            self._program.start(same_port=same_port)
        except ServerLost as error:
            return Started(refusal=str(error))
        return Started(self._program.url, self._program.pid, self._program.log)

    def lost(self) -> str | None:
        """See `OwnServer`."""
        return None if self._program is None else self._program.lost()

    def found_port_taken(self) -> bool:
        """See `OwnServer`."""
        return self._program is not None and self._program.found_port_taken()

    def end(self) -> None:
        """End the server, and remove the actor's folder."""
        if self._program is not None:
            self._program.end()
        self.remove(self._scratch)


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


def _failure(error: Exception) -> Failed:
    from geo_sokoban_pipeline.distributed.group import has_lost_a_rank

    failed = Failed("".join(traceback.format_exception(error)), has_lost_a_rank(error))
    try:
        import ray

        ray.cloudpickle.loads(ray.cloudpickle.dumps(error))
    except Exception:  # an exception that does not travel; its text does
        return failed
    return replace(failed, error=error)


def files_of(folder: Path, pattern: str = "*") -> list[Path]:
    """Files of a folder that travel, sorted: all but its manifest."""
    return sorted(path for path in folder.rglob(pattern) if path.is_file() and path.name != MANIFEST)


def _own_logs() -> Path:
    """Folder of this process's servers, among the logs of Ray, which outlive the actor."""
    import ray

    node = ray._private.worker._global_node
    return Path(node.get_logs_dir_path()) / f"servers-{os.getpid()}"
