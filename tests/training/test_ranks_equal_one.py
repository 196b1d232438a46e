"""N ranks compute what one does, with copies of the weights or shards of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from geo_sokoban_pipeline.config.grpo import GrpoOptions, OptimizerOptions
from geo_sokoban_pipeline.distributed.slices import own_part
from geo_sokoban_pipeline.grpo.loss import GrpoObjective
from geo_sokoban_pipeline.training.backends.factory import build_backend
from geo_sokoban_pipeline.training.batch import TrainSample
from training.four_ranks import FourRanks
from training.setup import Setup, copied

RATE = 1e-3
REPLICAS, FULL, HYBRID = "four replicas", "four shards", "two copies of two shards"
SHARDS = {REPLICAS: 1, FULL: 4, HYBRID: 2}
MUON = {"matrices": "muon"}
KL = {"kl_coefficient": 0.1, "reduction": "token_mean"}
CONSTANT = {"reduction": "constant", "constant_denominator": 40.0, "entropy_coefficient": 0.01}
CASES: list[tuple[str, str, dict[str, Any], dict[str, Any]]] = [
    # layout, samples, optimizer, objective
    *((layout, "all", optimizer, objective) for layout in SHARDS for optimizer, objective in (({}, KL), (MUON, {}))),
    (FULL, "all", {}, CONSTANT),
    # Ranks with other numbers of micro-batches; more passes of the tower on some ranks than on others.
    (FULL, "all", {"max_tokens": 700}, {}),
    (HYBRID, "all", {"max_tokens": 700, "vision_patches": 40, "gradient_checkpointing": True}, {}),
    (FULL, "all", {"logit_chunk": 3}, KL),
    # Fewer samples than ranks; a rank without images; no images at all.
    *((layout, "one", {}, {}) for layout in SHARDS),
    (FULL, "mixed", {}, {}),
    (REPLICAS, "mixed", {}, {}),
    (FULL, "text", MUON, {}),
]


def train(backend: Any, samples: list[TrainSample], objective: GrpoObjective) -> tuple[list[Any], list[np.ndarray]]:
    scores = backend.log_probs(samples)
    return [backend.step(samples, objective, RATE) for _ in range(3)], scores


@pytest.mark.slow
@pytest.mark.parametrize(("layout", "batch", "optimizer", "grpo"), CASES)
def test_steps_of_four_ranks_are_those_of_one(
    four_ranks: FourRanks,
    setup: Setup,
    batches: dict[str, list[TrainSample]],
    tmp_path: Path,
    layout: str,
    batch: str,
    optimizer: dict[str, Any],
    grpo: dict[str, Any],
) -> None:
    options = OptimizerOptions(**{"eps": 1e-5, "clip": 0.3, **optimizer})
    objective, samples = GrpoObjective(GrpoOptions(**grpo)), batches[batch]
    alone = copied(setup.trained)
    rows, scores = train(build_backend(alone, options, 0.9), samples, objective)

    found: list[dict[str, torch.Tensor]] = []
    whole = sum(parameter.numel() for parameter in alone.model.parameters())
    for _ in range(2):
        policy = copied(setup.trained)
        with four_ranks.group(policy, layout) as workers:
            backend = build_backend(policy, options, 0.9, workers)
            groups = [group for optimizer in backend.own.optimizers.in_force for group in optimizer.param_groups]
            held = sum(own_part(weight).numel() for group in groups for weight in group["params"])
            assert held <= 1.05 * whole / SHARDS[layout], "rank 0 holds its part"
            rows_2, scores_2 = train(backend, samples, objective)
            found.append({name: weight.detach().clone() for name, weight in backend.iter_weights()})
        for row, row_2 in zip(rows, rows_2, strict=True):
            assert row_2 == pytest.approx(row, rel=2e-5, abs=2e-6)
        np.testing.assert_allclose(np.concatenate(scores_2), np.concatenate(scores), atol=1e-5)
    assert all(torch.equal(weight, found[1][name]) for name, weight in found[0].items()), "equal runs, equal bits"
    for name, weight in alone.model.named_parameters():
        torch.testing.assert_close(found[0][name], weight, rtol=0, atol=0.05 * RATE, msg=name)
