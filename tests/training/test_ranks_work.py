"""What a sharded step does beside its result: collectives are counted, and so is what the optimizer holds."""

from __future__ import annotations

import pytest
from torch import Tensor
from torch.distributed.tensor.debug import CommDebugMode

from geo_sokoban_pipeline.config.grpo import GrpoOptions, OptimizerOptions
from geo_sokoban_pipeline.distributed.slices import own_part
from geo_sokoban_pipeline.grpo.loss import GrpoObjective
from geo_sokoban_pipeline.training.backends import optim
from geo_sokoban_pipeline.training.backends.ranks import RankedBackend
from geo_sokoban_pipeline.training.batch import TrainSample
from training.four_ranks import FourRanks
from training.live_bytes import LiveBytes
from training.setup import Setup, copied

pytestmark = pytest.mark.slow

OBJECTIVE = GrpoObjective(GrpoOptions())


@pytest.mark.parametrize("micro_batches", [1, 4, 16])
def test_a_step_reduces_each_unit_once(
    four_ranks: FourRanks, setup: Setup, batches: dict[str, list[TrainSample]], micro_batches: int
) -> None:
    policy, sample = copied(setup.trained), batches["boards"][0]
    options = OptimizerOptions(max_tokens=16 // micro_batches * sample.length)
    counts = []
    with four_ranks.group(policy, "two shards") as workers:
        assert workers is not None
        backend = RankedBackend(policy, options, 0.9, workers)
        for _ in range(2):
            with CommDebugMode() as collectives:
                backend.step([sample] * 32, OBJECTIVE, 1e-3)  # 16 on each rank
            counts.append({str(name): count for name, count in collectives.comm_counts.items()})
    units = policy.model.config.text_config.num_hidden_layers + 2
    for found in counts:
        assert [count for name, count in found.items() if "reduce_scatter" in name] == [units], found
        # Each pass gathers the weights, so this is not the count of a step that did nothing.
        assert sum(count for name, count in found.items() if "gather" in name) > micro_batches


@pytest.mark.parametrize("layout", ["four shards", "two copies of two shards"])
def test_a_rank_holds_one_whole_matrix_at_a_time(
    four_ranks: FourRanks,
    setup: Setup,
    batches: dict[str, list[TrainSample]],
    monkeypatch: pytest.MonkeyPatch,
    layout: str,
) -> None:
    policy, size = copied(setup.trained), 4 if layout == "four shards" else 2
    orthogonalise, whole = optim.orthogonalise, []

    def counted(matrix: Tensor) -> Tensor:
        whole.append(matrix.shape)
        return orthogonalise(matrix)

    monkeypatch.setattr(optim, "orthogonalise", counted)  # on this rank
    with four_ranks.group(policy, layout) as workers:
        assert workers is not None
        backend = RankedBackend(policy, OptimizerOptions(matrices="muon"), 0.9, workers)
        (muon,) = (one for one in backend.own.optimizers.in_force if isinstance(one, optim.Muon))
        live, matrices = LiveBytes(), [matrix for group in muon.param_groups for matrix in group["params"]]
        backend.step(batches["boards"], OBJECTIVE, 1e-3)  # makes the moments
        whole.clear()
        muon.register_step_pre_hook(lambda *_: start(live))
        muon.register_step_post_hook(lambda *_: live.__exit__(None, None, None))
        backend.step(batches["boards"], OBJECTIVE, 1e-3)
    shapes = sorted((tuple(matrix.shape) for matrix in matrices), key=lambda shape: -shape[0] * shape[1])
    assert len(whole) == -(-len(shapes) // size), "each rank has its part of the work"
    shards = sum(own_part(matrix).nbytes for matrix in matrices)
    largest = 4 * shapes[0][0] * shapes[0][1]
    assert size * shards > 10 * largest, "all matrices at once would be seen"
    # The momentum's shards; of one matrix: rows from all ranks, the result, and what the iteration makes.
    assert live.peak <= shards + 8 * largest


def start(live: LiveBytes) -> None:
    live.__enter__()
