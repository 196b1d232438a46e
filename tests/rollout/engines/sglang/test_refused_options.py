"""Options of servers: refusals, and secrets that are shown nowhere."""

from __future__ import annotations

import copy
import re

import pytest
import torch
from pydantic import ValidationError

from geo_sokoban_pipeline.config import ParameterError, validate_parameters
from geo_sokoban_pipeline.config.server import FaultOptions, ServerOptions
from geo_sokoban_pipeline.policies.policy import save_policy
from geo_sokoban_pipeline.policies.tiny import build_tiny_policy
from geo_sokoban_pipeline.rollout.engines.sglang.launcher import kind_of, server_environment
from task_options import TinyPolicyOptions

pytestmark = pytest.mark.xdist_group("sglang")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mode": "attach"}, "mode attach needs urls"),
        ({"urls": ("http://a:1",)}, "launch takes none"),
        ({"mode": "attach", "urls": ("a:1",)}, "a:1 is no address"),
        ({"count": 2, "ports": (4000,)}, "one each"),
        ({"environment": {"SGLANG_VLM_CACHE_SIZE_MB": "64"}}, "SGLANG_VLM_CACHE_SIZE_MB=64: cached features"),
        ({"environment": {"SGLANG_RETURN_ORIGINAL_LOGPROB": "1"}}, "after temperature"),
        ({"mode": "attach", "urls": ("http://a:1",), "router": "sticky"}, "router=none"),
        *(
            ({"host": host}, f"host={re.escape(host)}: every machine .* 127.0.0.1, or give all_interfaces=true")
            for host in ("0.0.0.0", "::", "[::]", "0", "0:0:0:0:0:0:0:0", "::ffff:0.0.0.0", "*")
        ),
        ({"extra_arguments": ("--trust-remote-code",)}, "--trust-remote-code is not allowed there; give trust_remote"),
        ({"extra_arguments": ("--trust",)}, "--trust is not allowed there"),  # argparse completes it
        ({"extra_arguments": ("--trust_remote_code",)}, "give trust_remote_code=true"),
        ({"extra_arguments": ("--host=0.0.0.0",)}, "extra_arguments: --host is not allowed there; give host"),
        ({"extra_arguments": ("--api-key", "abc")}, "--api-key is not allowed there; a launched server has no key"),
        ({"extra_arguments": ("--config", "a.yml")}, "--config is not allowed there"),
        ({"extra_arguments": ("--api-key=swordfish",)}, "extra_arguments: --api-key is not allowed there"),
        ({"api_key_variable": "KEY"}, "api_key_variable=KEY with mode=launch"),
    ],
)
def test_options_that_do_not_fit_together(options, message):
    with pytest.raises(ValidationError, match=message):
        ServerOptions(**options)


@pytest.mark.parametrize("mode", ["launch", "attach"])
@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("http://me:swordfish@a:1", "urls: the address of a:1 holds a login; give a key by api_key_variable"),
        ("me:swordfish@a:1", "urls: the address of a:1 holds a login"),
        ("http://swordfish@a:1/v1", "urls: the address of a:1 holds a login"),
        ("http://me:swordfish/@b@a:1?key=swordfish", "urls: the address of a:1 holds a login"),
        ("http://a:1/?key=swordfish", "urls: the address of a:1 has a query or a fragment; leave it out, and give a"),
        ("http://a:1#swordfish", "urls: the address of a:1 has a query or a fragment"),
    ],
)
def test_secrets_in_addresses_are_refused_and_not_shown(url, mode, message):
    with pytest.raises(ParameterError, match=message) as caught:
        validate_parameters({"mode": mode, "urls": [url]}, ServerOptions, prefix="server")
    assert "swordfish" not in str(caught.value)


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1", "10.0.0.1", "node7"])
def test_hosts_of_one_machine_need_no_permission(host):
    assert ServerOptions(host=host).host == host


def test_values_of_the_environment_are_shown_nowhere(tiny_policy):
    """They reach the server, and what is stored, shown or compared holds stars or hashes."""
    options = ServerOptions.model_validate({"environment": {"HF_TOKEN": "swordfish"}})
    assert server_environment(options, {})["HF_TOKEN"] == "swordfish"
    shown = [repr(options), str(options), options.model_dump_json(), str(options.model_dump()), str(options.shaping)]
    assert "swordfish" not in "".join(shown)
    other = ServerOptions.model_validate({"environment": {"HF_TOKEN": "marlin"}})
    assert kind_of(options, tiny_policy) != kind_of(other, tiny_policy)
    with pytest.raises(ParameterError) as caught:
        validate_parameters({"environment": {"HF_TOKEN": ["swordfish"]}}, ServerOptions, prefix="server")
    assert str(caught.value) == "server.environment.HF_TOKEN=***: input should be a valid string."


def test_a_key_that_is_not_there():
    options = ServerOptions.model_validate({"mode": "attach", "urls": ["http://a:1"], "api_key_variable": "MY_KEY"})
    for variables in ({}, {"MY_KEY": " "}):
        with pytest.raises(ValueError, match=r"api_key_variable=MY_KEY: this environment variable is not set; export"):
            options.api_key(variables)


def test_servers_of_one_kind_differ_in_weights_alone(tiny_policy, tmp_path):
    options, patient = ServerOptions(), ServerOptions(faults=FaultOptions(tries=9))
    other = copy.deepcopy(tiny_policy)
    before = kind_of(options, other)
    save_policy(other, tmp_path / "other")
    with torch.no_grad():
        next(other.model.parameters()).add_(1.0)
    assert kind_of(patient, other) == before == kind_of(options, tiny_policy)
    narrow = build_tiny_policy(TinyPolicyOptions(hidden=32), seed=0)
    kinds = {before, kind_of(options, narrow), kind_of(ServerOptions(memory_fraction=0.5), other)}
    assert len(kinds) == 3
