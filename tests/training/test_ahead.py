"""Rollouts beside the training: iteration k + 1 with the weights that k began with, whatever the timing."""

from __future__ import annotations

import copy
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from geo_sokoban_pipeline.datasets.iterations import read_iteration
from geo_sokoban_pipeline.policies.policy import Policy, load_as
from geo_sokoban_pipeline.policies.weights import WeightSource
from geo_sokoban_pipeline.rollout.engines.base import Request, Result
from geo_sokoban_pipeline.rollout.engines.transformers import TransformersEngine
from geo_sokoban_pipeline.studies.plan import merge
from geo_sokoban_pipeline.training import rollout_workers
from geo_sokoban_pipeline.training.backends.base import DivergedError
from geo_sokoban_pipeline.training.backends.torch import TorchBackend
from geo_sokoban_pipeline.trajectories.types import table_to_trajectories
from task_options import TrainOptions
from training.setup import SMALL, LoopFolder, Setup

pytestmark = pytest.mark.xdist_group("ranks")

ITERATIONS = 4


class ApartEngine(TransformersEngine):
    """An engine with weights of its own, as servers have them; its end is that of a thread that waits for it."""

    in_process = False
    restarts = 0

    def __init__(self, policy: Policy, log: Log) -> None:
        super().__init__(Policy(copy.deepcopy(policy.model), policy.tokenizer, policy.image_processor))
        self._log, self._closed = log, threading.Event()

    def update_weights(self, weights: WeightSource | None, version: int) -> None:
        assert weights is not None
        self._log.weights.append((version, str(weights.state())))
        super().update_weights(weights, version)

    def submit(self, requests: list[Request]) -> None:  # type: ignore[override]
        self._log.submitted[self.version] = threading.current_thread().name
        self._log.begun(self.version).set()
        super().submit(requests)

    def poll(self) -> list[Result]:
        if self._closed.is_set():
            raise RuntimeError("closed")
        return super().poll()

    def close(self) -> None:
        self._closed.set()


class AtOnce(ThreadPoolExecutor):
    """A thread whose work is over when `submit` returns."""

    def submit(self, *given: Any) -> Any:  # type: ignore[override]
        future = super().submit(*given)
        wait([future])
        return future


@dataclass
class Log:
    """Events of a loop.

    Attributes:
        weights: version and source of each set that the engine got.
        submitted: thread that rolled out, by version of the weights.
    """

    weights: list[tuple[int, str]] = field(default_factory=list)
    submitted: dict[int, str] = field(default_factory=dict)
    _begun: dict[int, threading.Event] = field(default_factory=dict)

    def begun(self, version: int) -> threading.Event:
        """Set when a rollout with this version has begun."""
        return self._begun.setdefault(version, threading.Event())


def options_of(setup: Setup, **loop: Any) -> TrainOptions:
    base = {"iterations": ITERATIONS, "eval_interval": 2, "eval_prompts": 2, "keep_last": 2, "max_staleness": 1}
    return changed(setup.options, {**SMALL, "rollout": {"engine": "sglang", "max_turns": 2}, "loop": {**base, **loop}})


def changed(options: TrainOptions, changes: dict[str, Any]) -> TrainOptions:
    return TrainOptions.model_validate(merge(options.model_dump(), changes))


@contextmanager
def watched() -> Iterator[Log]:
    """Events of the loops of the `with` block."""
    found = Log()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rollout_workers, "build_engine", lambda policy, options, launcher: ApartEngine(policy, found))
        yield found


@pytest.fixture
def log() -> Iterator[Log]:
    with watched() as found:
        yield found


@pytest.fixture(scope="module")
def whole(setup: Setup, tmp_path_factory: pytest.TempPathFactory) -> tuple[LoopFolder, Log]:
    """An undisturbed run, and what it did."""
    run = LoopFolder(tmp_path_factory.mktemp("whole"))
    with watched() as found:
        list(run.go_on(setup, options_of(setup)))
    return run, found


def versions_of(tables: dict[str, pa.Table]) -> dict[int, set[int]]:
    """Of the weights that have sampled each partition's tokens."""
    found: dict[int, set[int]] = {}
    for name, table in tables.items():
        spans = [span for episode in table_to_trajectories(table) for span in episode.weight_spans]
        found[read_iteration(name)] = {version for version, _, _ in spans}
    return found


def test_an_iteration_is_rolled_out_with_the_weights_before_the_last_step(whole: tuple[LoopFolder, Log]) -> None:
    run, log = whole
    assert versions_of(run.tables()) == {number: {max(number - 1, 0)} for number in range(ITERATIONS)}
    rows = run.metrics()
    assert [row["policy_version"] for row in rows] == [0, 0, 1, 2]
    assert [row["rollout/staleness"] for row in rows] == [0.0, 1.0, 1.0, 1.0]
    assert all(0.0 <= row["perf/overlap"] <= 1.0 and row["perf/wait_time"] >= 0.0 for row in rows)
    assert rows[0]["perf/overlap"] < 0.1, "nothing was trained beside the first"
    # The ratio is that to the weights that sampled, so it differs from 1 in the first step already.
    gaps = [row["train/train_rollout_logprob_abs_diff"] for row in rows]
    assert gaps[0] < 1e-4 < min(gaps[1:])
    # Validations see whole versions.
    assert versions_of(run.tables("eval_trajectories")) == {version: {version} for version in (0, 2, 4)}
    assert {name for name in log.submitted.values() if name != "MainThread"} == {"rollout_0"}


