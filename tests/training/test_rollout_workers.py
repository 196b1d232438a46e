"""Rollout workers: the numbers of no workers, whoever ends or hangs; over-sampling, versions and time limits."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from functools import partial
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from forked import fork_server
from geo_sokoban_pipeline.distributed.process import LocalProcess, WorkerError
from geo_sokoban_pipeline.events import EVENT, Event
from geo_sokoban_pipeline.policies.policy import load_as, save_policy
from geo_sokoban_pipeline.policies.weights import WeightSource
from geo_sokoban_pipeline.rollout.engines.factory import build_engine
from geo_sokoban_pipeline.rollout.episode import EpisodeRequest, RolloutSettings
from geo_sokoban_pipeline.training.audit_scores import score_episodes
from geo_sokoban_pipeline.training.checkpoint import newest_checkpoint
from geo_sokoban_pipeline.training.collecting import Collector, build_sampler
from geo_sokoban_pipeline.training.rollout_workers import RolloutSide, RolloutWorkers
from geo_sokoban_pipeline.training.worker_group import restarting
from geo_sokoban_pipeline.trajectories.types import Trajectory, table_to_trajectories
from ray_cluster import RayCluster, joined, wait_until
from task_options import TrainOptions
from training.setup import LoopFolder, Setup, settings

pytestmark = pytest.mark.xdist_group("ranks")

slow = pytest.mark.slow

# More than an idle worker's silence on a busy machine.
PATIENCE = 8.0
WORKERS = {"rollout.workers": 2, "rollout.worker_timeout": PATIENCE, "threads": 1}


@pytest.fixture(scope="module")
def two(setup: Setup) -> Iterator[RolloutWorkers]:
    """Two workers that all tests of collecting share; whoever of them is lost has been replaced."""
    with closing(RolloutWorkers(setup.policy, settings(setup.options, WORKERS))) as workers:
        workers.update_weights(None, 0)
        yield workers


@pytest.fixture(scope="module")
def calm(setup: Setup, two: RolloutWorkers) -> list[Trajectory]:
    """Their undisturbed episodes."""
    return collect(setup, two)[0]


def collect(setup: Setup, workers: RolloutWorkers, **changes: Any) -> tuple[list[Trajectory], dict[str, float | None]]:
    """Episodes of a first iteration, and its metrics."""
    options = changed(setup, WORKERS, **changes)
    made = Collector("train_sokoban", 0, options, setup.rows, setup.policy, workers, workers.rollout)
    made.take_metrics = RolloutSide(workers, workers.rollout, workers).take_metrics
    return made.collect(0, build_sampler(setup.rows, options, 0, None))


def collect_alone(setup: Setup, **changes: Any) -> tuple[list[Trajectory], dict[str, float | None]]:
    """The same in this process."""
    options = changed(setup, {}, **changes)
    with closing(build_engine(setup.policy, options.rollout)) as engine:
        made = Collector("train_sokoban", 0, options, setup.rows, setup.policy, engine)
        return made.collect(0, build_sampler(setup.rows, options, 0, None))


def changed(setup: Setup, base: dict[str, Any], **changes: Any) -> TrainOptions:
    """Options with changes by name, whose dots are two underscores."""
    return settings(setup.options, base | {name.replace("__", "."): value for name, value in changes.items()})


def assert_same(found: list[Trajectory], wanted: list[Trajectory], tolerance: float = 0.0) -> None:
    assert [episode.trajectory_id for episode in found] == [episode.trajectory_id for episode in wanted]
    for one, other in zip(found, wanted, strict=True):
        assert np.array_equal(one.token_ids, other.token_ids)
        assert [turn.action for turn in one.turns] == [turn.action for turn in other.turns]
        assert (one.reward, one.status, one.seed) == (other.reward, other.status, other.seed)
        np.testing.assert_allclose(one.rollout_log_probs, other.rollout_log_probs, rtol=0, atol=tolerance)


@pytest.fixture(scope="module")
def awkward_row(setup: Setup) -> Any:
    """Id of a row of the first iteration whose episodes all have a second step."""
    drawn = build_sampler(setup.rows, setup.options, 0, None).draw(0, setup.options.grpo.groups)
    steps: dict[int, list[int]] = {}
    for episode in setup.episodes:
        steps.setdefault(episode.group_index, []).append(sum(turn.role == "assistant" for turn in episode.turns))
    group = next(group for group, counts in steps.items() if min(counts) > 1)
    return setup.rows[drawn[group]]["id"]


def awkward(setup: Setup, row: Any, **how: Any) -> dict[str, Any]:
    return {"env__factory": "awkward_envs.build_env", "env__args": {**setup.options.env.args, "row": row, **how}}


class Cut:
    """Kills a worker after so many groups of a rollout, once, as if it had ended between two messages.

    Attributes:
        begun: groups with which a worker began, of each rollout and each loss.
        left: groups until then; None: it is not killed.
    """

    def __init__(self) -> None:
        self.begun: list[list[int]] = []
        self.left: int | None = None
        self._stream = LocalProcess.stream

    def stream(self, process: LocalProcess, method: str, *arguments: Any, each: Callable[[Any], None]) -> Any:
        """In place of that of a handle."""
        if method == "rollout_groups":
            self.begun.append(sorted({request.group_index for request in arguments[1]}))

        def count(item: Any) -> None:
            if self.left is not None:
                self.left -= 1
                if self.left < 0:
                    self.left = None
                    os.kill(process.pid, signal.SIGKILL)
                    raise EOFError
            each(item)

        return self._stream(process, method, *arguments, each=count)


def test_what_a_lost_worker_had_begins_again(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole batches where their composition decides over the last bits; only what is not over where it does not."""
    cut = Cut()
    monkeypatch.setattr(LocalProcess, "stream", lambda own, *given, **named: cut.stream(own, *given, **named))  # noqa: PLW0108
    options = settings(setup.options, WORKERS | {"rollout.workers": 1})
    groups = range(options.grpo.groups)
    drawn = build_sampler(setup.rows, options, 0, None).draw(0, len(groups))
    tasks = [EpisodeRequest(f"g{group}", setup.rows[drawn[group]], group, 0, seed=group) for group in groups]
    rules = RolloutSettings(options.env, options.reward, options.rollout, options.rollout.sampling, 0, "sokoban", 0)
    seconds = [0.0]
    with closing(RolloutWorkers(setup.policy, options)) as workers:
        workers.update_weights(None, 0)
        side = RolloutSide(workers, workers.rollout, workers)
        wanted = workers.rollout(None, setup.policy, tasks, rules)
        for is_streamed in (False, True):
            cut.begun, cut.left, ended = [], 2, list[int]()
            enough = (lambda episodes: False) if is_streamed else None
            found = workers.rollout(None, setup.policy, tasks, rules, ended.append, enough)
            first, again = cut.begun
            assert first == list(groups) and again == (first if not is_streamed else again)
            assert len(again) == (len(groups) - 2 if is_streamed else len(groups))
            assert_same(found, wanted, 1e-5 if is_streamed else 0.0)
            assert sum(ended) == len(tasks), "each is counted once"
            seconds.append(workers.cpu_seconds)
        assert seconds == sorted(set(seconds)), "what earlier processes took stays"
        began = time.process_time()
        assert began <= side.cpu_clock(None) - seconds[-1] <= time.process_time()
        # Idle is a share of the rollouts since the last call; losses count since the call before that one.
        idle, restarts = "perf/idle_share/worker_0", {"perf/worker_restarts": 2.0}
        first = side.take_metrics()
        assert 0.0 <= first.pop(idle) < 1.0 and first == restarts
        assert side.take_metrics() == {idle: 1.0} | restarts
        assert side.take_metrics() == {idle: 1.0}


