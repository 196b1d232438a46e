"""Language model: our order of the work gives the library's numbers, wherever they are wanted."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from geo_sokoban_pipeline.policies import qwen3_vl
from geo_sokoban_pipeline.policies.qwen3_vl import encode_images, extend_positions, place_images, run_text
from policies.library import SIZES, library_inputs, read_noise


def conversation(policy, sizes):
    images = read_noise(policy, sizes)
    pad, mark = policy.codec.image_pad_id, policy.tokenizer.convert_tokens_to_ids("<|vision_start|>")
    ids = [5, 6, 7]
    for image in images:
        ids += [mark, *[pad] * image.token_count(2), mark + 1, 8, 9]
    return np.array(ids, np.int32), images


@torch.no_grad()
def our_logits(policy, ids, images):
    core = policy.model.model
    tokens = torch.from_numpy(ids.astype(np.int64))[None]
    positions, _ = extend_positions(ids, [i.grid for i in images], policy.codec.image_pad_id, 2)
    mask, deepstack, embeddings = None, [], core.language_model.embed_tokens(tokens)
    if images:
        features = encode_images(core.visual, list({i.key: i for i in images}.values()), policy.image_processor)
        rows = torch.from_numpy(features.rows([i.key for i in images]))
        mask = tokens == policy.codec.image_pad_id
        embeddings = place_images(embeddings, mask, features.embeddings[rows])
        deepstack = [layer[rows] for layer in features.deepstack]
    hidden = run_text(
        core.language_model, embeddings, torch.from_numpy(positions)[:, None], image_mask=mask, deepstack=deepstack
    )
    return policy.model.lm_head(hidden)[0]


@pytest.mark.parametrize("sizes", [[], [(96, 96)], SIZES], ids=["text only", "one", "mixed sizes"])
def test_logits_equal_the_library(policy, sizes):
    ids, images = conversation(policy, sizes)
    with torch.no_grad():
        expected = policy.model(**library_inputs(policy, ids, images)).logits[0]
    # 1e-4: the bar of the engine; two layers amplify the 1e-5 of the picture features.
    torch.testing.assert_close(our_logits(policy, ids, images), expected, atol=1e-4, rtol=1e-4)


def random_states(policy, rows, length):
    generator = torch.Generator().manual_seed(0)
    embeddings = torch.randn((rows, length, policy.model.config.text_config.hidden_size), generator=generator)
    return embeddings, torch.arange(length).expand(3, rows, length)


@pytest.mark.parametrize("count", [1, 3, 6])
def test_wanted_states_equal_those_of_a_full_pass(policy, count):
    language = policy.model.model.language_model
    embeddings, positions = random_states(policy, rows=4, length=12)
    wanted = torch.randint(0, 12, (4, count), generator=torch.Generator().manual_seed(count))
    parameters = [p for n, p in language.named_parameters() if n != "embed_tokens.weight"]
    full = run_text(language, embeddings, positions)[torch.arange(4)[:, None], wanted]
    few = run_text(language, embeddings, positions, wanted=wanted)
    torch.testing.assert_close(few, full, atol=1e-5, rtol=1e-5)
    weights = torch.randn(full.shape, generator=torch.Generator().manual_seed(9))
    expected = torch.autograd.grad((full * weights).sum(), parameters)
    for ours, theirs in zip(torch.autograd.grad((few * weights).sum(), parameters), expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)


def test_a_mask_holds_at_wanted_positions_too(policy):
    language = policy.model.model.language_model
    embeddings, positions = random_states(policy, rows=2, length=8)
    mask = torch.ones(8, 8).tril().bool()[None, None].repeat(2, 1, 1, 1)
    mask[1, :, :, 2] = torch.eye(8).bool()[2]
    wanted = torch.tensor([[7, 3], [5, 4]])
    with torch.no_grad():
        full = run_text(language, embeddings, positions, attention_mask=mask)[torch.arange(2)[:, None], wanted]
        few = run_text(language, embeddings, positions, attention_mask=mask, wanted=wanted)
        unmasked = run_text(language, embeddings, positions, wanted=wanted)
    torch.testing.assert_close(few, full, atol=1e-5, rtol=1e-5)
    assert (unmasked[1] - few[1]).abs().max() > 1e-3


@pytest.mark.parametrize("masked", [False, True])
def test_eager_attention_gives_the_same_states(policy, masked):
    """The library's own eager attention would add a mask of bools as 0 and 1, and sees the future without one."""
    language = policy.model.model.language_model
    embeddings, positions = random_states(policy, rows=2, length=8)
    mask = torch.ones(8, 8).tril().bool()[None, None].repeat(2, 1, 1, 1) if masked else None
    if mask is not None:
        mask[1, :, :, 2] = torch.eye(8).bool()[2]
    wanted = torch.tensor([[7, 3], [5, 4]])
    with torch.no_grad():
        expected = [run_text(language, embeddings, positions, attention_mask=mask, wanted=w) for w in (None, wanted)]
        before = language.config._attn_implementation
        language.config._attn_implementation = "eager"
        try:
            found = [run_text(language, embeddings, positions, attention_mask=mask, wanted=w) for w in (None, wanted)]
        finally:
            language.config._attn_implementation = before
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


