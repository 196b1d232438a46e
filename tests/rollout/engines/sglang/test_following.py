"""Rollout workers over a real server that the driver keeps: lost and moved servers, groups handed out and aborted."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from geo_sokoban_pipeline.config.server import ServerOptions
from geo_sokoban_pipeline.distributed.process import WorkerDied
from geo_sokoban_pipeline.policies.policy import Policy
from geo_sokoban_pipeline.rollout.engines.sglang.servers import IdleServers, Launcher
from geo_sokoban_pipeline.rollout.episode import EpisodeRequest, RolloutSettings
from geo_sokoban_pipeline.training.backends.torch import TorchBackend
from geo_sokoban_pipeline.training.batch import build_sample
from geo_sokoban_pipeline.training.rollout_workers import RolloutSide, RolloutWorkers
from geo_sokoban_pipeline.trajectories.types import Trajectory
from proxies import Proxy, proxied
from servers import ON_CPU
from task_options import TrainOptions

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("sglang")]
GROUPS, SIZE, VERSION = 6, 2, 3


@pytest.fixture(scope="module")
def proxy(sglang_server: str) -> Iterator[Proxy]:
    with proxied(sglang_server) as found:
        yield found


@pytest.fixture(scope="module")
def options(train_options: TrainOptions, proxy: Proxy) -> TrainOptions:
    # Places for four episodes: each of two workers has one group at a time.
    server = {"mode": "attach", "urls": [proxy.url], "faults": ON_CPU["faults"], "concurrency": 2 * SIZE}
    values = train_options.model_dump()
    values["rollout"] |= {"engine": "sglang", "server": server, "workers": 2, "max_turns": 2}
    return TrainOptions.model_validate({**values, "threads": 1, "processes": 1})


@pytest.fixture(scope="module")
def workers(tiny_policy: Policy, options: TrainOptions) -> Iterator[RolloutWorkers]:
    with closing(RolloutWorkers(tiny_policy, options)) as made:
        made.update_weights(None, VERSION)
        yield made


@pytest.fixture(scope="module")
def tasks(sokoban_rows: Callable[..., list[dict[str, Any]]]) -> list[EpisodeRequest]:
    rows = sokoban_rows(8)
    return [
        EpisodeRequest(f"t{group}/{sample}", rows[group], group, sample, group * SIZE + sample)
        for group in range(GROUPS)
        for sample in range(SIZE)
    ]


def settings_of(options: TrainOptions) -> RolloutSettings:
    return RolloutSettings(
        options.env, options.reward, options.rollout, options.rollout.sampling, 0, options.task, VERSION
    )


def test_a_server_that_is_lost_in_a_response_is_brought_back_by_the_driver(
    tiny_policy: Policy, options: TrainOptions, workers: RolloutWorkers, tasks: list[EpisodeRequest], proxy: Proxy
) -> None:
    proxy.order("/generate", "drop")
    seen = len(proxy.seen)
    side = RolloutSide(workers, workers.rollout, workers, servers=workers.servers)
    side.take_metrics()
    episodes = workers.rollout(None, None, tasks, settings_of(options))
    assert side.take_metrics()["perf/server_restarts"] == 1.0
    assert [side.take_metrics().get("perf/server_restarts") for _ in range(2)] == [1.0, None]
    assert [episode.trajectory_id for episode in episodes] == [task.trajectory_id for task in tasks]
    assert {episode.status for episode in episodes} <= {"completed", "truncated"}
    assert {span[0] for episode in episodes for span in episode.weight_spans} == {VERSION}
    scored = TorchBackend(tiny_policy, options.optimizer).log_probs(
        [build_sample(episode, tiny_policy) for episode in episodes]
    )
    for own, episode in zip(scored, episodes, strict=True):
        np.testing.assert_allclose(own, episode.rollout_log_probs[episode.loss_mask == 1][: len(own)], atol=1e-3)
    since = proxy.seen[seen:]
    assert since.count("/end_weight_update") == 1, "the driver alone has looked after the server, once"


def test_further_groups_are_handed_out_and_aborted_once_there_are_enough(
    options: TrainOptions, workers: RolloutWorkers, tasks: list[EpisodeRequest]
) -> None:
    seen: list[int] = []

    def enough(complete: list[Trajectory]) -> bool:
        seen.append(len({episode.group_index for episode in complete}))
        return seen[-1] >= 3

    episodes = workers.rollout(None, None, tasks, settings_of(options), enough=enough)
    assert seen == [1, 2, 3]
    assert [episode.trajectory_id for episode in episodes] == [task.trajectory_id for task in tasks]
    ended = [group for group in range(GROUPS) if not _is_aborted(episodes, group)]
    assert 3 <= len(ended) < GROUPS
    assert all(episode.reward is None for episode in episodes if episode.status == "aborted")


def _is_aborted(episodes: list[Trajectory], group: int) -> bool:
    return any(episode.status == "aborted" for episode in episodes if episode.group_index == group)


# Last: its engine gives the server weights of its own.


class MovingServer:
    """An `OwnServer` that has another port after each start: a proxy's, before a real server that stays.

    Attributes:
        starts: so far; the next one finds no place if they are `most`.
    """

    pid, log = 0, Path()

    def __init__(self, target: str, options: ServerOptions, number: int) -> None:
        self.options, self.number, self.released = options, number, set[str]()
        self.proxy, self.starts, self.most = Proxy(target), 0, 99

    @property
    def url(self) -> str:
        return self.proxy.url

    @property
    def alive(self) -> bool:
        return self.starts > 0

    def start(self, *, same_port: bool = True) -> None:
        if self.starts == self.most:
            raise WorkerDied("its ranks are gone.")
        self.starts += 1
        self.end()
        self.proxy = Proxy(self.proxy.target)

    def lost(self) -> str | None:
        return None

    def found_port_taken(self) -> bool:
        return False

    def end(self) -> None:
        if not self.proxy.is_closed:
            self.proxy.close()


@pytest.fixture
def moving(sglang_server: str) -> Iterator[list[MovingServer]]:
    """Servers that the test's launcher has made."""
    made: list[MovingServer] = []
    yield made
    for server in made:
        server.end()


