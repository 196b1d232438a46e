"""Every field of the server options arrives where it works; fields whose effect needs a server name the test of it."""

from __future__ import annotations

import ast
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
}
SWITCHES = {"--sleep-on-idle", "--skip-server-warmup"}
# (changes, flags that differ from the least that is said; None: is not said)
FLAGS: dict[str, tuple[dict[str, Any], dict[str, str | None]]] = {
    "host": ({"host": "10.0.0.1"}, {"--host": "10.0.0.1"}),
    "device": ({"device": "cpu"}, {"--device": "cpu", "--base-gpu-id": None}),
    "all_interfaces": ({"host": "0.0.0.0", "all_interfaces": True}, {"--host": "0.0.0.0"}),
    "trust_remote_code": ({"trust_remote_code": True}, {"--trust-remote-code": ""}),
    "dtype": ({"dtype": "float16"}, {"--dtype": "float16"}),
    "tensor_parallel": ({"tensor_parallel": 4}, {"--tp-size": "4", "--base-gpu-id": "4"}),
    "first_gpu": ({"first_gpu": 4}, {"--base-gpu-id": "5"}),
    "colocated": ({"colocated": True}, {"--enable-memory-saver": ""}),
    "memory_fraction": ({"memory_fraction": 0.7}, {"--mem-fraction-static": "0.7"}),
    "max_total_tokens": ({"max_total_tokens": 77}, {"--max-total-tokens": "77"}),
    "context_tokens": ({"context_tokens": 100}, {"--context-length": "102"}),
    "attention_backend": ({"attention_backend": "fa3"}, {"--attention-backend": "fa3"}),
    "mm_attention_backend": ({"mm_attention_backend": "sdpa"}, {"--mm-attention-backend": "sdpa"}),
    "cuda_graph_batch_sizes": ({"cuda_graph_batch_sizes": (3,)}, {"--cuda-graph-bs-decode": "3"}),
    "deterministic": ({"deterministic": True}, {"--enable-deterministic-inference": ""}),
    "random_seed": ({"random_seed": 9}, {"--random-seed": "10"}),
    "extra_arguments": ({"extra_arguments": ("--log-level", "info")}, {"--log-level": "info"}),
}
# Effects that show at a server alone: the file and the test that asks one.
ASKED = {
    "mode": ("conftest.py", "player"),
    "urls": ("test_server_faults.py", "test_nobody_listens"),
    "count": ("test_server_life.py", "test_several_servers_have_the_same_weights_and_stand_in_for_each_other"),
    "concurrency": ("test_server_cache.py", "test_requests_beyond_the_bound_wait"),
    "update": ("test_server_weights.py", "test_weights_that_are_handed_over"),
    "bucket_bytes": ("test_server_weights.py", "test_responses_are_those_of_the_new_weights"),
    "faults.start_timeout": ("test_server_faults.py", "test_a_slow_start_ends_the_server"),
    "faults.health_interval": ("test_server_life.py", "test_a_server_is_brought_back"),
    "faults.health_timeout": ("test_server_life.py", "test_a_server_is_brought_back"),
    "faults.tries": ("test_server_faults.py", "test_tries_are_bounded"),
    "faults.restarts": ("test_server_faults.py", "test_an_update_waits_while_a_server_is_brought_back"),
    "faults.grace": ("test_process.py", "test_a_halted_program_is_ended"),
}


def words(**options: Any) -> list[str]:
    given = ServerOptions(**options)
    return server_command(given, Path("/policy"), "bfloat16", longest=9000, port=4000, number=1, bias={"7": -1e9})


def flags(said: list[str]) -> dict[str, str]:
    """By name; those without a value are empty."""
    following = [*said[1:], "--"]
    return {
        word: "" if after.startswith("--") else after
        for word, after in zip(said, following, strict=True)
        if word.startswith("--")
    }


def _environment() -> None:
    made = server_environment(ServerOptions(environment={"A": "b"}), {"A": "own", "C": "d"})
    assert (made["A"], made["C"]) == ("b", "d")


def _python() -> None:
    assert words(python="/opt/python")[0] == "/opt/python"
    assert words()[0] == str(Path.cwd() / ".venv-sglang/bin/python")
    assert router_command(ServerOptions(python="/opt/python", router="sticky"), [], 1, 2)[0] == "/opt/python"


def _router() -> None:
    said = {
        name: flags(router_command(ServerOptions(router=name, host="10.0.0.1"), ["http://a:1"], 1, 2))
        for name in ("cache_aware", "sticky")
    }
    assert {name: one["--policy"] for name, one in said.items()} == {"cache_aware": "cache_aware", "sticky": "manual"}
    assert {one["--host"] for one in said.values()} == {"10.0.0.1"}


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
        assert not await client.is_ready() and not await client.is_computing(1.0)
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
    tables = [set(FLAGS), set(ASKED), set(SHOWN)]
    assert set.union(*tables) == set(leaves(ServerOptions))
    assert sum(map(len, tables)) == len(set.union(*tables))


def test_the_least_that_is_said() -> None:
    assert flags(words()) == LEAST | dict.fromkeys(SWITCHES, "")


@pytest.mark.parametrize("name", FLAGS)
def test_flags(name: str) -> None:
    changes, expected = FLAGS[name]
    wanted = {**LEAST, **dict.fromkeys(SWITCHES, ""), **expected}
    assert flags(words(**changes)) == {flag: value for flag, value in wanted.items() if value is not None}


@pytest.mark.parametrize("check", dict.fromkeys(SHOWN.values()), ids=lambda check: check.__name__.strip("_"))
def test_effects(check: Callable[[], None]) -> None:
    check()


@pytest.mark.parametrize("name", ASKED)
def test_effects_that_a_server_shows_have_their_tests(name: str) -> None:
    """The test is there, and its code names the field (or a helper of its file does)."""
    file, function = ASKED[name]
    tree = ast.parse((HERE / file).read_text("utf-8"))
    assert function in {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    field = name.rsplit(".", maxsplit=1)[-1]
    written = (HERE / file).read_text("utf-8") + (HERE.parents[2] / "servers.py").read_text("utf-8")
    assert field in written, f"nothing in {file} names {field}"
