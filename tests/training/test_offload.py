"""Offload: weights, gradients and moments in the memory of the CPU. Here the device is the CPU too: nothing moves."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule

from geo_sokoban_pipeline.config.grpo import GrpoOptions, OptimizerOptions
from geo_sokoban_pipeline.distributed.fsdp import shard_policy
from geo_sokoban_pipeline.distributed.group import Group
from geo_sokoban_pipeline.distributed.slices import own_part
from geo_sokoban_pipeline.grpo.loss import GrpoObjective
from geo_sokoban_pipeline.policies.policy import Policy, load_empty, save_policy
from geo_sokoban_pipeline.training.backend import build_backend
from geo_sokoban_pipeline.training.backends.torch import GradientPass, PassSetting, TorchBackend
from geo_sokoban_pipeline.training.batch import TrainSample
from geo_sokoban_pipeline.training.worker import ReferenceScorer
from geo_sokoban_pipeline.training.worker_group import load_driver_policy
from task_options import TrainOptions
from training.four_ranks import keep_gradients
from training.setup import ADAPTED, Setup, copied, settings

RATE = 1e-3
OBJECTIVE = GrpoObjective(GrpoOptions(kl_coefficient=0.1))


@pytest.fixture(autouse=True)
def _no_group() -> Iterator[None]:
    """A command has one group for all its backends; the next test needs none."""
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def build(setup: Setup, matrices: Any, *, offload: bool) -> tuple[Policy, TorchBackend]:
    policy = copied(setup.trained)
    # A larger epsilon: moments near 0 would turn the rounding of two sums into steps of full size.
    backend = build_backend(policy, OptimizerOptions(matrices=matrices, eps=1e-5, offload=offload), 0.9)
    assert isinstance(backend, TorchBackend)
    return policy, backend


def test_units_are_offloaded(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each layer, the language model and the vision tower, also in a second backend of the process."""
    found: list[Any] = []
    original = FSDPModule._get_fsdp_state

    def spied(module: Any) -> Any:
        state = original(module)
        found.append(state)
        return state

    monkeypatch.setattr(FSDPModule, "_get_fsdp_state", spied)
    for offload in (True, True, False):
        found.clear()
        build(setup, "adamw", offload=offload)
        # Its parameters are one group up to torch 2.12, and a list after it.
        groups = {
            id(state): getattr(state, "_fsdp_param_group", None) or state._fsdp_param_groups[0] for state in found
        }
        policies = {key: group.offload_policy for key, group in groups.items()}
        assert len(policies) == (setup.trained.model.config.text_config.num_hidden_layers + 2 if offload else 0)
        # The memory of a CPU is not pinned for a CPU.
        assert all(isinstance(one, CPUOffloadPolicy) and not one.pin_memory for one in policies.values())


@pytest.mark.parametrize("matrices", ["adamw", "muon"])
def test_steps_are_those_without_offload(
    setup: Setup, batches: dict[str, list[TrainSample]], tmp_path: Path, matrices: str
) -> None:
    samples = batches["boards"]
    (policy, plain), (offloaded_policy, offloaded) = (build(setup, matrices, offload=value) for value in (False, True))
    kept, found = keep_gradients(plain), keep_gradients(offloaded)
    for _ in range(3):
        wanted = plain.step(samples, OBJECTIVE, RATE)
        assert offloaded.step(samples, OBJECTIVE, RATE) == pytest.approx(wanted, rel=2e-5, abs=2e-6)
    first = len(kept) // 3
    norm = torch.stack([gradient.norm() for gradient in kept[:first] if gradient is not None]).norm()
    for one, other in zip(kept[:first], found[:first], strict=True):
        assert one is not None and other is not None
        assert (one - other).norm() <= 1e-5 * norm
    offloaded.renew()
    after = dict(offloaded_policy.model.named_parameters())
    for name, weight in policy.model.named_parameters():
        torch.testing.assert_close(after[name], weight, rtol=0, atol=0.05 * RATE, msg=name)
    # Its state is that of any layout.
    offloaded.export(tmp_path)
    offloaded.save_state(tmp_path)
    readers = [build(setup, matrices, offload=value)[1] for value in (False, True)]
    for reader in readers:
        reader.load_state(tmp_path)
    for _ in range(2):  # the second loss shows what the moments have done
        wanted = offloaded.step(samples, OBJECTIVE, RATE)
        for reader in readers:
            assert reader.step(samples, OBJECTIVE, RATE)["loss"] == pytest.approx(wanted["loss"], abs=2e-6)


