"""Options of the SGLang servers that sample responses.

Possible secrets never stand in a stored file: values of `environment` are secrets of pydantic's, which write
themselves as stars, and of an API key the options only name the environment variable.
"""

from __future__ import annotations

import hashlib
import ipaddress
import os
import re
import socket
from collections.abc import Mapping
from contextlib import suppress
from typing import Literal
from urllib.parse import urlsplit

from pydantic import Field, SecretStr, model_validator

from geo_sokoban_pipeline.config.base import MOST, Count, Port, Seconds, StrictModel, refuse_first

# Variables of a server that decide what its responses mean, and why they are not free.
FIXED_VARIABLES = {
    "SGLANG_VLM_CACHE_SIZE_MB": "cached features of images outlive the vision weights that made them",
    "SGLANG_RETURN_ORIGINAL_LOGPROB": "log-probs must be those after temperature, as the trainer's are",
}
# Flags of a server that have an option of their own here, or would undo what others promise.
_OWN_FLAGS = {
    "--host": "give host",
    "--port": "give ports",
    "--trust-remote-code": "give trust_remote_code=true, if the code beside the weights is yours or trusted",
    "--api-key": "a launched server has no key, and a key would be stored with the arguments",
    "--admin-api-key": "a launched server has no key, and a key would be stored with the arguments",
    "--config": "give its flags one by one",
}


def hash_secret(name: str, value: str) -> str:
    """The text that is stored in place of a secret: enough to see that it has changed, too little to read it."""
    # scrypt, not a plain hash: a short password could be found by trying all.
    return f"hash:{hashlib.scrypt(value.encode(), salt=name.encode(), n=1 << 12, r=8, p=1, dklen=16).hex()}"


def is_everywhere(host: str) -> bool:
    """Whether a server on a host listens on all interfaces: `0.0.0.0`, `::`, and the other ways to write them."""
    bare = host.strip().strip("[]")
    with suppress(ValueError):
        address = ipaddress.ip_address(bare)
        mapped = getattr(address, "ipv4_mapped", None)
        return address.is_unspecified or (mapped is not None and mapped.is_unspecified)
    with suppress(OSError):  # short forms of IPv4 such as `0`
        return socket.inet_aton(bare) == bytes(4)
    return bare in ("", "*")


class FaultOptions(StrictModel):
    """Time limits for servers, and retries of failed requests."""

    start_timeout: Seconds = Field(900.0, description="Seconds from the launch of a server to its first answer.")
    reply_timeout: Seconds = Field(1800.0, description="Seconds that one response may take.")
    control_timeout: Seconds = Field(
        600.0, description="Seconds that an update of weights, or a question about the server, may take."
    )
    health_interval: Seconds = Field(30.0, description="Seconds between health checks of a server that has requests.")
    health_timeout: Seconds = Field(
        120.0, description="Seconds without an answer to a health check after which a server counts as hung."
    )
    tries: int = Field(4, ge=1, le=100, description="Tries to get one response before the run stops.")
    first_pause: float = Field(
        0.5, ge=0, le=3600, description="Seconds before the second try; each later one doubles it."
    )
    longest_pause: float = Field(30.0, ge=0, le=3600, description="Seconds between two tries at most.")
    restarts: int = Field(
        3,
        ge=0,
        le=100,
        description="Times that a server is brought back between two updates of weights before the run stops.",
    )
    grace: Seconds = Field(10.0, description="Seconds that a server is given to end before it is killed.")


