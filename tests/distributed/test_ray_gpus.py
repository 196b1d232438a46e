"""Ray gives each GPU to one actor. It only counts them, so that a machine without GPUs shows whose they are."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest

from geo_sokoban_pipeline.config.ray import RayOptions
from geo_sokoban_pipeline.distributed.ray_cluster import NoPlaceError
from geo_sokoban_pipeline.distributed.ray_process import start_ray_processes
from geo_sokoban_pipeline.distributed.ray_servers import RayServer, ray_launcher
from geo_sokoban_pipeline.policies.policy import Policy
from geo_sokoban_pipeline.training.worker_group import servers_alone
from rank_jobs import close
from ray_cluster import RayCluster, joined, wait_until
from task_options import TrainOptions

pytestmark = [pytest.mark.slow, pytest.mark.ray, pytest.mark.xdist_group("ranks")]
PLACING = RayOptions(cpus=0.1, patience=3)


@pytest.fixture(scope="module", autouse=True)
def _joined(ray_cluster: RayCluster) -> Iterator[None]:
    with joined(ray_cluster, PLACING):
        yield


def visible(server: RayServer) -> list[str]:
    """GPUs that a server's program is shown."""
    written = Path(f"{server.options.python}.gpus")
    server.start()
    wait_until(lambda: written.exists() and written.read_text().endswith("\n"), "its program has not begun", 30)
    found = written.read_text().strip().split(",")
    written.unlink()
    return found


def test_ranks_and_servers_have_gpus_of_their_own_unless_they_take_turns(
    tiny_policy: Policy, train_options: TrainOptions, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A server of an evaluation finds the two GPUs that the ranks leave; there was place for one server of two."""
    program = tmp_path / "program"
    program.write_text('#!/bin/sh\necho "$CUDA_VISIBLE_DEVICES" > "$0.gpus"\n')
    program.chmod(0o755)
    server = {"count": 2, "tensor_parallel": 2, "python": str(program)}
    values = {"placement": "ray", "processes": 2, "threads": 1, "ray": {**PLACING.model_dump(), "min_processes": 1}}
    rollout = train_options.rollout.model_dump() | {"engine": "sglang", "server": server}
    options = TrainOptions.model_validate(train_options.model_dump() | values | {"rollout": rollout})
    ranks = start_ray_processes(["process 1 of 2", "process 2 of 2"], "2 ranks of", PLACING, 1)
    places = [rank.where for rank in ranks]
    with ExitStack() as opened, servers_alone(options) as (fitting, launcher):
        opened.callback(close, ranks)
        assert launcher is not None and fitting.rollout.server.count == 1
        assert "place for 1 of 2 servers" in caplog.text
        patient = PLACING.model_copy(update={"patience": 60.0})
        alone = RayServer(fitting.rollout.server, tiny_policy, 0, patient)
        given = [place.gpus for place in places]
        assert [len(gpus) for gpus in given] == [1, 1]
        own, pid, log = visible(alone), alone.pid, alone.log
        assert sorted([*given[0], *given[1], *own]) == ["0", "1", "2", "3"]
        wait_until(lambda: alone.lost() is not None, "its program has ended")
        assert visible(alone) == own and alone.pid != pid and alone.log == log, "brought back by the same actor"
        os.kill(int(log.parent.name.removeprefix("servers-")), signal.SIGKILL)
        wait_until(lambda: "has ended" in (alone.lost() or ""), "its actor has ended")
        assert sorted(visible(alone)) == sorted(own) and alone.log != log, "brought back by another one"
        with pytest.raises(NoPlaceError, match="1 ranks of 0.1 CPU, 1 GPU each, .*found no place in 3 s"):
            start_ray_processes(["one"], "1 ranks of", PLACING, 1)
        late = RayServer(fitting.rollout.server, tiny_policy, 0, PLACING.model_copy(update={"patience": 300.0}))
        with ThreadPoolExecutor(1) as aside:
            waiting, began = aside.submit(late.start), time.monotonic()
            time.sleep(0.5)
            assert waiting.running()
            late.end()
            waiting.result()
            assert time.monotonic() - began < 60, "who ends it does not wait for its GPUs"
        import ray

        states = [group["state"] for group in ray.util.placement_group_table().values()]
        assert set(states) <= {"CREATED", "REMOVED"}, "nothing waits any more"
        with ray_launcher(PLACING, places) as taking_turns:
            shared = taking_turns.server(fitting.rollout.server, tiny_policy, 0)
            assert visible(shared) == [*given[0], *given[1]], "nothing was free, and nothing is needed"
            shared.end()
        alone.end()
