"""Adapters: names and values of the base stay, files are those of peft, merged weights compute the same."""

from __future__ import annotations

import copy
import json
import re
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from geo_sokoban_pipeline.config.policy import AdapterOptions
from geo_sokoban_pipeline.policies.lora import (
    Adapter,
    find_targets,
    matrices_of,
    open_weights,
    share_policy,
    write_adapter,
)
from geo_sokoban_pipeline.policies.policy import (
    Policy,
    attach_adapter,
    load_as,
    load_empty,
    load_policy,
    save_encoding,
    save_policy,
)
from geo_sokoban_pipeline.policies.weights import TensorSpec, WeightSource
from policies.library import build_samples, sample_log_probs
from task_options import PolicyOptions, TrainOptions

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
EVERYWHERE = (*ATTENTION, "gate_proj", "up_proj", "down_proj", "visual.*(qkv|attn.proj|linear_fc[12])")


def adapted(policy: Policy, targets: Sequence[str], base: Path, *, shaken: bool = True) -> Policy:
    """A copy of a policy with an adapter, whose B is not 0 any more."""
    found = replace(policy, model=copy.deepcopy(policy.model))
    attach_adapter(found, Adapter(3, 6.0, tuple(targets), base, seed=1))
    if shaken:
        generator = torch.Generator().manual_seed(0)
        for name, matrix in matrices_of(dict(found.model.named_parameters())).items():
            if "lora_B" in name:
                matrix.data.copy_(0.1 * torch.randn(matrix.shape, generator=generator))
    return found


def write(policy: Policy, folder: Path) -> None:
    """Write an adapter as a checkpoint has it."""
    assert policy.adapter is not None
    matrices = matrices_of(dict(policy.model.named_parameters()))
    save_encoding(policy, folder)
    specs = {name: TensorSpec.of(matrix) for name, matrix in matrices.items()}
    write_adapter(policy.adapter, specs, matrices.__getitem__, folder)


@pytest.fixture(params=["tiny_policy", "mixture"])
def stored(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Policy, Path]:
    """A policy, and its adapter in a folder beside it."""
    policy: Policy = request.getfixturevalue(request.param)
    save_policy(policy, tmp_path / "policy")
    targets = EVERYWHERE if request.param == "tiny_policy" else ATTENTION
    found = adapted(policy, targets, tmp_path / "policy")
    write(found, tmp_path / "checkpoints" / "iter=00000")
    return found, tmp_path / "checkpoints" / "iter=00000"


def log_probs(policy: Policy) -> np.ndarray:
    return np.concatenate([sample_log_probs(policy, sample).detach().numpy() for sample in build_samples(policy)])


@pytest.mark.parametrize(
    ("targets", "layers"),
    [
        (ATTENTION, 8),
        (("q_proj",), 2),
        (("layers.0.self_attn.[qk]_proj", "q_proj"), 3),
        (("model.language_model.layers.1.mlp.up_proj",), 1),
        (EVERYWHERE, 22),
    ],
)
def test_targets_are_names_or_patterns(tiny_policy: Policy, targets: tuple[str, ...], layers: int) -> None:
    assert len(find_targets(tiny_policy.model, targets)) == layers


@pytest.mark.parametrize(
    ("name", "pattern", "raw"),
    [
        ("tiny_policy", "proj", "model.visual.patch_embed.proj"),
        ("tiny_policy", "lm_head", "lm_head"),
        ("tiny_policy", "embed_tokens", "model.language_model.embed_tokens"),
        ("tiny_policy", ".*norm", "model.visual.merger.norm"),
        ("mixture", "mlp.gate", "model.language_model.layers.0.mlp.gate"),
        ("mixture", "experts", "model.language_model.layers.0.mlp.experts"),
        ("tiny_policy", "gate_porj", "gate_porj matches no linear layer. There are layers whose names end in"),
        ("mixture", "gate_proj", "gate_proj matches no linear layer"),
    ],
)
def test_weights_that_no_adapter_reaches_are_refused_by_name(
    request: pytest.FixtureRequest, name: str, pattern: str, raw: str
) -> None:
    model = request.getfixturevalue(name).model
    with pytest.raises(ValueError, match=f"policy.adapter.targets: .*{re.escape(raw)}"):
        find_targets(model, ("q_proj", pattern))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"adapter": {"dropout": 0.1}}, "an adapter has no dropout"),
        ({"adapter": {"targets": ["q_proj("]}}, "no regular expression"),
        ({"adapter": {}, "freeze": ["visual"]}, "an adapter freezes all weights"),
        ({"adapter": {"rank": 0}}, "greater than or equal to 1"),
    ],
)
def test_options_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PolicyOptions.model_validate(changes)