class ServerOptions(StrictModel):
    """SGLang servers, launched here or given; used with `engine: sglang`."""

    mode: Literal["launch", "attach"] = Field("launch", description="Start servers, or use those of `urls`.")
    urls: tuple[str, ...] = Field((), description="Addresses of running servers, with mode attach: `http://host:port`.")
    api_key_variable: str | None = Field(
        None,
        pattern=r"^[A-Za-z_][A-Za-z0-9_]*$",
        description="Environment variable that holds the API key of the servers of `urls`, which is sent as "
        "`Authorization: Bearer` and stored nowhere. None: they have no key.",
    )
    count: int = Field(1, ge=1, le=1024, description="Servers to launch.")
    host: str = Field("127.0.0.1", min_length=1, description="Interface of launched servers.")
    all_interfaces: bool = Field(
        False, description="Allow a host such as 0.0.0.0, by which other machines reach a launched server."
    )
    trust_remote_code: bool = Field(
        False, description="Let a launched server run Python code that lies beside the policy's weights."
    )
    ports: tuple[Port, ...] | None = Field(None, description="Ports of launched servers, one each. None: free ones.")
    python: str = Field(
        ".venv-sglang/bin/python",
        description="Interpreter of the servers' own environment (`make sglang-env`); relative: to the working folder. "
        "With placement=ray it is at the same place on every node.",
    )
    log_folder: str | None = Field(
        None,
        description="Folder of the servers' logs. None: a temporary one. With placement=ray they lie among Ray's own, "
        "on the server's node.",
    )
    router: Literal["none", "cache_aware", "sticky"] = Field(
        "none",
        description="SGLang's router in front: by cached prefixes, or by conversation. none: this project sends each "
        "conversation to one server, by consistent hashing.",
    )
    concurrency: Count = Field(512, description="Requests in flight per server at most; further ones wait.")

    device: Literal["cpu", "cuda"] = Field("cuda", description="Where the model is computed.")
    dtype: Literal["float32", "bfloat16", "float16"] | None = Field(
        None, description="Type of the server's weights. None: that of the policy."
    )
    tensor_parallel: int = Field(1, ge=1, le=1024, description="GPUs of one server.")
    first_gpu: int = Field(
        0,
        ge=0,
        le=1024,
        description="Number of the first GPU of launched servers; each takes the next `tensor_parallel` ones. Training "
        "takes GPU 0. With placement=ray Ray assigns them.",
    )
    colocated: bool = Field(
        False,
        description="Launched servers lie on the GPUs of the trainer and take turns with it: they give up the memory "
        "of weights and cache while it trains, and its weights, gradients and moments are in the memory of the CPU "
        "while they sample. With placement=ray server n lies on the GPUs of the ranks from n · `tensor_parallel` on.",
    )
    memory_fraction: float | None = Field(
        None, gt=0, lt=1, description="Share of memory for weights and cache of keys and values. None: SGLang's choice."
    )
    max_total_tokens: Count | None = Field(
        None, description="Tokens of the cache of keys and values. None: as many as the memory holds."
    )
    context_tokens: Count | None = Field(None, description="Longest conversation. None: as long as the model's.")
    attention_backend: str | None = Field(None, description="Attention of the language model. None: SGLang's choice.")
    mm_attention_backend: str | None = Field(None, description="Attention of the vision tower. None: SGLang's choice.")
    cuda_graph_batch_sizes: tuple[Count, ...] | None = Field(
        None, description="Batch sizes for which CUDA graphs are made. None: SGLang's choice; (): no graphs."
    )
    deterministic: bool = Field(
        False, description="Sampling by the episode's seed, where the attention supports it; responses then repeat."
    )
    random_seed: int = Field(0, ge=0, le=MOST, description="Seed of a server's own generator; server n adds n.")
    extra_arguments: tuple[str, ...] = Field((), description="Further words for `sglang.launch_server`.")
    environment: dict[str, SecretStr] = Field(
        default_factory=dict,
        description="Further environment variables of launched servers, beside those of the command. Values are "
        "masked wherever they would be shown or stored.",
    )

    update: Literal["tensors", "disk", "group", "ipc"] | None = Field(
        None,
        description="How weights reach the servers: in requests; through a folder that both can read; by a process "
        "group with all servers, which must reach the trainer's machine (nccl where trainer and servers compute on "
        "GPUs of their own; else gloo); or as handles of GPU memory (CUDA IPC), for servers on the trainer's own GPUs. "
        "None: ipc for launched servers that are colocated, or without Ray begin at GPU 0; group for other launched "
        "ones; tensors for those of `urls`.",
    )
    bucket_bytes: int = Field(
        1 << 30,
        ge=1,
        le=1 << 40,
        description="Weights that are collected from the ranks and sent at once, or written to one file, at most; one "
        "tensor at least. The process that sends them needs the memory of two buckets, because the next one is "
        "collected meanwhile; of up to four where ranks on GPUs or of a Ray cluster exchange their parts. On CPUs "
        "small ones cost less (32 MiB).",
    )
    update_folder: str | None = Field(
        None, description="Folder for weights on their way, with update disk; as large as the model. None: temporary."
    )
    faults: FaultOptions = Field(default_factory=FaultOptions, description="Patience with servers.")

    @model_validator(mode="after")
    def _check(self) -> ServerOptions:
        addresses = [(url, re.split(r"[/?#]", url.rpartition("@")[2].rpartition("://")[2])[0]) for url in self.urls]
        flags = [(word.partition("=")[0], word.partition("=")[0].replace("_", "-")) for word in self.extra_arguments]
        here = ("localhost", "127.0.0.1", "::1")
        elsewhere = [url for url in self.urls if self.update == "ipc" and urlsplit(url).hostname not in here]
        is_attached, ports = self.mode == "attach", self.ports or ()
        refuse_first(
            # Addresses hold nothing but scheme, host, port and path: other parts may be secrets. They come first,
            # because other messages show the addresses.
            *(
                rule
                for url, address in addresses
                for rule in (
                    (
                        "@" in url,
                        f"urls: the address of {address} holds a login; give a key by api_key_variable instead.",
                    ),
                    (
                        "?" in url or "#" in url,
                        f"urls: the address of {address} has a query or a fragment; leave it out, and give a key by "
                        "api_key_variable.",
                    ),
                    (
                        set(url).isdisjoint("@?#")
                        and (not url.startswith(("http://", "https://")) or not urlsplit(url).hostname),
                        f"urls: {url} is no address; it must be http://host:port.",
                    ),
                )
            ),
            (
                is_attached != bool(self.urls),
                f"urls={list(self.urls)} with mode={self.mode}: mode attach needs urls, launch takes none.",
            ),
            (
                len({url.rstrip("/") for url in self.urls}) < len(self.urls),
                f"urls={list(self.urls)} names a server twice; name each once.",
            ),
            *(
                (True, f"environment: {name}={value.get_secret_value()}: {FIXED_VARIABLES[name]}; leave it out.")
                for name, value in self.environment.items()
                if name in FIXED_VARIABLES
            ),
            # The addresses that reach a server, and the code that it runs, are options of their own.
            (
                is_everywhere(self.host) and not self.all_interfaces,
                f"host={self.host}: every machine of the network could reach the server, and who reaches it can change "
                "its weights. Take 127.0.0.1, or give all_interfaces=true if the network is closed.",
            ),
            # argparse takes every unambiguous beginning of a flag for the flag.
            *(
                (len(flag) > 2 and own.startswith(flag), f"extra_arguments: {word} is not allowed there; {way_out}.")
                for word, flag in flags
                for own, way_out in _OWN_FLAGS.items()
            ),
            (
                self.api_key_variable is not None and not is_attached,
                f"api_key_variable={self.api_key_variable} with mode=launch: it is for the servers of `urls`; launched "
                "ones have no key. Leave it out.",
            ),
            # Handles of GPU memory are good for one machine, and turns for servers that are known.
            (
                self.colocated and is_attached,
                f"colocated=true with mode={self.mode}: it is not known which memory a server of `urls` has given up; "
                "launch the servers, or take colocated=false.",
            ),
            (
                self.colocated and self.router != "none",
                f"colocated=true with router={self.router}: a router has each server sample a token when it begins, "
                "which a server that has given up its memory cannot; take router=none.",
            ),
            (
                self.update == "ipc" and self.device != "cuda",
                f"update=ipc with device={self.device}: only GPUs share memory so; take update=group.",
            ),
            (
                self.update == "tensors" and not is_attached and self.tensor_parallel > 1,
                f"update=tensors with tensor_parallel={self.tensor_parallel}: a server takes all weights once for each "
                "of its processes; leave update out, or take update=group.",
            ),
            (
                elsewhere,
                f"update=ipc with urls={elsewhere}: handles of GPU memory are good on this machine alone; take "
                "update=group.",
            ),
            (
                self.ports is not None and len(ports) != self.count,
                f"ports={list(ports)}: count={self.count} servers need one each; null takes free ones.",
            ),
            (len(set(ports)) < len(ports), f"ports={list(ports)} names a port twice; give each server its own."),
            (
                is_attached and self.router != "none",
                f"router={self.router} with mode=attach: weights go to each server itself, so give the servers' urls "
                "and router=none.",
            ),
        )
        return self

    @property
    def reachable_host(self) -> str:
        """Host under which this machine reaches a launched server, as it stands in an address."""
        if not is_everywhere(self.host):
            return f"[{self.host}]" if ":" in self.host.strip("[]") else self.host
        return "[::1]" if ":" in self.host else "127.0.0.1"

    def way(self, *, on_gpu: bool) -> str:
        """How weights reach the servers; see `update`.

        Args:
            on_gpu: whether the weights are on a GPU of the servers' machine.
        """
        if self.update is not None:
            return self.update
        if self.mode == "attach":
            return "tensors"
        shares = on_gpu and self.device == "cuda" and (self.colocated or self.first_gpu == 0)
        return "ipc" if shares else "group"

    @property
    def gpus(self) -> int:
        """GPUs that one launched server computes on."""
        return self.tensor_parallel if self.device == "cuda" else 0

    @property
    def hashed_environment(self) -> dict[str, str]:
        """Variables with hashes in place of their values: a change is noticed, and nothing can be read."""
        return {name: hash_secret(name, value.get_secret_value()) for name, value in self.environment.items()}

    def api_key(self, variables: Mapping[str, str] | None = None) -> str | None:
        """Key of the servers of `urls`; None: they have none.

        Args:
            variables: of the environment; None: of this process.

        Raises:
            ValueError: the variable is not set.
        """
        if self.api_key_variable is None:
            return None
        if not (found := (os.environ if variables is None else variables).get(self.api_key_variable, "").strip()):
            raise ValueError(
                f"rollout.server.api_key_variable={self.api_key_variable}: this environment variable is not set; "
                "export it with the servers' key, or leave the option out."
            )
        return found

    @property
    def shaping(self) -> dict[str, object]:
        """The options that change the distribution of responses, as JSON values."""
        names = {"dtype", "tensor_parallel", "attention_backend", "mm_attention_backend", "deterministic"}
        names |= {"random_seed", "context_tokens", "extra_arguments"}
        trusted = {"trust_remote_code": True} if self.trust_remote_code else {}
        return {**self.model_dump(mode="json", include=names), "environment": self.hashed_environment, **trusted}
