"""A mixture of experts leaves the process in the layout of the published checkpoints, by whichever way it leaves."""

from __future__ import annotations

import copy

import pytest
import torch
from safetensors.torch import load_file

from geo_sokoban_pipeline.config.grpo import OptimizerOptions
from geo_sokoban_pipeline.policies.experts import check_orientation
from geo_sokoban_pipeline.policies.policy import Policy, load_policy, save_policy
from geo_sokoban_pipeline.rollout.engines.transformers import TransformersEngine
from geo_sokoban_pipeline.training.backends.torch import TorchBackend

EXPERTS, HIDDEN, INNER = 4, 64, 24
LAYER = "model.language_model.layers.0.mlp.experts"


def build_config(tiny_policy, **changes):
    from transformers import Qwen3VLMoeConfig

    own = tiny_policy.model.config
    text = {**own.text_config.to_dict(), "num_experts": EXPERTS, "num_experts_per_tok": 2, "decoder_sparse_step": 1}
    text |= {"moe_intermediate_size": INNER, "mlp_only_layers": [], **changes}
    text.pop("model_type")
    vision = {name: value for name, value in own.vision_config.to_dict().items() if name != "model_type"}
    ids = ("image", "video", "vision_start", "vision_end")
    marks = {f"{name}_token_id": getattr(own, f"{name}_token_id") for name in ids}
    return Qwen3VLMoeConfig(text_config=text, vision_config=vision, tie_word_embeddings=False, **marks)


@pytest.fixture(scope="module")
def mixture(tiny_policy) -> Policy:
    from transformers import Qwen3VLMoeForConditionalGeneration

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Qwen3VLMoeForConditionalGeneration(build_config(tiny_policy))
    return Policy(model.float().eval(), tiny_policy.tokenizer, tiny_policy.image_processor)


@pytest.fixture(scope="module")
def published(mixture, tmp_path_factory):
    """Weights as the library saves them, turned by hand into the shapes of the hub's files."""
    folder = tmp_path_factory.mktemp("library")
    mixture.model.save_pretrained(folder)
    weights = load_file(folder / "model.safetensors")
    turned = {
        name: torch.stack([expert.T for expert in weight]) if ".experts." in name else weight
        for name, weight in weights.items()
    }
    assert tuple(turned[f"{LAYER}.gate_up_proj"].shape) == (EXPERTS, HIDDEN, 2 * INNER)
    assert tuple(turned[f"{LAYER}.down_proj"].shape) == (EXPERTS, INNER, HIDDEN)
    return turned


def assert_same(ours, theirs):
    assert ours.keys() == theirs.keys()
    for name, weight in ours.items():
        assert weight.shape == theirs[name].shape and torch.equal(weight, theirs[name]), name


def test_saved_files_have_the_published_layout_and_load_everywhere(mixture, published, tmp_path):
    from transformers import AutoModelForImageTextToText

    save_policy(mixture, tmp_path / "first")
    assert_same(load_file(tmp_path / "first" / "model.safetensors"), published)
    plain = AutoModelForImageTextToText.from_pretrained(tmp_path / "first")
    assert_same(dict(plain.named_parameters()), dict(mixture.model.named_parameters()))
    save_policy(load_policy(tmp_path / "first"), tmp_path / "second")
    for path in (tmp_path / "first").iterdir():
        assert path.read_bytes() == (tmp_path / "second" / path.name).read_bytes(), path.name


def test_weights_on_their_way_to_servers_have_it_too(mixture, published, tmp_path):
    backend = TorchBackend(mixture, OptimizerOptions())
    weights = dict(backend.iter_weights())
    assert_same(weights, published)
    save_policy(mixture, tmp_path, weights)  # as a server takes them from a folder
    assert_same(load_file(tmp_path / "model.safetensors"), published)


def test_a_checkpoint_is_loaded_back(mixture, tmp_path):
    trained = Policy(copy.deepcopy(mixture.model), mixture.tokenizer, mixture.image_processor)
    backend = TorchBackend(trained, OptimizerOptions())
    with torch.no_grad():
        for parameter in trained.model.parameters():
            parameter.mul_(1.5)
    backend.export(tmp_path)
    backend.save_state(tmp_path)
    fresh = Policy(copy.deepcopy(mixture.model), mixture.tokenizer, mixture.image_processor)
    resumed = TorchBackend(fresh, OptimizerOptions())
    resumed.load_state(tmp_path)
    assert_same(dict(resumed.policy.model.named_parameters()), dict(trained.model.named_parameters()))
    engine = TransformersEngine(Policy(copy.deepcopy(mixture.model), mixture.tokenizer, mixture.image_processor))
    engine.update_weights(backend.iter_weights(), 1)
    assert_same(dict(engine.policy.model.named_parameters()), dict(trained.model.named_parameters()))


@pytest.mark.parametrize("inner", [HIDDEN, HIDDEN // 2])
def test_square_experts_are_refused(tiny_policy, inner):
    with pytest.raises(ValueError, match=f"moe_intermediate_size={inner}: .* do not show the layout"):
        check_orientation(build_config(tiny_policy, moe_intermediate_size=inner))
    check_orientation(build_config(tiny_policy))
    check_orientation(tiny_policy.model.config)


@torch.no_grad()
def test_states_are_those_of_the_library_at_few_positions_too(mixture):
    tokens = torch.randint(0, 300, (2, 8), generator=torch.Generator().manual_seed(0))
    positions, wanted = torch.arange(8).expand(3, 2, 8), torch.tensor([[7, 3], [5, 4]])
    expected = mixture.model(input_ids=tokens).logits
    full, few = (mixture.network(tokens, positions, wanted=chosen) for chosen in (None, wanted))
    torch.testing.assert_close(mixture.network.logits(full), expected, atol=1e-4, rtol=1e-4)
    picked = expected[torch.arange(2)[:, None], wanted]
    torch.testing.assert_close(mixture.network.logits(few), picked, atol=1e-4, rtol=1e-4)