def test_a_new_worker_finds_the_server_where_it_is_now_and_reports_one_that_is_dead(
    tiny_policy: Policy,
    options: TrainOptions,
    tasks: list[EpisodeRequest],
    sglang_server: str,
    moving: list[MovingServer],
) -> None:
    def launch(given: ServerOptions, policy: Policy, number: int) -> MovingServer:
        moving.append(MovingServer(sglang_server, given, number))
        return moving[-1]

    values = options.model_dump()
    faults = {**ON_CPU["faults"], "start_timeout": 30.0, "health_timeout": 2.0}
    values["rollout"] |= {"workers": 1, "server": {**ON_CPU, "faults": faults, "concurrency": 2 * SIZE}}
    options = TrainOptions.model_validate(values)
    with closing(RolloutWorkers(tiny_policy, options, Launcher(launch, IdleServers()))) as workers:
        workers.update_weights(None, VERSION)
        (server,) = moving
        undisturbed = workers.rollout(None, None, tasks, settings_of(options))

        def check(starts: int) -> None:
            episodes = workers.rollout(None, None, tasks, settings_of(options))
            assert server.starts == starts
            for one, other in zip(episodes, undisturbed, strict=True):
                assert one.trajectory_id == other.trajectory_id
                assert {span[0] for span in one.weight_spans} == {VERSION}

        server.proxy.order("/generate", "drop")
        check(2)
        os.kill(workers.process_ids[0], signal.SIGKILL)
        check(2)
        os.kill(workers.process_ids[0], signal.SIGKILL)
        server.proxy.close()
        check(3)
        server.most = 3
        before = workers.process_ids
        server.proxy.order("/generate", "drop")
        with pytest.raises(WorkerDied, match=r"^its ranks are gone\.$"):
            workers.rollout(None, None, tasks, settings_of(options))
        assert workers.process_ids == before, "the loss of a server costs no worker"
