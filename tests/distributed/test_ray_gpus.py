"""Ray gives each GPU to one actor. It only counts them, so that a machine without GPUs shows whose they are."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest

from geo_sokoban_pipeline.config.ray import RayOptions
from geo_sokoban_pipeline.config.server import ServerOptions
from geo_sokoban_pipeline.distributed.ray_placement import NoPlaceError, RankPlace, RayRanks, connected
from geo_sokoban_pipeline.distributed.ray_servers import RayServer, shared_ranks
from geo_sokoban_pipeline.policies.policy import Policy
from geo_sokoban_pipeline.rollout.engines.sglang.client import ServerLost
from geo_sokoban_pipeline.training.ray_group import servers_alone
from rank_jobs import build
from task_options import TrainOptions

pytestmark = pytest.mark.slow
PLACING = RayOptions(cpus=0.1, patience=30)
HURRIED = PLACING.model_copy(update={"patience": 1.0})


@pytest.fixture(scope="module", autouse=True)
def _four_gpus() -> Iterator[None]:
    """A cluster of this machine that takes it for one with four GPUs."""
    import ray

    ray.init(address="local", num_cpus=4, num_gpus=4, include_dashboard=False, log_to_driver=False)
    try:
        with connected(PLACING, 1):
            yield
    finally:
        ray.shutdown()


class Unstarted(RayServer):
    """A server whose actor is placed, and asked where it is; a program that does not exist takes SGLang's place."""

    @property
    def place(self) -> RankPlace:
        assert self._place is not None
        return self._place


def place(policy: Policy, options: ServerOptions, placing: RayOptions, beside: Any = None) -> Unstarted:
    """A server's actor, as an engine has it placed."""
    server = Unstarted(options, policy, 0, placing, beside)
    with pytest.raises(ServerLost, match="/no/such/python: no such interpreter"):
        server.start()
    return server


def test_ranks_and_servers_have_gpus_of_their_own_unless_they_take_turns(
    tiny_policy: Policy, train_options: TrainOptions
) -> None:
    options = ServerOptions(python="/no/such/python", tensor_parallel=2)
    with closing(RayRanks(2, build, PLACING, 1)) as ranks:
        server = place(tiny_policy, options, PLACING)
        given = [place.gpus for place in (*ranks.places, server.place)]
        assert [len(gpus) for gpus in given] == [1, 1, 2]
        assert sorted(gpu for gpus in given for gpu in gpus) == ["0", "1", "2", "3"]
        with pytest.raises(NoPlaceError, match="1 ranks of 1 GPU, 0.1 CPU each, .*found no place in 1 s"):
            RayRanks(1, build, HURRIED, 1)
        with pytest.raises(NoPlaceError, match="server 1 of 1 with 2 GPU, 0.1 CPU each, .*found no place in 1 s"):
            Unstarted(options, tiny_policy, 0, HURRIED).start()

        beside = shared_ranks(ranks.places, options, 0)
        shared = place(tiny_policy, options, HURRIED, beside)
        assert shared.place.gpus == ()
        server.end()
        shared.end()
