"""Is a server what this policy needs? Asked before anything is sent to it, because weights of another shape end it.

Model and sizes are compared with the configuration that the server has loaded, where its folder can be read from here;
the vocabulary by having the server tokenise a text with every special token.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from geo_sokoban_pipeline.policies.policy import Policy
from geo_sokoban_pipeline.rollout.engines.sglang.client import ServerClient
from geo_sokoban_pipeline.rollout.engines.sglang.faults import WrongServer
from geo_sokoban_pipeline.storage import read_json

logger = logging.getLogger(__name__)
TESTED_VERSION = "0.5.21"
SPARE_TOKENS = 2  # of a server's context that no conversation gets
_SIZES = {
    "text_config": ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size"),
    "vision_config": ("depth", "hidden_size", "patch_size", "spatial_merge_size", "out_hidden_size"),
}


@dataclass(frozen=True)
class ServerFacts:
    """What a server says about itself.

    Attributes:
        version: of SGLang.
        seeded: whether it samples by the request's seed.
        context: tokens of a conversation at most, its reply included.
        longest_prompt: tokens of a prompt at most.
        ranks: processes that each need the weights.
    """

    version: str
    seeded: bool
    context: int
    longest_prompt: int
    ranks: int


async def inspect_server(client: ServerClient, policy: Policy) -> ServerFacts:
    """Facts of a server that serves the policy's kind of model.

    Raises:
        WrongServer: it serves another model or another vocabulary.
    """
    model, server = await client.get("/model_info"), await client.get("/server_info")
    _check_model(client.url, model, policy)
    await _check_vocabulary(client, policy)
    version = str(server.get("version"))
    if version != TESTED_VERSION:
        logger.warning("%s runs SGLang %s; this project is tested with %s", client.url, version, TESTED_VERSION)
    longest = int(policy.model.config.text_config.max_position_embeddings)
    context = min([longest - SPARE_TOKENS, *_limits(server)])
    shorter_than = int(server.get("max_req_input_len") or context + 1)
    return ServerFacts(
        version=version,
        seeded=bool(server.get("enable_deterministic_inference")),
        context=context,
        longest_prompt=min(context, shorter_than - 1),
        ranks=int(server.get("tp_size") or 1),
    )


def _limits(server: Mapping[str, Any]) -> list[int]:
    """Tokens of a conversation at most, by what a server keeps free of its context and of its cache."""
    found = []
    if server.get("context_length"):
        found.append(int(server["context_length"]) - SPARE_TOKENS)
    if server.get("max_total_num_tokens"):
        found.append(int(server["max_total_num_tokens"]) - 2 * int(server.get("page_size") or 1))
    return found


def _check_model(url: str, model: Mapping[str, Any], policy: Policy) -> None:
    wanted = policy.model.config
    if model.get("model_type") != wanted.model_type or not model.get("has_image_understanding"):
        raise WrongServer(
            f"{url} serves {model.get('model_path')}, a {model.get('model_type')} model"
            f"{'' if model.get('has_image_understanding') else ' without pictures'}; this policy is a "
            f"{wanted.model_type} model. Start the server with this policy's folder."
        )
    # After an update from disk, model_path is the folder of the weights; the tokenizer's folder stays.
    path = Path(str(model.get("tokenizer_path"))) / "config.json"
    if not path.is_file():
        logger.warning("%s serves %s, which cannot be read here: its sizes are not checked", url, path.parent)
        return
    theirs, ours = read_json(path), wanted.to_dict()
    for section, names in _SIZES.items():
        for name in names:
            there, here = theirs.get(section, {}).get(name), ours[section].get(name)
            if there != here:
                raise WrongServer(
                    f"{url} serves {path.parent} with {section}.{name}={there}; this policy has {here}. "
                    "Start the server with this policy's folder."
                )


async def _check_vocabulary(client: ServerClient, policy: Policy) -> None:
    special = policy.tokenizer.all_special_tokens
    text = "".join(special) + " Up, left:\n<answer>Down</answer> x² = 1.5"
    expected = policy.codec.encode_text(text).tolist()
    answer = await client.command("/tokenize", {"model": "", "prompt": text, "add_special_tokens": False})
    found = answer.get("tokens") if isinstance(answer, dict) else None
    if found != expected:
        raise WrongServer(
            f"{client.url} has another vocabulary: it reads a text with the special tokens as {found}, this policy as "
            f"{expected}. Start the server with this policy's folder, tokenizer included."
        )
