"""Rollout workers over a real server that the driver keeps: lost connections, groups handed out and aborted."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import numpy as np
import pytest

from geo_sokoban_pipeline.policies.policy import Policy
from geo_sokoban_pipeline.rollout.episode import EpisodeRequest, RolloutSettings
from geo_sokoban_pipeline.training.backends.torch import TorchBackend
from geo_sokoban_pipeline.training.batch import build_sample
from geo_sokoban_pipeline.training.rollout_workers import RolloutWorkers
from geo_sokoban_pipeline.trajectories.types import Trajectory
from proxies import Proxy, proxied
from servers import ON_CPU
from task_options import TrainOptions

pytestmark = pytest.mark.slow
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
    episodes = workers.rollout(None, None, tasks, settings_of(options))
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