def test_the_next_rollout_runs_while_an_iteration_is_trained(
    setup: Setup, log: Log, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step, seen = TorchBackend.step, []

    def waiting(self: TorchBackend, *given: Any) -> Any:
        # The rollout of iteration k + 1 takes version k, and iteration k is trained now.
        number = len(seen)
        is_last = number == ITERATIONS - 1
        assert is_last or log.begun(number).wait(60), f"iteration {number + 1} is not rolled out meanwhile"
        seen.append(number)
        return step(self, *given)

    monkeypatch.setattr(TorchBackend, "step", waiting)
    list(LoopFolder(tmp_path).go_on(setup, options_of(setup, eval_interval=0)))
    assert seen == list(range(ITERATIONS))


@pytest.mark.parametrize("stopped", [1, ITERATIONS - 1])
def test_a_continued_run_rolls_out_with_the_same_weights_again(
    setup: Setup, log: Log, whole: tuple[LoopFolder, Log], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stopped: int
) -> None:
    """Bit for bit, although what was in flight is lost; weights come from the start or from a checkpoint."""
    run = LoopFolder(tmp_path)
    with monkeypatch.context() as patch:
        # The next rollout is over before the training that it runs beside begins; nothing of it is in the checkpoint.
        patch.setattr("geo_sokoban_pipeline.training.grpo_loop.ThreadPoolExecutor", AtOnce)
        running = run.go_on(setup, options_of(setup))
        for number in running:
            if number + 1 == stopped:
                running.close()
    log.weights.clear()
    list(run.go_on(setup, options_of(setup)))
    begun = stopped - 1  # the version that rolls out the next iteration
    assert log.weights[0] == (begun, str(run.checkpoint(begun - 1) if begun else setup.folder.path))
    run.assert_same(whole[0])
    assert run.metrics()[-1]["rollout/staleness"] == 1.0


def test_a_longer_run_is_the_shorter_one_gone_on_with(
    setup: Setup, log: Log, whole: tuple[LoopFolder, Log], tmp_path: Path
) -> None:
    run = LoopFolder(tmp_path)
    for iterations in (2, ITERATIONS):
        list(run.go_on(setup, options_of(setup, iterations=iterations)))
    run.assert_same(whole[0])


@pytest.mark.parametrize("where", ["update", "rollout"])
def test_an_error_on_either_side_ends_both(
    setup: Setup, log: Log, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    def fail(*_: Any) -> Any:
        raise DivergedError("no finite gradient") if where == "update" else RuntimeError("no response")

    before = set(threading.enumerate())
    running = LoopFolder(tmp_path).go_on(setup, options_of(setup))
    next(running)
    monkeypatch.setattr(*((TorchBackend, "step") if where == "update" else (ApartEngine, "poll")), fail)
    with pytest.raises(RuntimeError, match="no finite gradient" if where == "update" else "no response"):
        list(running)
    assert {thread for thread in threading.enumerate() if thread.is_alive()} <= before


def test_weights_of_a_folder_are_those_of_its_policy(setup: Setup) -> None:
    source = WeightSource.of_folder(setup.folder.path)
    policy = load_as(setup.options.policy, setup.folder.path)
    wanted = dict(WeightSource.of_model(policy.model).read())
    for dtype in ("float32", "bfloat16"):
        read = dict(source.cast(dict.fromkeys(wanted, dtype)).read())
        assert read.keys() == wanted.keys()
        assert all(weight.equal(wanted[name].to(weight.dtype)) for name, weight in read.items())
        assert {str(weight.dtype) for weight in read.values()} == {f"torch.{dtype}"}
    assert source.state() == source.state()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"rollout": {"engine": "transformers"}},
            "rollout.engine=transformers: the processes that train would roll out as well; give rollout.workers",
        ),
        ({"loop": {"save_interval": 2}}, "save_interval=2 and loop.keep_last=2: rollouts take their weights from"),
        ({"loop": {"keep_last": 1}}, "keep_last=1: rollouts take their weights from the newest two checkpoints"),
        ({"rollout": {"server": {"colocated": True}}}, "colocated=true: servers that take turns with the trainer"),
        ({"grpo": {"old_log_probs": "recompute"}}, "take old_log_probs=rollout, or importance=truncated"),
        (
            {"rollout": {"partial": True, "max_turns": 1, "over_sampling": 2.0}, "grpo": {"mixed_versions": "keep"}},
            "rollout.partial=true: aborted episodes",
        ),
    ],
)
def test_what_it_needs(setup: Setup, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"loop.max_staleness=1 with .*{message}"):
        changed(options_of(setup), changes)
    changed(options_of(setup), {"grpo": {"old_log_probs": "recompute", "importance": "truncated"}})
    changed(options_of(setup), {**changes, "loop": {**changes.get("loop", {}), "max_staleness": 0}})