def test_the_last_layer_runs_only_where_it_is_wanted(policy, monkeypatch):
    language = policy.model.model.language_model
    seen = []
    handle = language.layers[-1].mlp.register_forward_hook(lambda module, args, out: seen.append(out.shape[1]))
    embeddings, positions = random_states(policy, rows=1, length=8)
    for count in (4, 5):
        run_text(language, embeddings, positions, wanted=torch.zeros((1, count), dtype=torch.long))
    monkeypatch.setattr(qwen3_vl, "Qwen3VLTextDecoderLayer", type(None))
    states = run_text(language, embeddings, positions, wanted=torch.tensor([[2]]))
    handle.remove()
    # More than half of the positions, or a layer of another kind, take the library's own way.
    assert seen == [4, 8, 8]
    assert states.shape == (1, 1, embeddings.shape[2])


@pytest.mark.parametrize("part", ["", ".self_attn"])
@pytest.mark.parametrize("register", ["register_forward_hook", "register_forward_pre_hook"])
def test_no_hook_of_the_last_layer_is_bypassed(policy, part, register):
    """FSDP2 gathers weights in such hooks."""
    language = policy.model.model.language_model
    module = language.layers[-1].get_submodule(part.lstrip("."))
    seen = []
    handle = getattr(module, register)(lambda *_: seen.append(1))
    embeddings, positions = random_states(policy, rows=1, length=8)
    wanted = torch.tensor([[7, 2]])
    watched = run_text(language, embeddings, positions, wanted=wanted)
    handle.remove()
    assert seen == [1]
    torch.testing.assert_close(watched, run_text(language, embeddings, positions, wanted=wanted), atol=1e-5, rtol=1e-5)


def test_a_class_made_of_the_last_layer_is_called_whole(policy):
    """What FSDP2 does to a layer in place."""
    layer = policy.model.model.language_model.layers[-1]
    own = type(layer)
    embeddings, _ = random_states(policy, rows=1, length=8)
    wanted = torch.tensor([[7, 2]])
    assert qwen3_vl._is_worth_it(layer, wanted, embeddings)
    layer.__class__ = type(f"FSDP{own.__name__}", (own,), {})
    try:
        assert not qwen3_vl._is_worth_it(layer, wanted, embeddings)
    finally:
        layer.__class__ = own


def test_place_images_changes_pads_alone():
    embeddings = torch.zeros(2, 3, 4)
    mask = torch.tensor([[True, False, False], [False, True, True]])
    placed = place_images(embeddings, mask, torch.arange(12.0).view(3, 4))
    assert placed[mask].tolist() == torch.arange(12.0).view(3, 4).tolist()
    assert not placed[~mask].any()
    assert not embeddings.any()
