"""Disk and memory of a run: plans grow with what they should, and what does not fit is said."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from geo_sokoban_pipeline.preflight.disk import DiskPlan, check_paths, check_space, check_writable, plan_disk, size
from geo_sokoban_pipeline.preflight.episode import EpisodeShape
from geo_sokoban_pipeline.preflight.memory import check_memory, free_memory, plan_memory
from geo_sokoban_pipeline.preflight.model import ModelShape, inspect_model
from geo_sokoban_pipeline.storage import nearest_folder
from mounts import set_read_only, small_disk

SHAPE = EpisodeShape(prompt=28, observation=22, reply=6, patches=36, picture_tokens=9, picture_bytes=400)
MB = 1_000_000


def plan(subject: Any, **given: Any) -> DiskPlan:
    return plan_disk(subject.options, 4 * MB, SHAPE, validation=160, evaluation=640, **given)


@pytest.mark.parametrize(
    ("loop", "kept"),
    [
        ({"keep_last": 3, "keep_best": True}, 5),  # the best one may be older, one more lies there while it is written
        ({"keep_last": 3, "keep_best": False}, 4),
        ({"keep_last": None, "iterations": 20}, 20),
        ({"keep_last": None, "iterations": 20, "save_interval": 7}, 3),
        ({"keep_last": 9, "iterations": 2}, 2),
    ],
)
def test_checkpoints_that_are_kept(make_subject: Any, loop: dict[str, Any], kept: int) -> None:
    assert plan(make_subject(train_sokoban={"loop": loop}), checkpoint_bytes=MB).checkpoints == kept * MB


def test_measured_sizes_and_done_iterations_count(make_subject: Any) -> None:
    subject = make_subject(train_sokoban={"loop": {"eval_interval": 0}})
    whole, half = (plan(subject, iteration_bytes=MB, done=done).trajectories for done in (0, 70))
    assert whole - half == 70 * MB
    computed = plan(subject).checkpoints / plan(subject, checkpoint_bytes=MB).checkpoints
    assert computed * MB > 3 * 4 * MB  # weights and two moments


@pytest.mark.parametrize(
    ("free", "measured", "state"),
    [
        (16 * MB, True, "ok"),
        (14 * MB, True, "failure"),
        (14 * MB, False, "warning"),  # computed trajectories are an upper bound
        (13 * MB, False, "failure"),
    ],
)
def test_space(tmp_path: Path, free: int, measured: bool, state: str) -> None:
    plan = DiskPlan(checkpoints=10 * MB, policies=4 * MB, trajectories=MB, measured=measured)
    check = check_space(plan, tmp_path, free)
    assert check.state == state
    assert "15.0 MB needed at most" in check.found


def test_space_of_a_real_small_disk(tmp_path: Path) -> None:
    with small_disk(tmp_path / "small", 4 * MB) as folder:
        check = check_space(DiskPlan(10 * MB, 0, 0), folder / "not" / "yet")
    assert (check.state, "4.0 MB free" in check.found) == ("failure", True)


def test_folders_that_cannot_be_written(tmp_path: Path) -> None:
    assert check_writable([tmp_path / "a" / "b"])[0].state == "ok"
    assert not list(tmp_path.iterdir())
    with small_disk(tmp_path / "closed", MB) as folder:
        set_read_only(folder, True)
        (check,) = check_writable([folder / "06_models" / "run"])
    assert check.state == "failure"
    assert "Read-only file system" in check.found
    assert nearest_folder(tmp_path / "closed" / "x" / "y") == tmp_path / "closed"


def test_paths(tmp_path: Path) -> None:
    assert check_paths(tmp_path / "run").state == "ok"
    long = tmp_path.joinpath(*["x" * 200] * 20)
    assert check_paths(long).state == "failure"
    assert check_paths(tmp_path / ("x" * 256)).state == "failure"


@pytest.mark.parametrize(("count", "text"), [(0, "0 B"), (999, "999 B"), (1500, "1.5 kB"), (2.5e9, "2.5 GB")])
def test_size(count: float, text: str) -> None:
    assert size(count) == text


@pytest.fixture(scope="module")
def model() -> ModelShape:
    from geo_sokoban_pipeline.options.policy import PolicyOptions

    shape = inspect_model(PolicyOptions())[1]
    assert shape is not None
    return shape


@pytest.mark.parametrize(
    ("part", "changes", "factor"),
    [
        ("key-value cache", {"rollout": {"max_conversations": 128}}, 0.5),
        ("key-value cache", {"grpo": {"groups": 64}}, 2.0),
        ("picture features", {"grpo": {"group_size": 16}}, 2.0),
        ("vision activations of a step", {"grpo": {"groups_per_step": 10}}, 2.0),
        ("weights", {"grpo": {"groups": 64}}, 1.0),
    ],
)
def test_parts_of_the_memory_grow_with_what_makes_them(
    make_subject: Any, model: ModelShape, part: str, changes: dict[str, Any], factor: float
) -> None:
    before = plan_memory(make_subject().options, model, SHAPE, 328)
    after = plan_memory(make_subject(train_sokoban=changes).options, model, SHAPE, 328)
    assert after[part] / before[part] == pytest.approx(factor)


def test_exact_parts(make_subject: Any, model: ModelShape) -> None:
    plan = plan_memory(make_subject(train_sokoban={"grpo": {"kl_coefficient": 0.1}}).options, model, SHAPE, 328)
    weights = 4 * 482_432
    assert (plan["weights"], plan["gradients"], plan["optimizer moments"]) == (weights, weights, 2 * weights)
    assert plan["reference policy"] == weights
    # 256 conversations, 2 layers, keys and values, 2 heads of 32 numbers.
    assert plan["key-value cache"] == 256 * 328 * 2 * 2 * 2 * 32 * 4


@pytest.mark.parametrize(("free", "state"), [(1000, "ok"), (100, "warning"), (40, "failure")])
def test_memory_that_is_there(free: int, state: str) -> None:
    *parts, whole = check_memory({"weights": 30, "key-value cache": 70}, free, 0.9, "memory")
    assert [check.name for check in parts] == ["weights", "key-value cache"]
    assert whole.state == state
    assert ("rollout.max_conversations" in whole.way_out) == (state != "ok")


def test_free_memory_is_that_of_this_machine() -> None:
    free, where = free_memory()
    assert free > 1 << 20
    assert where in ("memory of the machine", "control group")
