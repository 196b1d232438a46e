"""No rank has the whole model: each reads its part of a folder, and what leaves the ranks leaves tensor by tensor."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from geo_sokoban_pipeline.config.grpo import GrpoOptions, OptimizerOptions
from geo_sokoban_pipeline.config.rollout import SamplingOptions
from geo_sokoban_pipeline.distributed.slices import read_weights
from geo_sokoban_pipeline.grpo.loss import GrpoObjective
from geo_sokoban_pipeline.policies.lora import Adapter
from geo_sokoban_pipeline.policies.policy import Policy, load_as, load_empty, save_policy, use_types
from geo_sokoban_pipeline.policies.weights import SharedBytes, WeightSource, plan_buckets
from geo_sokoban_pipeline.rollout.engines.base import Request
from geo_sokoban_pipeline.rollout.engines.factory import build_engine
from geo_sokoban_pipeline.runs.policy_folder import PolicyFolder
from geo_sokoban_pipeline.training.backend import build_backend, build_scorer
from geo_sokoban_pipeline.training.batch import TrainSample
from policies.mixtures import build_mixture
from training.four_ranks import LAYOUTS as ALL_LAYOUTS
from training.four_ranks import FourRanks
from training.setup import ADAPTED, Setup, copied

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("ranks")]

LAYOUTS = ("two shards", "two copies of two shards")
OPTIONS = OptimizerOptions(matrices="muon", eps=1e-5)
OBJECTIVE = GrpoObjective(GrpoOptions())


def holds_nothing(policy: Policy) -> bool:
    return all(parameter.is_meta for parameter in policy.model.parameters())


@pytest.mark.parametrize("layout", LAYOUTS)
def test_ranks_that_read_their_parts_compute_what_ranks_with_whole_weights_do(
    four_ranks: FourRanks, setup: Setup, batches: dict[str, list[TrainSample]], tmp_path: Path, layout: str
) -> None:
    """Bit for bit; the driver has no weights until its engine needs them."""
    save_policy(setup.trained, tmp_path)
    found = []
    for policy in (copied(setup.trained), load_empty(setup.options.policy, tmp_path)):
        with four_ranks.group(policy, layout) as workers:
            backend = build_backend(policy, OPTIONS, 0.9, workers)
            scores = backend.log_probs(batches["mixed"])
            metrics = [backend.step(batches["boards"], OBJECTIVE, 1e-3) for _ in range(2)]
            weights = {name: weight.clone() for name, weight in backend.weight_source().read()}
            found.append((scores, metrics, weights))
            assert policy.is_empty == (len(found) == 2), "nobody asked for whole weights"
            backend.renew()
            for name, weight in WeightSource.of_model(policy.model).read():
                assert torch.equal(weight, weights[name]), name
    (scores, metrics, weights), (scores_2, metrics_2, weights_2) = found
    np.testing.assert_array_equal(np.concatenate(scores), np.concatenate(scores_2))
    assert metrics == metrics_2
    assert list(weights) == list(weights_2) == [name for name, _ in setup.trained.model.named_parameters()]
    assert all(torch.equal(weight, weights_2[name]) for name, weight in weights.items())


def test_an_empty_policy_knows_what_its_folder_says(setup: Setup, tmp_path: Path) -> None:
    save_policy(setup.trained, tmp_path)
    whole, empty = load_as(setup.options.policy, tmp_path), load_empty(setup.options.policy, tmp_path)
    assert holds_nothing(empty) and not whole.is_empty
    assert (empty.end_ids, empty.banned_ids.tolist()) == (whole.end_ids, whole.banned_ids.tolist())
    for (name, one), (other_name, other) in zip(empty.model.named_buffers(), whole.model.named_buffers(), strict=True):
        assert name == other_name and torch.equal(one, other)
    with pytest.raises(ValueError, match="weights of the backend"):
        next(build_backend(empty, OPTIONS).weight_source().read())


@pytest.mark.parametrize("kind", ["dense", "mixture"])
def test_ranks_collect_a_bucket_by_one_call_in_the_type_that_is_sent(
    four_ranks: FourRanks, setup: Setup, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    policy = copied(setup.trained) if kind == "dense" else build_mixture(setup.policy)
    save_policy(policy, tmp_path)
    whole = {name: weight.bfloat16() for name, weight in WeightSource.of_model(policy.model).read()}
    empty = load_empty(setup.options.policy, tmp_path)
    with four_ranks.group(empty, "two shards") as workers:
        collected: list[list[str]] = []
        call_all = workers.call_all

        def noted(method: str, *arguments: Any) -> Any:
            if method == "backend.collect":
                collected.append(list(arguments[0]))
            return call_all(method, *arguments)

        source = build_backend(empty, OPTIONS, 0.9, workers).weight_source()
        source = source.cast(dict.fromkeys(source.specs, "bfloat16"))
        monkeypatch.setattr(workers, "call_all", noted)
        counts = []
        for limit in (20_000, 60_000):  # it can be read again
            collected.clear()
            state = source.state()
            source.write(tmp_path / str(limit), limit)
            assert source.state() == state
            sent = {}
            for names, path in zip(collected, sorted((tmp_path / str(limit)).iterdir()), strict=True):
                bucket = load_file(path)
                assert sorted(bucket) == sorted(names)
                assert len(bucket) == 1 or sum(weight.nbytes for weight in bucket.values()) <= limit
                sent |= bucket
            assert sent.keys() == whole.keys()
            assert all(torch.equal(weight, whole[name]) for name, weight in sent.items())
            counts.append(len(collected))
        assert 1 < counts[1] < counts[0]
        assert holds_nothing(empty)


@pytest.mark.parametrize(
    ("layout", "adapter"),
    [
        ("two shards", Adapter(2, 4.0, ADAPTED, Path())),
        ("four shards", None),
        ("two copies of two shards", None),
        ("tensor 2 x data 2", None),
    ],
    ids=str,
)
def test_a_bucket_by_a_collective_is_that_in_shared_memory(
    four_ranks: FourRanks,
    splittable: Policy,
    setup: Setup,
    batches: dict[str, list[TrainSample]],
    tmp_path: Path,
    layout: str,
    adapter: Adapter | None,
) -> None:
    """As ranks on GPUs and of a Ray cluster send theirs; in types of several sizes, with rows for some ranks alone."""
    save_policy(splittable, tmp_path)
    empty = load_empty(setup.options.policy, tmp_path, adapter)
    with four_ranks.group(empty, layout) as workers:
        backend = build_backend(empty, OptimizerOptions(), 0.9, workers)
        backend.step(batches["one"], OBJECTIVE, 1e-3)  # of an adapter B is zero before
        source = backend.weight_source()
        types = {name: ("bfloat16", "float64", "float32")[number % 3] for number, name in enumerate(source.specs)}
        buckets = list(plan_buckets(source.cast(types).specs, 100_000))
        assert len(buckets) > 2
        memory = SharedBytes(max(sum(spec.bytes for spec in specs.values()) for specs in buckets))
        for specs in buckets:
            found, *others = workers.call_all("backend.collect", specs, None)
            assert others == [None] * (workers.size - 1)
            assert torch.equal(found, source.collect(specs, memory))
            assert torch.equal(found, source.collect(specs, None))
            first, *others, last = workers.call_all("backend.collect", specs, None, [0, workers.size - 1])
            assert torch.equal(first, found) and torch.equal(last, found)
            assert others == [None] * (workers.size - 2)


@pytest.mark.parametrize("compute", [None, "bfloat16"])
@pytest.mark.parametrize(("layout", "rounding"), [("two shards", 0.02), ("tensor 2", 0.05)])
def test_a_divided_reference_scores_as_one_process_does(
    four_ranks: FourRanks,
    splittable: Policy,
    setup: Setup,
    batches: dict[str, list[TrainSample]],
    tmp_path: Path,
    layout: str,
    rounding: float,
    compute: str | None,
) -> None:
    """But for rounding, since its products are of other batches."""
    save_policy(splittable, tmp_path)
    chosen = setup.options.policy.model_copy(update={"compute": compute})
    alone, divided = (
        setup.options.model_copy(update={"policy": chosen, **ALL_LAYOUTS[name]}) for name in ("one process", layout)
    )
    expected = build_scorer(PolicyFolder(tmp_path, {}), alone)(batches["mixed"])
    driver = load_empty(chosen, tmp_path)
    with four_ranks.group(driver, layout, chosen) as workers:
        assert workers is not None and workers.own is not None
        score = build_scorer(PolicyFolder(tmp_path, {}), divided, workers)
        for _ in range(2):
            found = score(batches["mixed"])
        held = dict(workers.own.scorer.policy.model.named_parameters())
    tolerance = 1e-5 if compute is None else rounding
    np.testing.assert_allclose(np.concatenate(found), np.concatenate(expected), atol=tolerance)
    product = torch.float32 if compute is None else torch.bfloat16
    assert {weight.dtype for name, weight in held.items() if "_proj." in name or ".linear_" in name} == {product}
    assert not any(weight.requires_grad for weight in held.values())
    if layout == "two shards":
        types = use_types(driver)
        for name, weight in held.items():
            assert weight.dtype == types[name] and len(weight.to_local()) == -(-len(weight) // 2)


def test_an_engine_of_sharded_ranks_samples_with_the_weights_in_the_compute_type(
    four_ranks: FourRanks, setup: Setup, batches: dict[str, list[TrainSample]], tmp_path: Path
) -> None:
    """Responses and log-probs are those of one process, whose passes round the weights."""
    save_policy(setup.trained, tmp_path)
    chosen = setup.options.policy.model_copy(update={"compute": "bfloat16"})
    whole, empty = load_as(chosen, tmp_path), load_empty(chosen, tmp_path)
    with four_ranks.group(empty, "two shards", chosen) as workers:
        backend = build_backend(empty, OPTIONS, 0.9, workers)
        engines = {}
        for name, policy in (("one", whole), ("ranks", empty)):
            if policy is empty:
                workers.update_weights(1)
            engine = build_engine(policy, setup.options.rollout)
            engine.update_weights(None, 1)
            engines[name] = engine
        assert {weight.dtype for weight in empty.model.parameters()} == {torch.float32, torch.bfloat16}
        sample = batches["boards"][0]
        ids = sample.input_ids[: sample.targets[0]].astype(np.int32)
        request = Request(0, ids, sample.images[:1], SamplingOptions(), 12, 3)
        results = []
        for engine in engines.values():
            engine.submit([request])
            results += engine.poll()
        one, other = results
        np.testing.assert_array_equal(one.token_ids, other.token_ids)
        np.testing.assert_array_equal(one.log_probs, other.log_probs)
        backend.step(batches["boards"], OBJECTIVE, 1e-3)
        workers.update_weights(2)
        trained = dict(backend.weight_source().read())
        types = use_types(whole)
        for name, weight in WeightSource.of_model(empty.model).read():
            assert torch.equal(weight, trained[name].to(types[name])), name
        for engine in engines.values():
            engine.close()


def test_a_checkpoint_without_a_weight_is_named(four_ranks: FourRanks, setup: Setup, tmp_path: Path) -> None:
    save_policy(setup.trained, tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    name = next(iter(tensors))
    parameters = dict(setup.trained.model.named_parameters())
    save_file({other: tensor for other, tensor in tensors.items() if other != name}, path)
    with pytest.raises(ValueError, match=f"{name} is missing"):
        read_weights(parameters, tmp_path)
    save_file({**tensors, name: tensors[name][:1].clone()}, path)
    with pytest.raises(ValueError, match="but the model of its config.json has"):
        read_weights(parameters, tmp_path)
