"""The trainer: equal to the library's own forward and backward pass, however a step is cut; stored equals live."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from geo_sokoban_pipeline.config.grpo import GrpoOptions, OptimizerOptions
from geo_sokoban_pipeline.distributed.group import Group
from geo_sokoban_pipeline.grpo.loss import GrpoObjective, SftObjective, StepSize
from geo_sokoban_pipeline.policies.policy import Policy, load_as, save_policy
from geo_sokoban_pipeline.runs.policy_folder import PolicyFolder
from geo_sokoban_pipeline.training import worker
from geo_sokoban_pipeline.training.backend import build_scorer
from geo_sokoban_pipeline.training.backends.base import DivergedError
from geo_sokoban_pipeline.training.backends.torch import GradientPass, PassSetting, TorchBackend
from geo_sokoban_pipeline.training.batch import TrainSample
from geo_sokoban_pipeline.training.worker import build_rank_scorer
from policies.library import sample_log_probs
from task_options import TrainOptions
from training.setup import demonstrate

# Sums of a few hundred float32 terms in another order.
TOLERANCE = 2e-5


@pytest.fixture(scope="module")
def samples(tiny_policy: Policy, sokoban_rows: Any, train_options: TrainOptions) -> list[TrainSample]:
    return demonstrate(tiny_policy, sokoban_rows(24), train_options, [16] * 7)


@pytest.mark.parametrize(("compute", "in_a_rank"), [(None, False), ("bfloat16", False), ("bfloat16", True)])
def test_the_reference_policy_waits_on_the_cpu_in_the_compute_type(
    tiny_policy: Policy,
    samples: list[TrainSample],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    compute: Any,
    in_a_rank: bool,
) -> None:
    """Its log-probs are bit for bit those of a policy whose weights every pass rounds."""
    save_policy(tiny_policy, tmp_path)
    options = TrainOptions.model_validate({"policy": {"compute": compute}})
    expected = TorchBackend(load_as(options.policy, tmp_path), options.optimizer).log_probs(samples)
    places: list[str] = []

    def load(*given: Any) -> Policy:
        policy = load_as(*given)
        for root in (policy.network.language, policy.network.vision):
            monkeypatch.setattr(root, "to", lambda place, move=root.to: places.append(str(place)) or move(place))
        loaded.append(policy)
        return policy

    loaded: list[Policy] = []
    monkeypatch.setattr(worker, "load_as", load)
    # Loading onto the device that computes would fail here.
    options = options.model_copy(update={"policy": options.policy.model_copy(update={"device": "cuda"})})
    monkeypatch.setattr(worker, "device_of", lambda _: "cpu:0")
    if in_a_rank:
        alone = Group.alone("cpu")
        score = build_rank_scorer(tmp_path, options.policy, options.optimizer, 1.0, alone, "full").log_probs
    else:
        score = build_scorer(PolicyFolder(tmp_path, {}), options)
    (policy,) = loaded
    assert places == ["cpu"] * 2
    for one, other in zip(score(samples), expected, strict=True):
        np.testing.assert_array_equal(one, other)
    assert places == ["cpu"] * 2 + ["cpu:0"] * 2 + ["cpu"] * 2
    layer, tower = policy.model.model.language_model.layers[0], policy.model.model.visual
    products = (layer.self_attn.q_proj, layer.mlp.up_proj, tower.blocks[0].attn.qkv, tower.merger.linear_fc1)
    kinds = {module.weight.dtype for module in products}
    assert kinds == {torch.float32 if compute is None else torch.bfloat16}
    others = (layer.input_layernorm, policy.model.get_input_embeddings(), tower.pos_embed, tower.patch_embed.proj)
    assert {module.weight.dtype for module in others} == {torch.float32}


def test_log_probs_equal_the_library(tiny_policy: Policy, samples: list[TrainSample]) -> None:
    backend = TorchBackend(tiny_policy, OptimizerOptions())
    with torch.no_grad():
        for sample, values in zip(samples, backend.log_probs(samples), strict=True):
            np.testing.assert_allclose(values, sample_log_probs(tiny_policy, sample).numpy(), atol=TOLERANCE)


def test_gradients_equal_the_library(tiny_policy: Policy, samples: list[TrainSample]) -> None:
    policy = copy.deepcopy(tiny_policy)
    GradientPass(policy, PassSetting(1.0, 128, 16_384)).accumulate(samples, SftObjective(), StepSize.of(samples))
    ours = {name: parameter.grad.clone() for name, parameter in policy.model.named_parameters()}
    policy.model.zero_grad()
    total = sum(len(sample.targets) for sample in samples)
    (-sum(sample_log_probs(policy, sample).sum() for sample in samples) / total).backward()
    for name, parameter in policy.model.named_parameters():
        assert (ours[name] - parameter.grad).norm() <= 1e-4 * parameter.grad.norm(), name


def test_a_model_with_dropout_is_refused(tiny_policy: Policy) -> None:
    policy = copy.deepcopy(tiny_policy)
    policy.model.config.text_config.attention_dropout = 0.5
    with pytest.raises(ValueError, match="attention_dropout=0.5 .* Set it to 0.0"):
        TorchBackend(policy, OptimizerOptions())


@pytest.mark.parametrize("is_continued", [False, True])
def test_a_step_without_finite_gradient_changes_nothing(
    tiny_policy: Policy, samples: list[TrainSample], tmp_path: Path, is_continued: bool
) -> None:
    """As many as allowed in a row end the run, also where it is continued between them; a good step ends the row."""
    options, objective = OptimizerOptions(), GrpoObjective(GrpoOptions())
    backend = TorchBackend(copy.deepcopy(tiny_policy), options)
    good = samples[:1]
    broken = [TrainSample(**{**vars(sample), "advantages": sample.advantages * np.nan}) for sample in good]

    def step(batch: list[TrainSample]) -> float:
        nonlocal backend
        if is_continued:
            backend.export(tmp_path)
            backend.save_state(tmp_path)
            backend = TorchBackend(copy.deepcopy(tiny_policy), options)
            backend.load_state(tmp_path)
        return backend.step(batch, objective, 1e-3)["skipped"]

    before = {name: tensor.clone() for name, tensor in backend.iter_weights()}
    assert step(broken) == 1.0
    assert all(torch.equal(before[name], tensor) for name, tensor in backend.iter_weights())
    assert [step(broken), step(good), step(broken), step(broken)] == [1.0, 0.0, 1.0, 1.0]
    with pytest.raises(DivergedError, match="3 optimizer steps in a row"):
        step(broken)


@pytest.mark.parametrize("matrices", ["adamw", "muon"])
def test_a_step_changes_the_state_of_the_weights(
    tiny_policy: Policy, samples: list[TrainSample], matrices: Any
) -> None:
    """Else engines in other processes would keep the old ones: a fused step changes no version of torch's."""
    backend = TorchBackend(copy.deepcopy(tiny_policy), OptimizerOptions(matrices=matrices))
    before = backend.weight_source().state()
    backend.step(samples[:1], SftObjective(), 1e-3)
    assert backend.weight_source().state() != before
