"""Every field of the server options arrives where it works; fields whose effect needs a server name the test of it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from geo_sokoban_pipeline.config.server import ServerOptions
from geo_sokoban_pipeline.policies.tiny import build_tiny_policy
from geo_sokoban_pipeline.rollout.engines.sglang.client import RequestRefused, ServerClient, ServerLost
from geo_sokoban_pipeline.rollout.engines.sglang.engine import SglangEngine
from geo_sokoban_pipeline.rollout.engines.sglang.launcher import (
    LaunchedServer,
    ServedModel,
    router_command,
    server_command,
    server_environment,
)
from geo_sokoban_pipeline.rollout.engines.sglang.servers import Server, pause_before
from option_fields import leaves
from task_options import TinyPolicyOptions

pytestmark = pytest.mark.xdist_group("sglang")

HERE = Path(__file__).parent
# What is said without any option, in full: a default that changes is seen.
LEAST = {
    "--model-path": "/policy",
    "--host": "127.0.0.1",  # nobody else's machine may ask, or change the weights
    "--port": "4000",
    "--device": "cuda",
    "--dtype": "bfloat16",
    "--tp-size": "1",
    "--random-seed": "1",
    "--preferred-sampling-params": '{"logit_bias": {"7": -1000000000.0}}',
    "--base-gpu-id": "1",
    "--sleep-on-idle": "",
    "--skip-server-warmup": "",
}
# (field, its value, flags that differ from the least that is said; None: is not said)
FLAGS: list[tuple[str, Any, dict[str, str | None]]] = [
    ("host", "10.0.0.1", {"--host": "10.0.0.1"}),
    ("device", "cpu", {"--device": "cpu", "--base-gpu-id": None}),
    ("trust_remote_code", True, {"--trust-remote-code": ""}),
    ("dtype", "float16", {"--dtype": "float16"}),
    ("tensor_parallel", 4, {"--tp-size": "4", "--base-gpu-id": "4"}),
    ("first_gpu", 4, {"--base-gpu-id": "5"}),
    ("colocated", True, {"--enable-memory-saver": ""}),
    ("memory_fraction", 0.7, {"--mem-fraction-static": "0.7"}),
    ("max_total_tokens", 77, {"--max-total-tokens": "77"}),
    ("context_tokens", 100, {"--context-length": "102"}),  # two that no conversation gets
    ("context_tokens", 9000, {"--context-length": "9000"}),  # no more than the model has
    ("attention_backend", "fa3", {"--attention-backend": "fa3"}),
    ("mm_attention_backend", "sdpa", {"--mm-attention-backend": "sdpa"}),
    ("cuda_graph_batch_sizes", (3,), {"--cuda-graph-bs-decode": "3"}),
    ("cuda_graph_batch_sizes", (), {"--disable-cuda-graph": ""}),
    ("deterministic", True, {"--enable-deterministic-inference": ""}),
    ("random_seed", 9, {"--random-seed": "10"}),
    ("extra_arguments", ("--log-level", "info"), {"--log-level": "info"}),
]
# Effects that show at a server alone: the file and the test that asks one.
ASKED = {
    "mode": ("conftest.py", "player"),
    "urls": ("test_server_faults.py", "test_servers_that_are_refused"),
    "count": ("test_server_life.py", "launched"),
    "concurrency": ("test_server_cache.py", "test_requests_beyond_the_bound_wait"),
    "update": ("test_server_weights.py", "test_weights_that_are_handed_over"),
    "bucket_bytes": ("test_server_weights.py", "test_responses_are_those_of_the_new_weights"),
    "faults.start_timeout": ("test_server_faults.py", "test_servers_that_are_refused"),
    "faults.health_interval": ("test_server_life.py", "test_a_server_behind_a_router_hangs"),
    "faults.health_timeout": ("test_server_life.py", "test_a_server_behind_a_router_hangs"),
    "faults.tries": ("test_server_faults.py", "test_tries_are_bounded"),
    "faults.restarts": ("test_server_faults.py", "test_an_update_waits_while_a_server_is_brought_back"),
    "faults.grace": ("test_process.py", "test_a_halted_program_is_ended"),
}


def words(**options: Any) -> list[str]:
    given = ServerOptions(**options)
    return server_command(given, Path("/policy"), ServedModel("bfloat16", 9000, {"7": -1e9}), port=4000, number=1)


def flags(said: list[str]) -> dict[str, str]:
    """By name; those without a value are empty."""
    following = [*said[1:], "--"]
    return {
        word: "" if after.startswith("--") else after
        for word, after in zip(said, following, strict=True)
        if word.startswith("--")
    }


def _environment() -> None:
    own = {"PATH": "/bin", "PYTHONPATH": "/project/src", "VIRTUAL_ENV": "/project/.venv", "OMP_NUM_THREADS": "8"}
    own |= {"PYTHONDONTWRITEBYTECODE": "1", "SGLANG_RETURN_ORIGINAL_LOGPROB": "1", "A": "own"}
    made = server_environment(ServerOptions(device="cpu", environment={"A": "b"}), own)
    assert made["SGLANG_VLM_CACHE_SIZE_MB"] == "0"  # or images keep the features of old weights
    assert made["SGLANG_RETURN_ORIGINAL_LOGPROB"] == "0"  # or log-probs are those of another temperature
    assert (made["SGLANG_USE_CPU_ENGINE"], made["OMP_NUM_THREADS"], made["PATH"], made["A"]) == ("1", "1", "/bin", "b")
    assert {"PYTHONPATH", "VIRTUAL_ENV", "PYTHONDONTWRITEBYTECODE"}.isdisjoint(made)
    assert "SGLANG_USE_CPU_ENGINE" not in server_environment(ServerOptions(), own)
    # A server that gives up memory does not start beside expandable segments.
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        given = {name: "max_split_size_mb:64,expandable_segments:True"}
        for colocated, kept in ((False, given[name]), (True, "max_split_size_mb:64")):
            assert server_environment(ServerOptions(colocated=colocated), given)[name] == kept


def _python() -> None:
    assert words(python="/opt/python")[0] == "/opt/python"
    assert words()[0] == str(Path.cwd() / ".venv-sglang/bin/python")
    assert router_command(ServerOptions(python="/opt/python", router="sticky"), [], 1, 2)[0] == "/opt/python"


def _router() -> None:
    """It stands before all servers."""
    for name, kind in (("cache_aware", "cache_aware"), ("sticky", "manual")):
        options = ServerOptions(count=2, router=name, host="10.0.0.1")
        said = router_command(options, ["http://a:1", "http://b:2"], 4001, 4002)
        start = said.index("--worker-urls")
        assert said[start + 1 : start + 3] == ["http://a:1", "http://b:2"]
        found = flags(said)
        assert (found["--policy"], found["--host"], found["--port"]) == (kind, "10.0.0.1", "4001")
        assert {"--disable-retries", "--disable-circuit-breaker", "--disable-health-check"} <= set(found)


def _all_interfaces() -> None:
    """A server there is reached on this machine."""
    for host, reached in (("0.0.0.0", "127.0.0.1"), ("::", "[::1]"), ("node7", "node7"), ("fe80::1", "[fe80::1]")):
        options = ServerOptions(host=host, all_interfaces=True)
        assert (options.reachable_host, flags(words(host=host, all_interfaces=True))["--host"]) == (reached, host)


def _timeouts() -> None:
    """Of a server that takes a request and never answers."""
    values = {"router": "sticky", "faults": {"reply_timeout": 0.06, "control_timeout": 0.03}}
    options = ServerOptions.model_validate(values)

    async def ask() -> list[str]:
        heard: list[asyncio.StreamWriter] = []
        server = await asyncio.start_server(lambda reader, writer: heard.append(writer), "127.0.0.1", 0)
        client = ServerClient(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", options.faults, 2)
        said = []
        for question in (client.generate({}, "a"), client.get("/b"), client.command("/c", {})):
            with pytest.raises(ServerLost) as lost:
                await question
            said.append(str(lost.value).split("did not answer within ")[1])
        await client.close()
        server.close()
        for writer in heard:
            writer.close()
        return said

    assert asyncio.run(ask()) == ["0.06 s", "0.03 s", "0.03 s"]
    # The client, which knows what to do then, gives up before the router does.
    waits = {"router": "sticky", "faults": {"reply_timeout": 40.5}}
    said = flags(router_command(ServerOptions.model_validate(waits), [], 1, 2))
    assert float(said["--request-timeout-secs"]) == 41


def _places() -> None:
    """Where a server that would be launched listens and logs, and through which folder it would get weights."""
    policy = build_tiny_policy(TinyPolicyOptions(hidden=16, heads=2, kv_heads=2, head_dim=8, mlp=16, layers=1), 0)
    options = ServerOptions(count=2, ports=(4001, 4002), host="localhost", log_folder="/logs")
    for number in range(2):
        server = LaunchedServer(options, policy, number)
        assert (server.url, server.log) == (f"http://localhost:400{number + 1}", Path(f"/logs/server_{number}.log"))
        server.end()
    server = LaunchedServer(ServerOptions(), policy, 0)
    assert (server.log.parent.parent, server.port) != (Path("/logs"), 4001) and server.log.parent.is_dir()
    server.end()
    with pytest.raises(FileNotFoundError, match="/no/such/folder/"):
        SglangEngine(policy, ServerOptions(update_folder="/no/such/folder"))


def _key() -> None:
    """What a server hears: the key with every question, and nothing where none is named."""
    heard: list[str] = []

    async def listen(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heard.append((await reader.readuntil(b"\r\n\r\n")).decode())
        writer.write(b"HTTP/1.1 401 Unauthorized\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
        await writer.drain()
        writer.close()

    async def ask(options: ServerOptions) -> list[str]:
        server = await asyncio.start_server(listen, "127.0.0.1", 0)
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        asked = Server(options.faults, 2, url=url, key=options.api_key({"MY_KEY": " top-secret\n"}))
        said = []
        client = asked.client
        for question in (client.generate({}, "a"), client.get("/b"), client.command("/c", {}), client.abort("r")):
            with pytest.raises(RequestRefused, match="api_key_variable") as refused:
                await question
            said.append(str(refused.value))
        assert not await client.is_ready() and not await client.is_ready("/health", 1.0)
        await client.close()
        server.close()
        return said

    named = {"mode": "attach", "urls": ["http://a:1"], "api_key_variable": "MY_KEY"}
    said = asyncio.run(ask(ServerOptions.model_validate(named)))
    assert len(heard) == 6 and all("Authorization: Bearer top-secret\r\n" in request for request in heard)
    assert "top-secret" not in "".join(said)
    heard.clear()
    asyncio.run(ask(ServerOptions()))
    assert len(heard) == 6 and "Authorization" not in "".join(heard)


def _pauses() -> None:
    faults = ServerOptions.model_validate({"faults": {"first_pause": 0.25, "longest_pause": 0.6}}).faults
    assert [pause_before(attempt, faults) for attempt in range(5)] == [0.0, 0.25, 0.5, 0.6, 0.6]


SHOWN: dict[str, Callable[[], None]] = {
    "all_interfaces": _all_interfaces,
    "api_key_variable": _key,
    "environment": _environment,
    "python": _python,
    "router": _router,
    "ports": _places,
    "log_folder": _places,
    "update_folder": _places,
    "faults.reply_timeout": _timeouts,
    "faults.control_timeout": _timeouts,
    "faults.first_pause": _pauses,
    "faults.longest_pause": _pauses,
}


def test_every_field_is_shown_to_have_an_effect() -> None:
    tables = [{field for field, _, _ in FLAGS}, set(ASKED), set(SHOWN)]
    assert set.union(*tables) == set(leaves(ServerOptions))
    assert sum(map(len, tables)) == len(set.union(*tables))
    for name, (file, function) in ASKED.items():
        text = (HERE / file).read_text("utf-8")
        assert f"def {function}(" in text
        field = name.rpartition(".")[2]
        assert field in text + (HERE.parents[2] / "servers.py").read_text("utf-8"), f"nothing in {file} names {field}"


def test_the_least_that_is_said() -> None:
    assert words()[1:3] == ["-m", "sglang.launch_server"]
    assert flags(words()) == LEAST


@pytest.mark.parametrize(("field", "chosen", "expected"), FLAGS)
def test_flags(field: str, chosen: Any, expected: dict[str, str | None]) -> None:
    wanted = {**LEAST, **expected}
    assert flags(words(**{field: chosen})) == {flag: value for flag, value in wanted.items() if value is not None}


@pytest.mark.parametrize("check", dict.fromkeys(SHOWN.values()), ids=lambda check: check.__name__.strip("_"))
def test_effects(check: Callable[[], None]) -> None:
    check()