@slow
def test_numbers_of_two_are_those_of_none(setup: Setup, two: RolloutWorkers, calm: list[Trajectory]) -> None:
    assert_same(calm, setup.episodes, 1e-5)
    again, metrics = collect(setup, two)
    assert_same(again, calm)
    idle = [metrics[f"perf/idle_share/worker_{number}"] for number in range(2)]
    assert all(share is not None and 0.0 <= share < 0.9 for share in idle)
    assert 0 < metrics["perf/engine_time"] < metrics["perf/rollout_time"]  # type: ignore[operator]


@slow
@pytest.mark.parametrize("sign", ["SIGKILL", "SIGSTOP"])
def test_a_worker_that_ends_or_hangs_in_an_episode_is_replaced(
    setup: Setup,
    two: RolloutWorkers,
    calm: list[Trajectory],
    awkward_row: Any,
    tmp_path: Path,
    sign: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    before = two.process_ids
    found, metrics = collect(setup, two, **awkward(setup, awkward_row, sign=sign, mark=str(tmp_path / "mark")))
    assert_same(found, calm)
    assert metrics["perf/worker_restarts"] == 1.0
    assert len(set(before) & set(two.process_ids)) == 1
    (gone,) = set(before) - set(two.process_ids)
    assert not psutil.pid_exists(gone)
    said = "(SIGKILL)" if sign == "SIGKILL" else f"hangs: it has been silent for {PATIENCE:g} s"
    assert any(said in message and "It is replaced (1 of 3)" in message for message in caplog.messages)


@slow
def test_an_environment_that_hangs_costs_its_episodes_alone(
    setup: Setup, two: RolloutWorkers, calm: list[Trajectory], awkward_row: Any
) -> None:
    before = two.process_ids
    limits = {"rollout__env_timeout": 1.5, "rollout__max_failed_share": 0.5}
    found, _ = collect(setup, two, **limits, **awkward(setup, awkward_row, seconds=600.0))
    failed = [episode for episode in found if episode.status == "failed"]
    assert len({episode.group_index for episode in failed}) == 1
    assert {episode.error for episode in failed} == {
        "EnvTimeoutError: step of the environment took longer than rollout.env_timeout=1.5 s"
    }
    others = [episode for episode in found if episode.status != "failed"]
    ids = {episode.trajectory_id for episode in others}
    assert_same(others, [episode for episode in calm if episode.trajectory_id in ids], 1e-5)
    assert len(set(before) & set(two.process_ids)) == 1, "the worker in which it hangs is replaced"


@slow
def test_over_sampling_trains_as_many_groups_as_in_one_process(setup: Setup, two: RolloutWorkers) -> None:
    for share, started in ((1.5, 6), (3.0, 12)):
        found, metrics = collect(setup, two, rollout__over_sampling=share)
        assert len({episode.group_index for episode in found}) == started
        assert len({episode.group_index for episode in found if episode.trained}) == setup.options.grpo.groups
        assert [episode.trajectory_id for episode in found] == sorted(episode.trajectory_id for episode in found)
        assert {episode.drop_reason for episode in found if not episode.trained} <= {"aborted", "surplus"}
        assert metrics["rollout/episodes"] == started * setup.options.grpo.group_size


@slow
def test_one_gives_the_bits_of_none(setup: Setup) -> None:
    options = settings(setup.options, WORKERS | {"rollout.workers": 1})
    with closing(RolloutWorkers(setup.policy, options)) as workers:
        workers.update_weights(None, 0)
        found, _ = collect(setup, workers)
        assert_same(found, setup.episodes)
        assert workers.cpu_seconds > 0


def is_stopped(pid: int) -> bool:
    return bool(psutil.Process(pid).status() == psutil.STATUS_STOPPED)


@slow
def test_groups_without_a_signal_are_replaced_as_in_one_process(setup: Setup, two: RolloutWorkers) -> None:
    changes = {"grpo__filter": "mixed_success", "grpo__max_refill": 3.0}
    found, metrics = collect(setup, two, **changes)
    alone, wanted = collect_alone(setup, **changes)
    assert_same(found, alone, 1e-5)
    assert [episode.drop_reason for episode in found] == [episode.drop_reason for episode in alone]
    assert len({episode.group_index for episode in found}) > setup.options.grpo.groups
    assert metrics["rollout/trained_ratio"] == wanted["rollout/trained_ratio"]


@slow
def test_aborted_responses_are_continued_as_if_nobody_had_aborted_them(setup: Setup) -> None:
    turn: dict[str, Any] = {"rollout__max_turns": 1, "rollout__max_conversations": 2, "grpo__mixed_versions": "keep"}
    whole = {episode.trajectory_id: episode for episode in collect_alone(setup, grpo__groups=8, **turn)[0]}
    turn |= {"rollout__partial": True, "rollout__over_sampling": 2.0} | awkward(setup, "any", seconds=0.3, step=1)
    options = changed(setup, WORKERS, **turn)
    sampler = build_sampler(setup.rows, options, 0, None)
    with closing(RolloutWorkers(setup.policy, options)) as workers:  # each with places for two episodes
        made = Collector("train_sokoban", 0, options, setup.rows, setup.policy, workers, workers.rollout)
        workers.update_weights(None, 0)
        first, _ = made.collect(0, sampler)
        kept = list(made.partial.groups)
        workers.update_weights(None, 1)
        second, _ = made.collect(1, sampler)
    ended = [episode for episode in first if episode.status != "aborted"]
    assert_same(ended, [whole[episode.trajectory_id] for episode in ended], 1e-5)
    assert len({episode.group_index for episode in first if episode.trained}) == options.grpo.groups
    broken = sorted({episode.group_index for episode in first if episode.status == "aborted"})
    before = [episode for episode in first if episode.group_index in broken]
    assert len(kept) == len(broken) >= 1
    after = [episode for episode in second if episode.group_index < len(broken)]
    assert [episode.seed for episode in after] == [episode.seed for episode in before]
    assert len({episode.group_index for episode in second}) == 2 * options.grpo.groups
    for old, new in zip(before, after, strict=True):
        uninterrupted = whole[old.trajectory_id]
        count = int(old.loss_mask.sum())
        versions = [version for version, first, last in new.weight_spans for _ in range(first, last)]
        assert versions[:count] == [0] * count
        assert set(versions[count:]) <= {1}
        if new.status != "aborted":
            assert np.array_equal(new.token_ids, uninterrupted.token_ids)


@slow
def test_a_worker_that_is_started_while_all_are_closed_ends_too(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    pids: list[int] = []

    class Started(LocalProcess):
        def __init__(self, title: str, build: Any, *, on_gpu: bool) -> None:
            super().__init__(title, build, on_gpu=on_gpu)
            pids.append(self.pid)
            if len(pids) == 2:
                workers.close()  # as the main thread does where this one rolls out

    monkeypatch.setattr("geo_sokoban_pipeline.training.rollout_workers.LocalProcess", Started)
    workers = RolloutWorkers(setup.policy, settings(setup.options, WORKERS | {"rollout.workers": 1}))
    os.kill(pids[0], signal.SIGKILL)
    with pytest.raises(WorkerError, match="are closed"):
        workers.update_weights(None, 0)
    assert len(pids) == 2
    assert not any(map(psutil.pid_exists, pids))


@slow
def test_workers_of_which_one_finds_no_place_all_end(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[int] = []

    class Placed(LocalProcess):
        def __init__(self, title: str, build: Any, *, on_gpu: bool) -> None:
            if title.startswith("rollout worker 2"):
                raise WorkerError("no place")
            super().__init__(title, build, on_gpu=on_gpu)
            begun.append(self.pid)

    monkeypatch.setattr("geo_sokoban_pipeline.training.rollout_workers.LocalProcess", Placed)
    with pytest.raises(WorkerError, match="no place"):
        RolloutWorkers(setup.policy, settings(setup.options, WORKERS))
    assert len(begun) == 1 and not any(map(psutil.pid_exists, begun))


@slow
@pytest.mark.ray
def test_workers_in_a_ray_cluster_give_the_same_and_are_replaced(
    setup: Setup, calm: list[Trajectory], awkward_row: Any, tmp_path: Path, ray_cluster: RayCluster
) -> None:
    """One on each of two nodes, whose working folder is empty; hanging, killed, and with their node."""
    own = {"env__factory": f"{Path(__file__).parents[1]}/awkward_envs.py:build_env"}

    def stopping(mark: str) -> dict[str, Any]:
        return awkward(setup, awkward_row, sign="SIGSTOP", mark=str(tmp_path / mark)) | own

    def lose_all(workers: RolloutWorkers) -> None:
        """Once one has stopped in an episode, remove its node, and kill the other worker."""
        wait_until(lambda: any(map(is_stopped, workers.process_ids)), "none has stopped")
        stopped = {pid for pid in workers.process_ids if is_stopped(pid)}
        for node in ray_cluster.nodes[1:]:
            ranks = {process.pid for process in ray_cluster.ranks_of(node)}
            if ranks & stopped:
                ray_cluster.remove_node(node)
            else:
                os.kill(ranks.pop(), signal.SIGKILL)
        ray_cluster.fill()

    options = changed(setup, WORKERS | {"placement": "ray", "ray.patience": 60.0}, **stopping(""))
    folder = ray_cluster.unseen / "policy"
    save_policy(setup.policy, folder)
    (folder / "optimizer.safetensors").write_bytes(b"moments")
    with (
        joined(ray_cluster, options.ray, 2),
        ThreadPoolExecutor(1) as aside,
        closing(RolloutWorkers(setup.policy, options)) as workers,
    ):
        workers.update_weights(WeightSource.of_folder(folder), 0)
        before = workers.process_ids
        scratch = Path(psutil.Process(before[0]).cwd())
        assert {path.name for path in scratch.rglob("*.safetensors")} == {"model.safetensors"}
        wanted, _ = collect(setup, workers)
        assert_same(wanted, calm, 1e-5)
        os.kill(before[1], signal.SIGSTOP)
        found, metrics = collect(setup, workers, **stopping("episode"))
        assert_same(found, wanted)
        assert metrics["perf/worker_restarts"] == 2.0
        losing = aside.submit(lose_all, workers)
        found, metrics = collect(setup, workers, **stopping("node"))
        losing.result()
        assert_same(found, wanted)
        assert metrics["perf/worker_restarts"] == 2.0
        assert not set(before) & set(workers.process_ids)
        workers.update_weights(None, 1)
    assert ray_cluster.ranks_left() == []


# Whole runs, with rollouts beside the training.

ITERATIONS = 4


LOOP = {"iterations": ITERATIONS, "eval_interval": 2, "eval_prompts": 2, "keep_last": 2, "max_staleness": 1}
BESIDE = (
    WORKERS | {"rollout.workers": 1, "rollout.max_turns": 2} | {f"loop.{name}": given for name, given in LOOP.items()}
)
# Where the run dies, one after the other: nothing is stored; two iterations are in flight; episodes are stored, and no
# checkpoint of them. Where its worker dies: it plays the next iteration; it is to play a validation.
DEATHS = {
    "run": [(Event.COLLECT, 0), (Event.UPDATE, 2), (Event.CHECKPOINT, 2)],
    "worker": [(Event.UPDATE, 1), (Event.VALIDATE, 1)],
}


def kill_worker(*at: tuple[Event, int]) -> None:
    """Kill the rollout worker that this process has started since, at each of these events once."""
    left, spared = list(at), set(multiprocessing.active_children())

    def hear(name: str, given: tuple[Any, ...]) -> None:
        if name == EVENT and given in left:
            left.remove(given)
            (worker,) = set(multiprocessing.active_children()) - spared
            worker.kill()

    sys.addaudithook(hear)  # for good: Python takes none back


def die(setup: Setup, options: TrainOptions, folder: Path, at: tuple[Event, int]) -> None:
    """Run until the event at which this process dies."""

    def hear(name: str, given: tuple[Any, ...]) -> None:
        if name == EVENT and given == at:
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hear)
    list(LoopFolder(folder).go_on(setup, options))


def run_and_die(setup: Setup, options: TrainOptions, folder: Path, at: tuple[Event, int]) -> None:
    """Have a process of its own run until the point at which it dies; what it has started ends with it."""
    small = replace(setup, policy=None, trained=None, episodes=[])  # what a run does not use does not travel
    own = psutil.Process()
    before = set(own.children(recursive=True))
    run = fork_server().Process(target=die, args=(small, options, folder, at))
    run.start()
    seen: set[psutil.Process] = set()
    while run.exitcode is None:
        seen |= set(own.children(recursive=True)) - before
        run.join(0.1)
    assert run.exitcode == -signal.SIGKILL
    _, left = psutil.wait_procs(seen, timeout=60)
    assert left == []


@pytest.fixture(scope="module")
def undisturbed(setup: Setup, tmp_path_factory: pytest.TempPathFactory) -> LoopFolder:
    """A run with rollouts beside the training that nobody kills."""
    run = LoopFolder(tmp_path_factory.mktemp("undisturbed"))
    list(run.go_on(setup, settings(setup.options, BESIDE)))
    return run


@slow
def test_the_last_validation_is_played_by_the_newest_checkpoint(setup: Setup, tmp_path: Path) -> None:
    """By the weights, not only by the version that the episodes name; no rollout lies between the last two."""
    run = LoopFolder(tmp_path)
    options = settings(setup.options, BESIDE | {"loop.iterations": 2, "loop.eval_interval": 1})
    list(run.go_on(setup, options))
    gaps = {}
    for version in (1, 2):
        policy = load_as(options.policy, run.checkpoint(version - 1))
        episodes = table_to_trajectories(run.tables("eval_trajectories")["iter=00002/part-000"])
        gaps[version] = max(np.abs(one.gaps).max() for one in score_episodes(episodes, policy, options.optimizer, 2))
    assert gaps[2] < 1e-4 < gaps[1]


@slow
def test_a_run_that_loses_more_workers_than_allowed_names_its_newest_checkpoint(setup: Setup, tmp_path: Path) -> None:
    options = settings(setup.options, BESIDE | {"rollout.worker_restarts": 0})
    said = r"rollout worker 1 of 1 .*SIGKILL.*\(rollout.worker_restarts=0\).* Newest checkpoint: iter=00000\.$"
    kill_worker((Event.UPDATE, 1))
    with pytest.raises(WorkerError, match=said):
        for one in restarting(options, partial(newest_checkpoint, tmp_path / "checkpoints")):
            with one:
                list(LoopFolder(tmp_path).go_on(setup, options))


@slow
@pytest.mark.parametrize("whom", DEATHS)
def test_rollouts_beside_the_training_end_with_the_same_files_whoever_is_killed(
    setup: Setup, undisturbed: LoopFolder, tmp_path: Path, whom: str
) -> None:
    options, run = settings(setup.options, BESIDE), LoopFolder(tmp_path)
    for at in DEATHS["run"] if whom == "run" else ():
        run_and_die(setup, options, tmp_path, at)
    before = {process.pid for process in psutil.Process().children(recursive=True)}
    if whom == "worker":
        kill_worker(*DEATHS["worker"])
    list(run.go_on(setup, options))
    killed = len(DEATHS["worker"]) if whom == "worker" else 0
    assert sum(row.get("perf/worker_restarts", 0.0) for row in run.metrics()) == killed
    after = {process.pid for process in psutil.Process().children(recursive=True)}
    assert after - before <= resource_trackers()
    run.assert_same(undisturbed)


def resource_trackers() -> set[int]:
    """Process ids of Python's own helper, which the first spawned process starts and which stays."""
    tracker = resource_tracker._resource_tracker._pid  # type: ignore[attr-defined]
    return set() if tracker is None else {tracker}