def test_weights_of_an_engine_are_made_when_it_needs_them(
    setup: Setup, batches: dict[str, list[TrainSample]], tmp_path: Path
) -> None:
    """Beside servers no whole copy of the weights is in the process; what trains is read from the folder."""
    save_policy(setup.trained, tmp_path)
    options = setup.options.model_copy(update={"optimizer": OptimizerOptions(offload=True)})
    policy = load_driver_policy(options, tmp_path)
    backend = build_backend(policy, options.optimizer, 0.9)
    _, whole = build(setup, "adamw", offload=True)
    wanted = whole.step(batches["boards"], OBJECTIVE, RATE)
    assert backend.step(batches["boards"], OBJECTIVE, RATE) == pytest.approx(wanted, rel=1e-6)
    sent = {name: weight.clone() for name, weight in backend.weight_source().read()}
    assert policy.is_empty
    backend.renew()
    held = dict(policy.model.named_parameters())
    assert list(held) == list(sent) and all(torch.equal(held[name], weight) for name, weight in sent.items())


@pytest.mark.parametrize("compute", [None, "bfloat16"])
def test_an_adapter_over_offloaded_weights(
    setup: Setup, batches: dict[str, list[TrainSample]], tmp_path: Path, compute: Any
) -> None:
    """It is fresh, whether the weights are here or read from the folder; then its steps are the same."""
    save_policy(setup.trained, tmp_path)
    samples, backends, policies = batches["boards"], [], []
    for offload in (False, True):
        changes = {"policy.adapter": {"rank": 2, "targets": list(ADAPTED)}, "policy.compute": compute}
        options = settings(setup.options, {**changes, "optimizer.offload": offload})
        policies.append(load_driver_policy(options, tmp_path, seed=3))
        backends.append(build_backend(policies[-1], options.optimizer, 0.9))
    assert [policy.is_empty for policy in policies] == [False, True]
    exact = compute is None
    for _ in range(3):
        wanted, found = (backend.step(samples, OBJECTIVE, RATE) for backend in backends)
        assert found == pytest.approx(wanted, rel=2e-5 if exact else 2e-2, abs=2e-6 if exact else 2e-3)
    whole, sent = (dict(backend.weight_source().read()) for backend in backends)
    assert list(whole) == list(sent)
    for name, weight in whole.items():
        torch.testing.assert_close(sent[name], weight, rtol=0, atol=(0.05 if exact else 3) * RATE, msg=name)
    backends[1].renew()
    scores = [
        np.concatenate(one.log_probs(samples))
        for one in (TorchBackend(policies[1], options.optimizer, 0.9), backends[1])
    ]
    np.testing.assert_allclose(*scores, atol=1e-6 if exact else 2e-2)


def test_a_reference_computes_with_what_was_moved(
    setup: Setup, batches: dict[str, list[TrainSample]], tmp_path: Path
) -> None:
    """Between its calls a part of a policy moves to another memory and back; here it moves within the same one."""
    save_policy(setup.trained, tmp_path)
    group = Group.alone("cpu")
    setting = PassSetting.of(OptimizerOptions(), 0.9)
    held = shard_policy(load_empty(setup.options.policy, tmp_path), group.mesh(), is_trained=False)
    scorer = ReferenceScorer(GradientPass(held, setting, group))
    first = np.concatenate(scorer.log_probs(batches["boards"]))
    parts = [own_part(parameter) for parameter in scorer.policy.model.parameters()]
    for root in (scorer.policy.network.language, scorer.policy.network.vision):
        root._apply(torch.clone)
    for part in parts:
        part.fill_(np.nan)
    np.testing.assert_array_equal(np.concatenate(scorer.log_probs(batches["boards"])), first)


@pytest.mark.parametrize("offload", [False, True])
def test_a_trainer_that_sleeps_leaves_the_gpu_what_torch_kept(
    setup: Setup, monkeypatch: pytest.MonkeyPatch, offload: bool
) -> None:
    """Servers take that memory back; an offloaded step leaves its largest in torch's hands as well."""
    _, backend = build(setup, "adamw", offload=offload)
    emptied: list[None] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: emptied.append(None))
    backend.offload()
    assert len(emptied) == 1


def test_replicas_have_nothing_to_offload() -> None:
    values = {"processes": 2, "threads": 1, "optimizer": {"offload": True}}
    with pytest.raises(ValueError, match=r"optimizer.offload=true with processes=2 and sharding=none: .*full or hyb"):
        TrainOptions.model_validate(values)
    assert TrainOptions.model_validate({**values, "sharding": "full"}).optimizer.offload
