"""Memory of an optimizer step: each option that bounds it leaves the gradients as they are, and bounds it."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from geo_sokoban_pipeline.config.grpo import GrpoOptions, OptimizerOptions
from geo_sokoban_pipeline.grpo.loss import GrpoObjective, SftObjective, StepSize
from geo_sokoban_pipeline.policies.policy import Policy, freeze_parameters
from geo_sokoban_pipeline.policies.tiny import build_tiny_policy
from geo_sokoban_pipeline.training.backends.torch import GradientPass, PassSetting, TorchBackend
from geo_sokoban_pipeline.training.batch import TrainSample
from task_options import TinyPolicyOptions, TrainOptions
from training.live_bytes import LiveBytes
from training.setup import demonstrate

# Two image parts and more, five chunks and more, three micro-batches.
OPTIONS: dict[str, dict[str, Any]] = {
    "gradient checkpointing": {"gradient_checkpointing": True},
    "vision passes": {"vision_patches": 40},
    "chunks of logits": {"logit_chunk": 7},
}
OPTIONS["all"] = {name: value for one in OPTIONS.values() for name, value in one.items()}
GRPO: dict[str, dict[str, Any]] = {
    "plain": {"entropy_coefficient": 0.0},
    "entropy and kl": {"entropy_coefficient": 0.05, "kl_coefficient": 0.2, "reduction": "sample_mean"},
}
TEMPERATURE = 0.8


@pytest.fixture(scope="module")
def samples(tiny_policy: Policy, sokoban_rows: Any, train_options: TrainOptions) -> list[TrainSample]:
    """Eight episodes with images of three sizes."""
    found = demonstrate(tiny_policy, sokoban_rows(24), train_options, [16, 24, 32, 16, 24, 32, 16, 16])
    assert len({image.grid for sample in found for image in sample.images}) == 3
    return found


def gradients(policy: Policy, samples: Sequence[TrainSample], grpo: dict[str, Any], **changes: Any) -> Any:
    """Gradients by parameter and metrics of a step."""
    policy = copy.deepcopy(policy)
    setting = PassSetting.of(OptimizerOptions(max_tokens=400, **changes), TEMPERATURE)
    metrics = GradientPass(policy, setting).accumulate(
        samples, GrpoObjective(GrpoOptions(**grpo)), StepSize.of(samples)
    )
    return {name: parameter.grad for name, parameter in policy.model.named_parameters()}, metrics


@pytest.fixture(scope="module")
def expected(tiny_policy: Policy, samples: list[TrainSample]) -> dict[str, Any]:
    """Gradients and metrics without any option."""
    return {name: gradients(tiny_policy, samples, grpo) for name, grpo in GRPO.items()}


@pytest.mark.parametrize(("name", "grpo"), [*((name, "entropy and kl") for name in OPTIONS), ("all", "plain")])
def test_gradients_are_those_without_the_option(
    tiny_policy: Policy, samples: list[TrainSample], expected: dict[str, Any], name: str, grpo: str
) -> None:
    wanted, wanted_metrics = expected[grpo]
    found, metrics = gradients(tiny_policy, samples, GRPO[grpo], **OPTIONS[name])
    for parameter, gradient in wanted.items():
        assert (found[parameter] - gradient).norm() <= 1e-5 * norm_of(wanted), parameter
    assert metrics == pytest.approx(wanted_metrics, abs=1e-6)


def norm_of(gradients: dict[str, Tensor]) -> Tensor:
    return torch.stack([gradient.norm() for gradient in gradients.values()]).norm()


def kept_bytes(policy: Policy, samples: Sequence[TrainSample], **changes: Any) -> int:
    """Bytes that autograd keeps for the backward pass of a step in one micro-batch, parameters left out."""
    kept: dict[int, tuple[int, Any]] = {}
    weights = {parameter.untyped_storage().data_ptr() for parameter in policy.model.parameters()}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes(), tensor  # held, so that no address comes twice
        return tensor

    setting = PassSetting.of(OptimizerOptions(max_tokens=100_000, **changes), 1.0)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        GradientPass(policy, setting).accumulate(samples, SftObjective(), StepSize.of(samples))
    return sum(size for size, _ in kept.values())


def frozen(policy: Policy, *prefixes: str) -> Policy:
    copied = copy.deepcopy(policy)
    freeze_parameters(copied.model, prefixes)
    return copied


@pytest.mark.parametrize("options", [{}, OPTIONS["all"]], ids=["plain", "bounded"])
@pytest.mark.parametrize("part", ["visual", "language_model.layers.0", "language_model.embed_tokens"])
def test_frozen_parts_have_no_gradients_and_change_no_others(
    tiny_policy: Policy, samples: list[TrainSample], expected: dict[str, Any], part: str, options: dict[str, Any]
) -> None:
    wanted, _ = expected["entropy and kl"]
    found, _ = gradients(frozen(tiny_policy, part), samples, GRPO["entropy and kl"], **options)
    without = {name for name, gradient in found.items() if gradient is None}
    assert without == {name for name in wanted if name.startswith(f"model.{part}.")} != set()
    assert all((found[name] - wanted[name]).norm() <= 1e-5 * norm_of(wanted) for name in set(wanted) - without)


@pytest.mark.parametrize("matrices", ["adamw", "muon"])
def test_frozen_parts_have_no_moments_and_stay_bit_for_bit(
    tiny_policy: Policy, samples: list[TrainSample], tmp_path: Any, matrices: Any
) -> None:
    options = OptimizerOptions(matrices=matrices, weight_decay=0.5)
    policy = frozen(tiny_policy, "visual")
    backends = [TorchBackend(policy, options), TorchBackend(copy.deepcopy(policy), options)]
    backends[0].step(samples, SftObjective(), 1e-3)
    backends[0].export(tmp_path)
    backends[0].save_state(tmp_path)
    backends[1].load_state(tmp_path)
    for backend in backends:
        backend.step(samples, SftObjective(), 1e-3)
    before, after, resumed = (
        dict(p.named_parameters()) for p in (tiny_policy.model, policy.model, backends[1].policy.model)
    )
    moments, _ = backends[0].optimizers.state()
    assert not any(".visual." in name for name in moments)
    for name, parameter in after.items():
        assert torch.equal(parameter, before[name]) == (".visual." in name), name
        assert torch.equal(parameter, resumed[name]), name


def test_a_frozen_tower_keeps_nothing_for_the_backward_pass(samples: list[TrainSample]) -> None:
    kept = [kept_bytes(frozen(deep_policy(2, vision_layers=layers), "visual"), samples) for layers in (1, 4)]
    assert kept[0] == kept[1] < kept_bytes(deep_policy(2, vision_layers=1), samples)


def deep_policy(layers: int, **sizes: Any) -> Policy:
    return build_tiny_policy(TinyPolicyOptions(layers=layers, **sizes), 0)


@pytest.mark.parametrize("part", ["layers", "vision_layers"])
def test_checkpointing_keeps_two_rows_a_token_and_layer_or_a_patch_and_block(
    samples: list[TrainSample], part: str
) -> None:
    images = {image.key: image for sample in samples for image in sample.images}
    rows, width = {
        "layers": (len(samples) * max(sample.length for sample in samples), TinyPolicyOptions().hidden),
        "vision_layers": (
            sum(int(np.prod(image.grid)) for image in images.values()),
            TinyPolicyOptions().vision_hidden,
        ),
    }[part]
    policies = [deep_policy(**{"layers": 1, part: count}) for count in (8, 2)]
    plain, bounded = (
        int.__sub__(*(kept_bytes(policy, samples, gradient_checkpointing=on) for policy in policies))
        for on in (False, True)
    )
    assert bounded / (6 * rows) <= 2 * 4 * width < plain / (6 * rows)


def peak_bytes(policy: Policy, samples: Sequence[TrainSample], **changes: Any) -> int:
    """Most bytes alive in a step beyond weights and samples."""
    backend = TorchBackend(copy.deepcopy(policy), OptimizerOptions(**changes))
    with LiveBytes() as count:
        backend.step(samples, SftObjective(), 1e-3)
    return count.peak


def with_images(samples: Sequence[TrainSample], count: int) -> list[TrainSample]:
    """The first samples that have so many distinct images together."""
    chosen: list[TrainSample] = []
    while len({image.key for sample in chosen for image in sample.images}) < count:
        chosen.append(samples[len(chosen)])
    return chosen


def test_vision_passes_bound_the_peak_of_a_step(sokoban_rows: Any, train_options: TrainOptions) -> None:
    """From 8 images to 64, in micro-batches of one size."""
    policy = deep_policy(2, vision_layers=4)
    made = demonstrate(policy, sokoban_rows(64), train_options, [16] * 64)
    parts = [with_images(made, count) for count in (8, 64)]
    shape = {"max_tokens": max(sample.length for sample in made)}
    bounded = [peak_bytes(policy, part, vision_patches=4 * 36, **shape) for part in parts]
    whole = [peak_bytes(policy, part, **shape) for part in parts]
    assert bounded[1] <= 1.2 * bounded[0] and whole[1] > 3 * whole[0], (bounded, whole)


VOCABULARY = 30_000
CHUNK = 64


@pytest.fixture(scope="module")
def wide_policy() -> Policy:
    """Thin, with a large vocabulary. The last norm alone is trained, so that logits are all that counts."""
    thin = {"hidden": 16, "heads": 1, "kv_heads": 1, "mlp": 16, "deepstack": ()}
    tiny = deep_policy(1, **thin)
    config = copy.deepcopy(tiny.model.config)
    config.text_config.vocab_size = VOCABULARY
    model = type(tiny.model)(config).eval().requires_grad_(False)
    model.model.language_model.norm.weight.requires_grad_()
    return Policy(model, tiny.tokenizer, tiny.image_processor)


def trained_text(positions: int) -> list[TrainSample]:
    ids = np.random.default_rng(0).integers(0, 300, positions + 1)
    values = {name: np.full(positions, -1, np.float32) for name in ("old_log_probs", "rollout_log_probs", "advantages")}
    places = np.tile(np.arange(positions + 1), (3, 1))
    return [TrainSample(ids, places, np.arange(1, positions + 1), ids[1:], [], **values)]


@pytest.mark.parametrize(("coefficient", "compute"), [(0.0, None), (0.01, None), (0.01, "bfloat16")])
def test_logits_take_three_copies_of_a_chunk_however_many_tokens_are_trained(
    wide_policy: Policy, coefficient: float, compute: str | None
) -> None:
    peaks = []
    for positions in (CHUNK // 3, 2 * CHUNK, 4 * CHUNK):
        policy = Policy(wide_policy.model, wide_policy.tokenizer, wide_policy.image_processor, compute=compute)
        gradient_pass = GradientPass(policy, PassSetting(TEMPERATURE, 8192, CHUNK))
        objective = GrpoObjective(GrpoOptions(entropy_coefficient=coefficient))
        batch = trained_text(positions)
        with LiveBytes() as count:
            gradient_pass.accumulate(batch, objective, StepSize.of(batch))
        with LiveBytes() as scoring:
            gradient_pass.log_probs(batch)
        assert scoring.peak <= count.peak
        peaks.append(count.peak)
    copies = [peak / (CHUNK * VOCABULARY * 4) for peak in peaks]
    assert max(copies) <= 3, copies
    assert peaks[2] <= 1.05 * peaks[1], copies
