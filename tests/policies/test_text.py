"""Language model: our order of the work gives the library's numbers, wherever they are wanted."""

from __future__ import annotations

from collections import Counter
from contextlib import contextmanager
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from geo_sokoban_pipeline.policies.qwen3_vl import extend_positions
from policies.library import SIZES, conversation, library_inputs


@torch.no_grad()
def our_logits(policy, ids, images, **options):
    positions, _ = extend_positions(ids, [i.grid for i in images], policy.codec.image_pad_id, 2)
    if images:
        found = policy.network.encode(list({i.key: i for i in images}.values()))
        options |= {"features": found.tables, "rows": torch.from_numpy(found.rows([i.key for i in images]))}
    tokens = torch.from_numpy(ids.astype(np.int64))[None]
    states = policy.network(tokens, torch.from_numpy(positions)[:, None], **options)
    return policy.network.logits(states)[0]


@pytest.mark.parametrize("sizes", [[], [(96, 96)], SIZES], ids=["text only", "one", "mixed sizes"])
def test_logits_equal_the_library(policy, sizes):
    ids, images = conversation(policy, sizes)
    with torch.no_grad():
        expected = policy.model(**library_inputs(policy, ids, images)).logits[0]
    # 1e-4: the bar of the engine; two layers amplify the 1e-5 of the image features.
    torch.testing.assert_close(our_logits(policy, ids, images), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("sizes", [[], SIZES], ids=["text only", "mixed sizes"])
def test_a_head_gets_the_states_and_the_logits_of_the_same_pass(policy, sizes):
    ids, images = conversation(policy, sizes)
    seen = []
    taken = our_logits(policy, ids, images, head=lambda states, logits: seen.append(logits(states)) or states)
    assert torch.equal(seen[0][0], taken)


def random_tokens(rows, length):
    tokens = torch.randint(0, 300, (rows, length), generator=torch.Generator().manual_seed(0))
    return tokens, torch.arange(length).expand(3, rows, length)


def some_mask(length):
    """Of two rows; the second one's third token sees itself alone, and is seen by itself alone."""
    mask = torch.ones(length, length).tril().bool()[None, None].repeat(2, 1, 1, 1)
    mask[1, :, :, 2] = torch.eye(length).bool()[2]
    return mask


@contextmanager
def attending(policy, name):
    before = policy.model.config._attn_implementation
    policy.model.config._attn_implementation = name
    try:
        yield
    finally:
        policy.model.config._attn_implementation = before


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("count", [1, 3, 6])
def test_wanted_states_equal_those_of_a_full_pass(policy, count, attention):
    network, (tokens, positions) = policy.network, random_tokens(rows=4, length=12)
    wanted = torch.randint(0, 12, (4, count), generator=torch.Generator().manual_seed(count))
    parameters = [p for p in network.language.parameters() if p is not policy.model.lm_head.weight]
    with attending(policy, attention):
        full = network(tokens, positions)[torch.arange(4)[:, None], wanted]
        few = network(tokens, positions, wanted=wanted)
    torch.testing.assert_close(few, full, atol=1e-5, rtol=1e-5)
    weights = torch.randn(full.shape, generator=torch.Generator().manual_seed(9))
    expected = torch.autograd.grad((full * weights).sum(), parameters)
    for ours, theirs in zip(torch.autograd.grad((few * weights).sum(), parameters), expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)


@torch.no_grad()
def test_a_mask_holds_at_wanted_positions_and_with_eager_attention(policy):
    """The library's own eager attention would add a mask of bools as 0 and 1, and sees the future without one."""
    network, (tokens, positions) = policy.network, random_tokens(rows=2, length=8)
    wanted, states = torch.tensor([[7, 3], [5, 4]]), {}
    for masked, attention in product((False, True), ("sdpa", "eager")):
        masks = {"attention_mask": some_mask(8)} if masked else {}
        with attending(policy, attention):
            full, few = (network(tokens, positions, wanted=chosen, **masks) for chosen in (None, wanted))
        torch.testing.assert_close(few, full[torch.arange(2)[:, None], wanted], atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(full, states.setdefault(masked, full), atol=1e-5, rtol=1e-5)
    assert (states[False] - states[True])[1, wanted[1]].abs().max() > 1e-3


@torch.no_grad()
def test_every_layer_attends_as_the_policy_was_loaded(policy, monkeypatch):
    """Layers of both towers, the last one at few positions included."""
    seen = []

    def watched(module, *args, **named):
        seen.append(type(module).__name__.replace("Moe", ""))
        return sdpa_attention_forward(module, *args, **named)

    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS, "watched", watched)
    ids, images = conversation(policy, [(96, 96)])
    text, vision = policy.model.config.text_config, policy.model.config.vision_config
    with attending(policy, "watched"):
        our_logits(policy, ids, images, wanted=torch.tensor([[len(ids) - 1]]))
    expected = {"Qwen3VLVisionAttention": vision.depth, "Qwen3VLTextAttention": text.num_hidden_layers}
    assert Counter(seen) == expected


@torch.no_grad()
def test_the_last_layer_runs_only_where_it_is_wanted(policy):
    seen = []
    last = policy.model.model.language_model.layers[-1].post_attention_layernorm
    handle = last.register_forward_hook(lambda module, args, out: seen.append(out.shape[1]))
    tokens, positions = random_tokens(rows=1, length=8)
    for count in (4, 5):
        policy.network(tokens, positions, wanted=torch.zeros((1, count), dtype=torch.long))
    handle.remove()
    # More than half of the positions: reading them one by one would cost more than it saves.
    assert seen == [4, 8]


@torch.no_grad()
def test_images_change_pads_alone(policy):
    """Up to the first image all states are those of the text."""
    ids, images = conversation(policy, [(96, 96)])
    first = int(np.flatnonzero(ids == policy.codec.image_pad_id)[0])
    shown, bare = our_logits(policy, ids, images), our_logits(policy, ids[:first], [])
    torch.testing.assert_close(shown[:first], bare, atol=1e-5, rtol=1e-5)
    dark = [replace(images[0], patches=np.zeros_like(images[0].patches))]
    assert (our_logits(policy, ids, dark)[first:] - shown[first:]).abs().max() > 1e-3