def test_megatron_refuses_an_adapter() -> None:
    with pytest.raises(ValueError, match="policy.adapter with backend=megatron: .* Set backend=fsdp"):
        TrainOptions.model_validate({"policy": {"adapter": {}}, "backend": "megatron"})


def test_a_fresh_adapter_changes_nothing_and_depends_on_the_seed_alone(tiny_policy: Policy, tmp_path: Path) -> None:
    found = [adapted(tiny_policy, ATTENTION, tmp_path, shaken=False) for _ in range(2)]
    other = replace(tiny_policy, model=copy.deepcopy(tiny_policy.model))
    attach_adapter(other, Adapter(3, 6.0, ATTENTION, tmp_path, seed=2))
    own, same, another = (dict(policy.model.named_parameters()) for policy in (*found, other))
    base = dict(tiny_policy.model.named_parameters())
    assert {name for name in own if name not in base} == matrices_of(own).keys()
    assert all(torch.equal(own[name], weight) and not own[name].requires_grad for name, weight in base.items())
    assert all(torch.equal(matrix, same[name]) and matrix.requires_grad for name, matrix in matrices_of(own).items())
    differing = {name for name, matrix in matrices_of(own).items() if not torch.equal(matrix, another[name])}
    assert differing == {name for name in own if ".lora_A." in name}
    np.testing.assert_array_equal(log_probs(found[0]), log_probs(tiny_policy))


@pytest.mark.parametrize("stored", ["tiny_policy"], indirect=True)
@pytest.mark.parametrize("place", ["checkpoints/iter=00000", "final_policy/adapter"])
def test_peft_computes_the_same_from_a_folder(stored: tuple[Policy, Path], tmp_path: Path, place: str) -> None:
    import peft

    policy, folder = stored
    share_policy(folder, {})(tmp_path / "final_policy")
    base = load_policy(tmp_path / "policy")
    wrapped = peft.PeftModel.from_pretrained(base.model, tmp_path / place)
    assert sum("lora_A" in name for name, _ in wrapped.named_parameters()) == len(
        find_targets(load_policy(tmp_path / "policy").model, EVERYWHERE)
    )
    np.testing.assert_allclose(log_probs(base), log_probs(policy), atol=1e-6)
    assert np.abs(log_probs(base) - log_probs(load_policy(tmp_path / "policy"))).max() > 0.01


def test_a_folder_of_peft_is_read(tiny_policy: Policy, tmp_path: Path) -> None:
    import peft

    save_policy(tiny_policy, tmp_path / "policy")
    wrapped = peft.get_peft_model(
        load_policy(tmp_path / "policy").model,
        peft.LoraConfig(
            r=2, lora_alpha=8, target_modules=r".*language_model.*\.(q|down)_proj", init_lora_weights=False
        ),
    )
    wrapped.peft_config["default"].base_model_name_or_path = str(tmp_path / "policy")
    wrapped.save_pretrained(tmp_path / "adapter")
    save_encoding(tiny_policy, tmp_path / "adapter")
    found = load_as(PolicyOptions(), tmp_path / "adapter")
    expected = replace(tiny_policy, model=wrapped.base_model.model.eval())
    np.testing.assert_allclose(log_probs(found), log_probs(expected), atol=1e-6)


def test_merged_weights_compute_the_same_however_they_are_read(stored: tuple[Policy, Path], tmp_path: Path) -> None:
    policy, folder = stored
    before = {name: weight.clone() for name, weight in policy.model.named_parameters()}
    save_policy(policy, tmp_path / "merged")
    share_policy(folder, {})(tmp_path / "shared")
    expected = log_probs(policy)
    for place in ("merged", "shared"):
        np.testing.assert_allclose(log_probs(load_policy(tmp_path / place)), expected, atol=1e-5)
    np.testing.assert_array_equal(log_probs(load_as(PolicyOptions(), folder)), expected)
    one, two = dict(WeightSource.of_model(policy.model).read()), dict(open_weights(folder).read())
    assert list(one) == [name for name in before if name not in matrices_of(before)]
    assert all(torch.equal(weight, two[name]) for name, weight in one.items())
    assert all(torch.equal(weight, before[name]) for name, weight in policy.model.named_parameters())


