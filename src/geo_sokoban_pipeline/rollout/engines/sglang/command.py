"""Command lines and environments of servers and of the router: pure functions of the options."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from geo_sokoban_pipeline.options.server import ServerOptions
from geo_sokoban_pipeline.rollout.engines.sglang.identity import SPARE_TOKENS

_ROUTER_POLICIES = {"cache_aware": "cache_aware", "sticky": "manual"}
# What belongs to this process's own environment of libraries; and a server that may not keep what it has compiled takes
# three times as long to start.
_OWN = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "PYTHONSTARTUP", "PYTHONDONTWRITEBYTECODE")


def server_command(
    options: ServerOptions, folder: Path, dtype: str, longest: int, port: int, number: int, bias: Mapping[str, float]
) -> list[str]:
    """Words that start server `number`.

    Args:
        folder: of the policy.
        dtype: of the policy; used where the options give none.
        longest: conversation of the policy's model, tokens.
        bias: of the logits, for requests that name none; the router takes it out of requests.
    """
    flags: dict[str, object | None] = {
        "--model-path": folder,
        "--host": options.host,
        "--port": port,
        "--device": options.device,
        "--dtype": options.dtype or dtype,
        "--tp-size": options.tensor_parallel,
        "--random-seed": options.random_seed + number,
        "--mem-fraction-static": options.memory_fraction,
        "--max-total-tokens": options.max_total_tokens,
        "--context-length": options.context_tokens and min(options.context_tokens + SPARE_TOKENS, longest),
        "--attention-backend": options.attention_backend,
        "--mm-attention-backend": options.mm_attention_backend,
        "--preferred-sampling-params": json.dumps({"logit_bias": dict(bias)}),
        "--base-gpu-id": number * options.tensor_parallel if options.device == "cuda" else None,
    }
    words = [str(_interpreter(options)), "-m", "sglang.launch_server"]
    words += [str(word) for name, value in flags.items() if value is not None for word in (name, value)]
    sizes = options.cuda_graph_batch_sizes
    if sizes:
        words += ["--cuda-graph-bs-decode", *map(str, sizes)]
    elif sizes is not None:
        words.append("--disable-cuda-graph")
    if options.trust_remote_code:
        words.append("--trust-remote-code")
    if options.deterministic:
        words.append("--enable-deterministic-inference")
    # An idle scheduler would keep a core busy; a warm-up would sample before the weights are those of the run.
    return [*words, "--sleep-on-idle", "--skip-server-warmup", *options.extra_arguments]


def router_command(options: ServerOptions, workers: Sequence[str], port: int, metrics_port: int) -> list[str]:
    """Words that start the router in front of servers."""
    return [
        *(str(_interpreter(options)), "-m", "sglang_router.launch_router"),
        *("--worker-urls", *workers),
        *("--host", options.host, "--port", str(port), "--prometheus-port", str(metrics_port)),
        *("--policy", _ROUTER_POLICIES[options.router], "--assignment-mode", "min_group"),
        *("--request-timeout-secs", str(int(options.faults.reply_timeout) + 1)),
        # Which server lives, and what is tried again, is decided here: a server that was brought back is used at once,
        # and a busy one that is slow to say that it is healthy stays in use.
        *("--disable-retries", "--disable-circuit-breaker", "--disable-health-check"),
        *("--log-level", "warn"),
    ]


def server_environment(options: ServerOptions, own: Mapping[str, str]) -> dict[str, str]:
    """Environment of launched programs.

    Args:
        own: of this process.
    """
    kept = {name: value for name, value in own.items() if name not in _OWN}
    fixed = {
        "HF_HUB_OFFLINE": "1",  # the policy is a folder
        # Picture features are cached by picture, not by weights, and outlive an update: with vision weights that train,
        # a picture seen before would be answered with the features of old weights.
        "SGLANG_VLM_CACHE_SIZE_MB": "0",
        "SGLANG_RETURN_ORIGINAL_LOGPROB": "0",  # log-probs after temperature, whatever this process's environment says
        "PYTHONUNBUFFERED": "1",
    }
    if options.device == "cpu":
        fixed |= {"SGLANG_USE_CPU_ENGINE": "1", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    given = {name: value.get_secret_value() for name, value in options.environment.items()}
    return {**kept, **fixed, **given}


def _interpreter(options: ServerOptions) -> Path:
    # Not resolved: the link inside a virtual environment is what makes the interpreter belong to it.
    return Path(options.python).expanduser().absolute()
