"""A dense model and a mixture of experts of the launchers' list under two ranks that share the weights.

One step as of one process, and an export under the hub's names. All sizes in one process are in
`tests/policies/test_model_list.py`.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from geo_sokoban_pipeline.config.grpo import GrpoOptions, OptimizerOptions
from geo_sokoban_pipeline.grpo.loss import GrpoObjective
from geo_sokoban_pipeline.policies.policy import Policy, load_policy
from geo_sokoban_pipeline.runs.storage import read_json
from geo_sokoban_pipeline.training.backend import build_backend
from policies.test_model_list import build_model, build_samples, published_shapes
from training.four_ranks import FourRanks
from training.setup import copied

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("ranks")]

RATE = 1e-3
OBJECTIVE = GrpoObjective(GrpoOptions())
OPTIONS = OptimizerOptions(eps=1e-5, gradient_checkpointing=True, max_tokens=60)


@pytest.mark.parametrize("size", ["2B", "30B-A3B"])
def test_a_sharded_step_is_exported_under_the_hubs_names_and_loads_again(
    four_ranks: FourRanks, tiny_policy: Policy, tmp_path: Path, size: str
) -> None:
    policy = Policy(build_model(tiny_policy, size), tiny_policy.tokenizer, tiny_policy.image_processor)
    samples = build_samples(policy)
    alone = copied(policy)
    expected = build_backend(alone, OPTIONS, 0.8).step(samples, OBJECTIVE, RATE)
    before = {name: weight.detach().clone() for name, weight in policy.model.named_parameters()}
    with four_ranks.group(policy, "two shards") as workers:
        backend = build_backend(policy, OPTIONS, 0.8, workers)
        found = backend.step(samples, OBJECTIVE, RATE)
        files = backend.export(tmp_path)
        backend.close()
    assert found == pytest.approx(expected, abs=1e-6, rel=1e-6) and found["grad_norm"] > 0

    stored = {name: weight for file in tmp_path.glob("*.safetensors") for name, weight in load_file(file).items()}
    published = published_shapes(size)
    assert set(stored) == set(published)
    for name, shape in published.items():
        assert shape is None or tuple(stored[name].shape) == shape, name
    assert {path.name for path in tmp_path.glob("*.safetensors")} <= set(files)
    assert read_json(tmp_path / "config.json")["model_type"] == ("qwen3_vl_moe" if "A3B" in size else "qwen3_vl")
    one = dict(alone.model.named_parameters())
    for name, weight in load_policy(tmp_path).model.named_parameters():
        torch.testing.assert_close(weight, one[name], rtol=0, atol=0.05 * RATE, msg=name)
        assert not torch.equal(weight, before[name]), name
