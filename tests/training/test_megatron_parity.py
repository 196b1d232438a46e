"""Megatron's ranks compute what Hugging Face's model does: logits, log-probs, entropies, the gradient of each weight.

Samples have images of several sizes and unequal lengths, and the policy has features that enter behind early layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

import numpy as np
import pytest
import torch
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor

from geo_sokoban_pipeline.config.grpo import GrpoOptions, OptimizerOptions
from geo_sokoban_pipeline.distributed.slices import own_part
from geo_sokoban_pipeline.grpo.loss import GrpoObjective, entropy
from geo_sokoban_pipeline.policies.policy import Policy
from geo_sokoban_pipeline.training.backend import build_backend
from geo_sokoban_pipeline.training.backends.megatron.language import VocabularyHead
from geo_sokoban_pipeline.training.backends.megatron.scores import score_split_states
from geo_sokoban_pipeline.training.backends.torch import TorchBackend
from geo_sokoban_pipeline.training.batch import TrainSample
from geo_sokoban_pipeline.training.worker import Worker
from open_workers import apply, apply_on_all
from training.four_ranks import FourRanks, megatron_of
from training.setup import copied

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("ranks")]

LAYOUTS = ("tensor 1", "tensor 2", "tensor 2, sequence", "data 2", "tensor 2 x data 2")
TEMPERATURE = 0.8
# The clip leaves gradients as they are.
OPTIONS = OptimizerOptions(eps=1e-5, clip=1e6)
GRPO = {"kl_coefficient": 0.1, "entropy_coefficient": 0.01}


@dataclass
class Found:
    """What a policy computes on samples.

    Attributes:
        logits: (M, V) at the trained tokens, in the order of samples.
        scores: log-probs of them, under temperature and banned ids.
        entropies: at temperature 1.
        gradients: of each weight by Hugging Face name, whole.
    """

    logits: Tensor
    scores: np.ndarray
    entropies: Tensor
    row: dict[str, float]
    gradients: dict[str, Tensor] = field(default_factory=dict)


def read_logits(backend: TorchBackend, samples: Sequence[TrainSample]) -> tuple[Tensor, Tensor]:
    """(M, V) logits of trained tokens, from one pass over all samples, and their (M,) entropies at temperature 1."""
    policy = backend.trained_policy
    network, banned = policy.network, torch.from_numpy(policy.banned_ids)
    images = {image.key: image for sample in samples for image in sample.images}
    width, count = (max(map(size, samples)) for size in (lambda sample: sample.length, lambda one: len(one.targets)))
    ids, positions = np.zeros((len(samples), width), np.int64), np.zeros((3, len(samples), width), np.int64)
    wanted = np.zeros((len(samples), count), np.int64)
    for row, sample in enumerate(samples):
        ids[row, : sample.length], positions[:, row, : sample.length] = sample.input_ids, sample.positions
        wanted[row, : len(sample.targets)] = sample.targets - 1
    kept = torch.from_numpy(np.arange(count) < np.array([len(sample.targets) for sample in samples])[:, None])
    labels = torch.from_numpy(np.concatenate([sample.labels for sample in samples]))

    def read(states: Tensor, head: Any) -> tuple[Tensor, Tensor]:
        chosen = states[kept]
        logits = head(chosen)
        if not isinstance(head, VocabularyHead):
            return logits, entropy(logits, banned_ids=banned)
        options = {"chunk": 5, "temperature": TEMPERATURE, "banned_ids": banned}
        _, found = score_split_states(chosen, head.weight, labels, group=head.group, entropy="reported", **options)
        return logits, found

    with torch.no_grad():
        features = network.encode(list(images.values()))
        keys = [image.key for sample in samples for image in sample.images]
        found: tuple[Tensor, Tensor] = network(
            torch.from_numpy(ids),
            torch.from_numpy(positions),
            wanted=torch.from_numpy(wanted),
            features=features.tables,
            rows=torch.from_numpy(features.rows(keys)),
            head=read,
        )
    return found


def read_on_rank(worker: Worker, samples: Sequence[TrainSample]) -> tuple[Tensor, Tensor]:
    """`read_logits` of a rank, which takes part in the collectives."""
    return read_logits(worker.backend, samples)


def keep_whole_gradients(backend: Any) -> dict[str, Tensor]:
    """Whole gradients by Hugging Face name of the first optimizer step from now on; a collective of that step."""
    kept: dict[str, Tensor] = {}

    def keep(*_: Any) -> None:
        if kept:
            return
        table = getattr(backend.trained_policy, "table", None)
        if table is None:
            kept.update({name: weight.grad.clone() for name, weight in backend.policy.model.named_parameters()})
            return
        gradients = {name: weight.grad for name, weight in table.parameters.items()}
        kept.update({name: table.gather(name, torch.float32, gradients) for name in table.weights})

    backend.optimizers.in_force[0].register_step_pre_hook(keep)
    return kept


def watch_whole_gradients(worker: Worker) -> None:
    """`keep_whole_gradients` of a rank, whose part of the collectives the first one needs."""
    keep_whole_gradients(worker.backend)


def compute(four_ranks: FourRanks, policy: Policy, samples: list[TrainSample], layout: str) -> Found:
    policy = copied(policy)
    with four_ranks.group(policy, layout) as workers:
        backend: Any = build_backend(policy, OPTIONS, TEMPERATURE, workers, megatron_of(layout))
        own = backend if workers is None else backend.own
        scores = np.concatenate(backend.log_probs(samples))
        if workers is None:
            logits, entropies = read_logits(own, samples)
        else:
            logits, entropies = apply_on_all(workers, partial(read_on_rank, samples=samples))[0]
            apply(workers, lambda _: None, *[watch_whole_gradients] * (workers.size - 1))
        gradients = keep_whole_gradients(own)
        row = backend.step(samples, GrpoObjective(GrpoOptions(**GRPO)), 1e-3)
    return Found(logits, scores, entropies, row, gradients)


@pytest.fixture(scope="module")
def policies(splittable: Policy) -> dict[str, Policy]:
    tied = splittable
    untied = copied(tied)
    untied.model.config.tie_word_embeddings = untied.model.config.text_config.tie_word_embeddings = False
    head = tied.model.lm_head.weight.detach()
    untied.model.lm_head.weight = torch.nn.Parameter(head.flip(0).clone())
    return {"tied": tied, "untied": untied}


@pytest.fixture(scope="module")
def samples(batches: dict[str, list[TrainSample]]) -> list[TrainSample]:
    return [*batches["diagrams"][:5], *batches["mixed"]]


@pytest.fixture(scope="module")
def expected(policies: dict[str, Policy], samples: list[TrainSample]) -> Any:
    """What Hugging Face's model computes, made once for each policy."""

    @cache
    def made(kind: str) -> Found:
        backend = TorchBackend(copied(policies[kind]), OPTIONS, TEMPERATURE)
        gradients = keep_whole_gradients(backend)
        scores = np.concatenate(backend.log_probs(samples))
        logits, entropies = read_logits(backend, samples)
        row = backend.step(samples, GrpoObjective(GrpoOptions(**GRPO)), 1e-3)
        return Found(logits, scores, entropies, row, gradients)

    return made