@pytest.mark.parametrize("stored", ["tiny_policy"], indirect=True)
def test_frozen_weights_are_held_in_the_compute_type(stored: tuple[Policy, Path], tmp_path: Path) -> None:
    """The sums leave in the type of the adapter, so that small changes are not rounded away."""
    policy, folder = stored
    rounded = load_as(PolicyOptions(compute="bfloat16"), folder)
    types = {name: parameter.dtype for name, parameter in rounded.model.named_parameters()}
    assert {types[name] for name in matrices_of(types)} == {torch.float32}
    layer = "model.language_model.layers.0.self_attn.q_proj"
    assert types[f"{layer}.weight"] == types["model.visual.blocks.0.mlp.linear_fc1.weight"] == torch.bfloat16
    merged = dict(WeightSource.of_model(rounded.model).read())
    product = policy.model.get_submodule(layer)
    expected = product.weight.bfloat16().float() + product.lora_B.weight @ product.lora_A.weight * 2.0
    torch.testing.assert_close(merged[f"{layer}.weight"], expected)
    assert {weight.dtype for weight in merged.values()} == {torch.float32}
    empty = load_empty(PolicyOptions(compute="bfloat16"), tmp_path / "policy", policy.adapter)
    assert {name: parameter.dtype for name, parameter in empty.model.named_parameters()} == types


@pytest.mark.parametrize("stored", ["tiny_policy"], indirect=True)
def test_a_moved_run_keeps_its_adapters(stored: tuple[Policy, Path], tmp_path: Path) -> None:
    policy, folder = stored
    (tmp_path / "elsewhere").mkdir()
    for name in ("policy", "checkpoints"):
        shutil.move(tmp_path / name, tmp_path / "elsewhere" / name)
    moved = tmp_path / "elsewhere" / folder.relative_to(tmp_path)
    np.testing.assert_array_equal(log_probs(load_as(PolicyOptions(), moved)), log_probs(policy))
    shutil.rmtree(tmp_path / "elsewhere" / "policy")
    with pytest.raises(FileNotFoundError, match="an adapter of the policy .*which does not exist"):
        load_as(PolicyOptions(), moved)


@pytest.mark.parametrize("stored", ["tiny_policy"], indirect=True)
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"use_dora": True}, "use_dora"),
        ({"bias": "all"}, "bias=all"),
        ({"peft_type": "LOHA"}, "peft_type=LOHA"),
        ({"r": 2}, "lora_A.weight is \\(3, .*but the model's is \\(2"),
        ({"target_modules": ["q_proj"]}, "but the model's is missing"),
    ],
)
def test_other_adapters_are_refused(stored: tuple[Policy, Path], changes: dict[str, Any], message: str) -> None:
    _, folder = stored
    config = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps(config | changes))
    with pytest.raises(ValueError, match=message):
        load_as(PolicyOptions(), folder)


@pytest.mark.parametrize("stored", ["tiny_policy"], indirect=True)
def test_an_empty_policy_is_read_from_a_whole_folder(stored: tuple[Policy, Path]) -> None:
    with pytest.raises(ValueError, match="holds an adapter"):
        load_empty(PolicyOptions(), stored[1])


def test_moments_and_gradients_at_2b_are_at_most_3_percent() -> None:
    """Counted on a model without memory, of Qwen3-VL-2B's widths."""
    text = {"hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28, "num_attention_heads": 16}
    text |= {"num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151_936, "tie_word_embeddings": True}
    vision = {"depth": 24, "hidden_size": 1024, "intermediate_size": 4096, "num_heads": 16, "out_hidden_size": 2048}
    from transformers import Qwen3VLConfig

    from geo_sokoban_pipeline.policies.policy import empty_model

    model = empty_model(
        Qwen3VLConfig(text_config=text, vision_config=vision, tie_word_embeddings=True), "sdpa", torch.float32
    )
    whole = sum(parameter.numel() for parameter in model.parameters())
    assert 2.0e9 < whole < 2.3e9
    attach_adapter(Policy(model, None, None), Adapter(16, 32.0, AdapterOptions().targets, Path()))
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    assert trained == 16 * 28 * 38_912
    assert trained <= 0.03 * whole
