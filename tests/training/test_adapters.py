"""Training of adapters: equal to full training where it must be, the base stays, checkpoints have the adapter alone."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from geo_sokoban_pipeline.config.grpo import GrpoOptions, OptimizerOptions
from geo_sokoban_pipeline.grpo.loss import GrpoObjective, SftObjective
from geo_sokoban_pipeline.policies.lora import AdaptedLinear, Adapter, matrices_of, open_weights
from geo_sokoban_pipeline.policies.policy import Policy, attach_adapter, load_as, load_policy
from geo_sokoban_pipeline.policies.weights import WeightSource
from geo_sokoban_pipeline.training.backend import build_scorer, open_reference
from geo_sokoban_pipeline.training.backends.torch import TorchBackend
from geo_sokoban_pipeline.training.batch import TrainSample
from training.setup import ADAPTED, LoopFolder, Setup, adapted, copied, settings

ADAPTER = {"rank": 2, "alpha": 4.0, "targets": list(ADAPTED)}
# An epsilon of the gradients' size: moments near 0 would turn the rounding of two sums into steps of full size.
OPTIMIZER: dict[str, Any] = {"learning_rate": 3e-3, "eps": 1e-5, "weight_decay": 0.0}
LOOP: dict[str, Any] = {
    "policy.adapter": ADAPTER,
    "warm_start.steps": 0,
    "loop.iterations": 3,
    "loop.eval_interval": 1,
    "loop.eval_prompts": 4,
    "grpo.kl_coefficient": 0.05,
    "grpo.old_log_probs": "recompute",
}


def parameters(policy: Policy) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in policy.model.named_parameters()}


def train(backend: TorchBackend, samples: list[TrainSample], steps: int = 3) -> list[dict[str, float]]:
    objective = GrpoObjective(GrpoOptions(kl_coefficient=0.05))
    return [backend.step(samples, objective, backend.options.learning_rate) for _ in range(steps)]


@pytest.mark.parametrize("compute", [None, "bfloat16"])
def test_the_policy_without_its_adapter_is_the_reference(
    setup: Setup, batches: dict[str, list[TrainSample]], compute: Any
) -> None:
    """Bit for bit, before and after steps; these change no weight of the base."""
    options = settings(setup.options, {**LOOP, "policy.compute": compute})
    separate = build_scorer(setup.folder, settings(setup.options, {"policy.compute": compute}))
    policy = load_as(
        options.policy, setup.folder.path, Adapter.fresh(options.policy.adapter, setup.folder.path, seed=0)
    )
    backend, before = TorchBackend(policy, options.optimizer), parameters(policy)
    samples = batches["boards"]
    expected = np.concatenate(separate(samples))
    np.testing.assert_array_equal(np.concatenate(backend.log_probs(samples)), expected)
    train(backend, samples)
    reference = open_reference(lambda: setup.folder, policy, options, None, backend)
    assert reference is not None
    np.testing.assert_array_equal(np.concatenate(reference(samples)), expected)
    assert np.abs(np.concatenate(backend.log_probs(samples)) - expected).max() > 0.01
    after = parameters(policy)
    moved = {name for name, weight in after.items() if not torch.equal(weight, before[name])}
    assert moved == set(matrices_of(after))


def test_with_the_identity_as_a_it_is_full_training(setup: Setup, batches: dict[str, list[TrainSample]]) -> None:
    """Full width, A held at 1, and in the full run only the adapted matrices trained: in float64, for three steps."""
    options, samples = OptimizerOptions.model_validate(OPTIMIZER), batches["boards"]
    full = copied(setup.trained)
    full.model.double()
    narrow = replace(full, model=copied(full).model)
    attach_adapter(narrow, Adapter(1, 1.0, ADAPTED, Path()))
    layers = {name: module for name, module in narrow.model.named_modules() if isinstance(module, AdaptedLinear)}
    for module in layers.values():
        width, output = module.in_features, module.out_features
        module.lora_A.weight = torch.nn.Parameter(torch.eye(width, dtype=torch.float64), requires_grad=False)
        module.lora_B.weight = torch.nn.Parameter(torch.zeros(output, width, dtype=torch.float64))
    for name, parameter in full.model.named_parameters():
        parameter.requires_grad_(name.removesuffix(".weight") in layers and name.endswith(".weight"))
    rows, start = [], parameters(full)
    for policy in (full, narrow):
        backend = TorchBackend(policy, options)
        rows.append([(row["loss"], row["grad_norm"]) for row in train(backend, samples)])
    np.testing.assert_allclose(rows[0], rows[1], rtol=1e-5)
    merged = dict(WeightSource.of_model(narrow.model).read())
    for name, weight in parameters(full).items():
        torch.testing.assert_close(merged[name], weight, rtol=0.0, atol=1e-5)
    assert max((weight - start[name]).abs().max() for name, weight in parameters(full).items()) > 5e-3


def test_merged_weights_give_its_log_probs(setup: Setup, batches: dict[str, list[TrainSample]], tmp_path: Path) -> None:
    samples = batches["boards"]
    backend = TorchBackend(adapted(setup.trained), OptimizerOptions.model_validate(OPTIMIZER))
    train(backend, samples)
    backend.export(tmp_path)
    merged = TorchBackend(load_policy(tmp_path), backend.options)
    np.testing.assert_allclose(
        np.concatenate(merged.log_probs(samples)), np.concatenate(backend.log_probs(samples)), atol=1e-5
    )


@pytest.mark.parametrize("matrices", ["adamw", "muon"])
def test_a_checkpoint_has_adapter_and_moments_alone_and_goes_on(
    setup: Setup, batches: dict[str, list[TrainSample]], tmp_path: Path, matrices: str
) -> None:
    options = OptimizerOptions.model_validate({**OPTIMIZER, "matrices": matrices})
    backend = TorchBackend(adapted(setup.policy, setup.folder.path), options)
    train(backend, batches["boards"], 2)
    written = {**backend.export_trained(tmp_path), **backend.save_state(tmp_path)}
    assert set(written) == {"adapter_model.safetensors", "optimizer.safetensors"}
    assert not list(tmp_path.glob("model*"))
    names = {name.split(".", 1)[1] for name in load_file(tmp_path / "optimizer.safetensors")}
    assert names == set(matrices_of(parameters(backend.policy)))
    continued = TorchBackend(adapted(setup.policy, setup.folder.path), options)
    continued.load_state(tmp_path)
    for one in (backend, continued):
        train(one, batches["boards"], 1)
    found, expected = parameters(continued.policy), parameters(backend.policy)
    assert all(torch.equal(found[name], weight) for name, weight in expected.items())


def test_sft_trains_an_adapter(setup: Setup, batches: dict[str, list[TrainSample]]) -> None:
    backend = TorchBackend(adapted(setup.trained), OptimizerOptions.model_validate(OPTIMIZER))
    losses = [backend.step(batches["boards"], SftObjective(), 3e-3)["loss"] for _ in range(8)]
    assert losses[-1] < losses[0] - 0.05


def test_a_run_stores_adapters_and_continues_bit_for_bit(setup: Setup, tmp_path: Path) -> None:
    """With a KL term, whose reference is the policy without its adapter."""
    options = settings(setup.options, LOOP)
    whole, parted = LoopFolder(tmp_path / "whole"), LoopFolder(tmp_path / "parted")
    assert list(whole.go_on(setup, options)) == [0, 1, 2]
    shorter = settings(setup.options, {**LOOP, "loop.iterations": 1})
    assert list(parted.go_on(setup, shorter)) == [0]
    assert list(parted.go_on(setup, options)) == [1, 2]
    for kind in ("trajectories", "eval_trajectories"):
        own, theirs = whole.tables(kind), parted.tables(kind)
        assert all(
            table.drop_columns("timings").equals(theirs[name].drop_columns("timings")) for name, table in own.items()
        )
    for number in range(3):
        one, two = (run.checkpoint(number) for run in (whole, parted))
        for file in ("adapter_model.safetensors", "optimizer.safetensors"):
            assert (one / file).read_bytes() == (two / file).read_bytes()
    folder = whole.checkpoint(2)
    assert not list(folder.glob("model*"))
    config = json.loads((folder / "adapter_config.json").read_text())
    assert Path(config["base_model_name_or_path"]).samefile(setup.folder.path)
    assert {row["train/kl_loss"] > 0 for row in whole.metrics()[1:]} == {True}
    weights, base = dict(open_weights(folder).read()), dict(open_weights(setup.folder.path).read())
    assert {name for name, weight in weights.items() if not torch.equal(weight, base[name])} == {
        f"{layer}.weight" for layer in config["target_modules"]
    }