@pytest.mark.parametrize("kind", ["tied", "untied"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_ranks_compute_what_the_library_does(
    four_ranks: FourRanks,
    policies: dict[str, Policy],
    samples: list[TrainSample],
    expected: Any,
    layout: str,
    kind: str,
) -> None:
    assert len({image.grid for sample in samples for image in sample.images}) > 4
    assert len({sample.length for sample in samples}) > 4, "rows are padded"
    wanted: Found = expected(kind)
    found = compute(four_ranks, policies[kind], samples, layout)
    scale = wanted.logits.abs().max()
    assert (found.logits - wanted.logits).abs().max() <= (1e-6 if "tensor 2" not in layout else 1e-5) * scale
    np.testing.assert_allclose(found.scores, wanted.scores, rtol=1e-5)
    torch.testing.assert_close(found.entropies, wanted.entropies, rtol=1e-5, atol=0)
    assert found.row == pytest.approx(wanted.row, rel=1e-6, abs=1e-6)
    assert set(found.gradients) == set(wanted.gradients) == {n for n, _ in policies[kind].model.named_parameters()}
    for name, gradient in wanted.gradients.items():
        assert gradient.norm() > 0, name
        assert (found.gradients[name] - gradient).norm() <= 1e-5 * gradient.norm(), name


def test_sequence_parallel_layers_see_a_part_of_the_tokens(
    four_ranks: FourRanks, policies: dict[str, Policy], samples: list[TrainSample]
) -> None:
    width = max(sample.length for sample in samples)
    for layout, seen in (("tensor 2", width), ("tensor 2, sequence", -(-width // 2))):
        policy, lengths = copied(policies["tied"]), set()
        with four_ranks.group(policy, layout) as workers:
            assert workers is not None
            backend: Any = build_backend(policy, OPTIONS, TEMPERATURE, workers)
            norm = backend.own.trained_policy.model.language.layers[0].input_layernorm
            norm.register_forward_pre_hook(lambda _, given, lengths=lengths: lengths.add(given[0].shape[0]))
            apply_on_all(workers, partial(read_on_rank, samples=samples))
        assert lengths == {seen}


def alter(worker: Worker) -> None:
    """Change one number of a rank's part of a matrix."""
    layer = worker.backend.trained_policy.model.language.layers[0]
    own_part(layer.mlp.linear_fc2.weight)[3, 5] += 1.0


def test_classes_are_megatrons_and_a_rank_holds_its_part_alone(
    four_ranks: FourRanks, policies: dict[str, Policy], samples: list[TrainSample]
) -> None:
    policy = copied(policies["untied"])
    sizes = {name: weight.numel() for name, weight in policy.model.named_parameters()}
    with four_ranks.group(policy, "tensor 2") as workers:
        assert workers is not None
        backend: Any = build_backend(policy, OPTIONS, TEMPERATURE, workers)
        gpt = backend.own.trained_policy.model.language.gpt
        parts = dict(gpt.named_modules())
        assert isinstance(parts["embedding.word_embeddings"], VocabParallelEmbedding)
        assert isinstance(parts["output_layer"], ColumnParallelLinear)
        for number in range(2):
            layer = f"decoder.layers.{number}"
            for name, kind in (
                (layer, TransformerLayer),
                (f"{layer}.self_attention", SelfAttention),
                (f"{layer}.self_attention.linear_qkv", ColumnParallelLinear),
                (f"{layer}.self_attention.linear_proj", RowParallelLinear),
                (f"{layer}.mlp", MLP),
                (f"{layer}.mlp.linear_fc1", ColumnParallelLinear),
                (f"{layer}.mlp.linear_fc2", RowParallelLinear),
            ):
                assert isinstance(parts[name], kind), name
        held = sum(own_part(weight).numel() for weight in backend.own.trained_policy.model.parameters())
        replicated = sum(size for name, size in sizes.items() if ".visual." in name or "norm" in name)
        assert held == replicated + (sum(sizes.values()) - replicated) // 2

        read = partial(read_on_rank, samples=samples)
        before = apply_on_all(workers, read)
        assert torch.equal(before[0][0], before[1][0]), "the logits are those of all ranks, on each"
        apply(workers, lambda _: None, alter)
        after = apply_on_all(workers, read)
        assert not torch.equal(after[0][0], before[0][0]), "what the other rank holds counts"
