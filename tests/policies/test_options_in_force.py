"""Every field of the policy's options has the effect that its description promises."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from geo_sokoban_pipeline.policies import preparing
from geo_sokoban_pipeline.policies.lora import AdaptedLinear, Adapter
from geo_sokoban_pipeline.policies.policy import Policy, device_of, load_as, save_policy
from geo_sokoban_pipeline.policies.preparing import write_starting_policy
from geo_sokoban_pipeline.policies.tiny import build_tiny_policy
from option_fields import leaves
from task_options import GeometryTinyOptions, PolicyOptions, TinyPolicyOptions

SMALL = {"hidden": 16, "heads": 2, "kv_heads": 2, "head_dim": 8, "mlp": 16, "layers": 2, "vision_hidden": 16}
SMALL |= {"vision_heads": 2, "vision_mlp": 16}
# Sizes: field, another value, and what of the model equals it.
SIZES: dict[str, tuple[Any, Callable[[Policy], Any]]] = {
    "hidden": (24, lambda policy: policy.model.model.language_model.embed_tokens.weight.shape[1]),
    "layers": (3, lambda policy: len(policy.model.model.language_model.layers)),
    "heads": (4, lambda policy: policy.model.model.language_model.layers[0].self_attn.q_proj.out_features // 8),
    "kv_heads": (1, lambda policy: policy.model.model.language_model.layers[0].self_attn.k_proj.out_features // 8),
    "head_dim": (12, lambda policy: policy.model.model.language_model.layers[0].self_attn.k_proj.out_features // 2),
    "mlp": (20, lambda policy: policy.model.model.language_model.layers[0].mlp.up_proj.out_features),
    "vision_hidden": (32, lambda policy: policy.model.model.visual.pos_embed.weight.shape[1]),
    "vision_layers": (2, lambda policy: len(policy.model.model.visual.blocks)),
    "vision_heads": (4, lambda policy: policy.model.model.visual.blocks[0].attn.num_heads),
    "vision_mlp": (20, lambda policy: policy.model.model.visual.blocks[0].mlp.linear_fc1.out_features),
    "vision_grid": (8, lambda policy: int(policy.model.model.visual.pos_embed.weight.shape[0] ** 0.5)),
    "deepstack": ((), lambda policy: tuple(policy.model.config.vision_config.deepstack_visual_indexes)),
}


def tiny(**changes: Any) -> Policy:
    return build_tiny_policy(TinyPolicyOptions.model_validate(SMALL | changes), seed=0)


@pytest.fixture(scope="module")
def small() -> Policy:
    return tiny()


@pytest.mark.parametrize("name", SIZES)
def test_sizes(name: str, small: Policy) -> None:
    value, measure = SIZES[name]
    assert measure(tiny(**{name: value})) == value != measure(small)


def _vocabulary(small: Policy, folder: Path, patch: pytest.MonkeyPatch) -> None:
    assert len(tiny(vocabulary=300).tokenizer) == len(small.tokenizer) - 84


def _texts(small: Policy, folder: Path, patch: pytest.MonkeyPatch) -> None:
    """Words of the task are few tokens."""
    policies = {name: tiny(texts=name) for name in ("sokoban", "geo3k")}
    length = {
        (name, text): len(policy.codec.encode_text(text))
        for name, policy in policies.items()
        for text in ("<answer>Right</answer>", "\\boxed{60}")
    }
    assert length["sokoban", "<answer>Right</answer>"] < length["geo3k", "<answer>Right</answer>"]
    assert length["geo3k", "\\boxed{60}"] < length["sokoban", "\\boxed{60}"]
    assert GeometryTinyOptions().texts == "geo3k"


def _spread(small: Policy, folder: Path, patch: pytest.MonkeyPatch) -> None:
    for spread in (0.1, 0.02):
        core = tiny(initializer_range=spread).model.model
        for weights in (core.language_model.embed_tokens.weight, core.visual.patch_embed.proj.weight):
            assert weights.std().item() == pytest.approx(spread, rel=0.05)


def _pixels(small: Policy, folder: Path, patch: pytest.MonkeyPatch) -> None:
    image = Image.new("RGB", (64, 64), "red")
    assert small.reader.read(image).grid == (1, 4, 4)
    assert tiny(min_pixels=128 * 128).reader.read(image).grid == (1, 8, 8)
    assert tiny(max_pixels=32 * 32).reader.read(image).grid == (1, 2, 2)


def _sources(small: Policy, folder: Path, patch: pytest.MonkeyPatch) -> None:
    """Built here, taken from a folder, or fetched by its name and revision."""
    save_policy(small, folder / "given")
    own = (folder / "given" / "model.safetensors").read_bytes()
    asked: list[Any] = []

    def fetch(path: str, revision: str | None) -> Path:
        asked.append((path, revision))
        return folder / "given"

    patch.setattr(preparing, "fetch_policy", fetch)
    for source, path, revision in (
        ("folder", str(folder / "given"), None),
        ("hub", "somebody/policy", None),
        ("hub", "somebody/policy", "abc"),
    ):
        made = folder / f"made{len(list(folder.iterdir()))}"
        made.mkdir()
        options = PolicyOptions.model_validate({"source": source, "path": path, "revision": revision})
        write_starting_policy(options, 0, {})(made)
        assert (made / "model.safetensors").read_bytes() == own
    assert asked == [("somebody/policy", None), ("somebody/policy", "abc")]
    made = folder / "built"
    made.mkdir()
    write_starting_policy(PolicyOptions.model_validate({"tiny": SMALL}), 1, {})(made)
    assert (made / "model.safetensors").read_bytes() != own


def _loaded(small: Policy, folder: Path, patch: pytest.MonkeyPatch) -> None:
    save_policy(small, folder / "given")

    def load(**options: Any) -> Policy:
        return load_as(PolicyOptions.model_validate(options), folder / "given")

    for dtype in ("float32", "bfloat16", "float16"):
        assert {weight.dtype for weight in load(dtype=dtype).model.parameters()} == {getattr(torch, dtype)}
    for attention in ("sdpa", "eager"):
        assert load(attention=attention).model.config._attn_implementation == attention
    given = torch.ones(2, 2)
    for compute, dtype in ((None, torch.float32), ("bfloat16", torch.bfloat16)):
        policy = load(compute=compute)
        assert policy.model.dtype == torch.float32
        with policy.computing():
            assert (given @ given).dtype == dtype
    assert load().model.device.type == "cpu"
    places = {name: device_of(PolicyOptions.model_validate({"device": name})) for name in ("cpu", "cuda", "auto")}
    assert places == {"cpu": "cpu", "cuda": "cuda", "auto": "cuda" if torch.cuda.is_available() else "cpu"}


def _frozen(small: Policy, folder: Path, patch: pytest.MonkeyPatch) -> None:
    save_policy(small, folder / "given")
    options = PolicyOptions.model_validate({"freeze": ["visual", "language_model.layers.0"]})
    given = load_as(options, folder / "given").model.named_parameters()
    frozen = [name for name, parameter in given if not parameter.requires_grad]
    parts = ("model.visual.", "model.language_model.layers.0.")
    assert frozen == [name for name, _ in small.model.named_parameters() if name.startswith(parts)]
    for named, message in (
        (["vision"], "freeze=vision: .* visual.blocks, .* language_model.layers, language_model.norm"),
        (["language_model.layer"], "freeze=language_model.layer: "),
        (["visual", "language_model", "lm_head"], "freeze=lm_head: "),  # the head is the embedding
        (["visual", "language_model"], "no parameter is left to train"),
    ):
        refused = PolicyOptions.model_validate({"freeze": named, "tiny": SMALL})
        for prepare in (lambda: load_as(refused, folder / "given"), lambda: write_starting_policy(refused, 0, {})):  # noqa: B023
            with pytest.raises(ValueError, match=message):
                prepare()


def _adapted(small: Policy, folder: Path, patch: pytest.MonkeyPatch) -> None:
    """Rank, factor and layers; a pattern without a layer is refused before the run."""
    save_policy(small, folder / "given")
    for given, rank, scale, layers in (
        ({}, 16, 2.0, 14),
        ({"rank": 2, "alpha": 3.0, "targets": ["q_proj", "visual.*qkv"]}, 2, 1.5, 3),
    ):
        options = PolicyOptions.model_validate({"adapter": given})
        model = load_as(options, folder / "given", Adapter.fresh(options.adapter, folder / "given", 0)).model
        found = [module for module in model.modules() if isinstance(module, AdaptedLinear)]
        assert {(module.lora_A.out_features, module.scale) for module in found} == {(rank, scale)}
        assert len(found) == layers
    refused = PolicyOptions.model_validate({"adapter": {"targets": ["qproj"]}, "tiny": SMALL})
    with pytest.raises(ValueError, match="policy.adapter.targets: qproj matches no linear layer"):
        write_starting_policy(refused, 0, {})


SHOWN: dict[str, Callable[[Policy, Path, pytest.MonkeyPatch], None]] = {
    "tiny.vocabulary": _vocabulary,
    "tiny.texts": _texts,
    "tiny.initializer_range": _spread,
    "tiny.min_pixels": _pixels,
    "tiny.max_pixels": _pixels,
    "source": _sources,
    "path": _sources,
    "revision": _sources,
    "dtype": _loaded,
    "compute": _loaded,
    "device": _loaded,
    "attention": _loaded,
    "freeze": _frozen,
    "adapter": _adapted,
}


def test_every_field_is_shown_to_have_an_effect() -> None:
    assert {*SHOWN, *(f"tiny.{name}" for name in SIZES)} == set(leaves(PolicyOptions))


@pytest.mark.parametrize("check", dict.fromkeys(SHOWN.values()), ids=lambda check: check.__name__.strip("_"))
def test_effects(check: Any, small: Policy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check(small, tmp_path, monkeypatch)
