"""Memory of a process that shares a policy of 75 million weights with other ranks: its part, and a few units."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from geo_sokoban_pipeline.config.policy import PolicyOptions
from geo_sokoban_pipeline.policies.policy import Policy, load_empty
from training.large import write_random_policy
from training.setup import SIZES

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("ranks")]

MIB = 1 << 20

TESTS = Path(__file__).parents[1]
# Many small layers, because a process may hold 150 MB beside three of them: of 7 million weights each.
LARGE = {**SIZES, "layers": 11, "hidden": 768, "heads": 12, "kv_heads": 4, "head_dim": 64, "mlp": 2304}


@pytest.fixture(scope="module")
def large(tiny_policy: Policy, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the policy; its tokenizer is that of the small one."""
    folder = tmp_path_factory.mktemp("large")
    write_random_policy(folder, tiny_policy, LARGE)
    return folder


@pytest.mark.parametrize(("count", "tensor", "bucket"), [(4, 0, 64 * MIB), (2, 2, 32 * MIB)], ids=str)
def test_no_process_needs_the_whole_model(large: Path, count: int, tensor: int, bucket: int) -> None:
    """Over loading, three steps, saving, and sending weights, in resident memory; the driver included.

    What is collected at once is a bucket: the driver, which encodes it, needs the memory of more than one and at most
    two. The others send theirs tensor by tensor. Where `tensor` is given, Megatron-Core splits each matrix among so
    many ranks, which all have the small tower.
    """
    empty = load_empty(PolicyOptions(), large)
    sizes = {name: parameter.numel() for name, parameter in empty.model.named_parameters()}
    parts = (".layers.0.", ".visual.", ".embed_tokens.")
    layer, tower, embedding = (sum(n for name, n in sizes.items() if part in name) for part in parts)
    assert sum(sizes.values()) >= 75e6 and layer > max(tower, embedding)
    whole, unit = 4 * 4 * sum(sizes.values()), 4 * layer

    paths = os.pathsep.join([str(TESTS.parent / "src"), str(TESTS)])
    words = [sys.executable, "-m", "training.memory_run", str(large), str(count), str(tensor), str(bucket)]
    done = subprocess.run(words, env={**os.environ, "PYTHONPATH": paths}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["is_empty"], "the driver never had the weights"
    assert np.isfinite(found["norms"]).all() and min(found["norms"]) > 0
    assert found["saved"] > 0.75 * whole - 1e6 and found["sent"] > whole / 8
    assert len(found["states"]) == len(found["grown"]) == count
    for state in found["states"]:
        assert sum(state.values()) <= 1.05 * whole / count + unit, state
        assert state["gradients"] > 0.9 * whole / count / 4 and state["moments"] > 0.9 * whole / count / 2
    driver, *others = found["sending"]
    assert bucket < driver <= 2 * bucket and max(others) <= unit
    grown = [size / 1e6 for size in found["grown"]]
    units = 2 if tensor else 3
    assert max(grown) <= (whole / count + units * unit) / 1e6 + 150, grown
