"""Disk and memory of a run: plans grow with what they should, and what does not fit is said."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from geo_sokoban_pipeline.preflight.model import ModelShape, inspect_model
from geo_sokoban_pipeline.preflight.own_code import EpisodeShape
from geo_sokoban_pipeline.preflight.resources import (
    DiskPlan,
    check_memory,
    check_paths,
    check_space,
    check_writable,
    free_memory,
    group_limit,
    held_bytes,
    plan_disk,
    plan_memory,
    size,
)
from geo_sokoban_pipeline.preflight.stored import Stored
from geo_sokoban_pipeline.runs.storage import nearest_folder
from mounts import closable_folder, set_read_only, small_disk
from preflight.conftest import TINY
from task_options import TinyPolicyOptions

SHAPE = EpisodeShape(prompt=28, observation=22, response=6, patches=36, image_tokens=9, image_bytes=400)
MB = 1_000_000


def plan(subject: Any, linked: bool = False, **stored: Any) -> DiskPlan:
    return plan_disk(
        subject.options, 4 * MB, SHAPE, validation=160, evaluation=640, stored=Stored(**stored), linked=linked
    )


@pytest.mark.parametrize(
    ("loop", "stored", "kept"),
    [
        ({"keep_last": 3, "keep_best": True}, {}, 5),  # the best one may be older, one more lies there while written
        ({"keep_last": 3, "keep_best": False}, {}, 4),
        ({"keep_last": None, "iterations": 20}, {}, 20),
        ({"keep_last": None, "iterations": 20, "save_interval": 7}, {}, 3),
        ({"keep_last": 9, "iterations": 2}, {}, 2),
        ({"keep_last": 3, "keep_best": True}, {"iterations": 9, "checkpoints": 3}, 2),
        ({"keep_last": 3, "keep_best": False}, {"iterations": 9, "checkpoints": 7}, 1),
        ({"keep_last": None, "iterations": 20}, {"iterations": 5, "checkpoints": 5}, 15),
        ({"keep_last": 3, "iterations": 20}, {"iterations": 20, "checkpoints": 4}, 0),
    ],
)
def test_checkpoints_to_be_written(make_subject: Any, loop: dict[str, Any], stored: dict[str, Any], kept: int) -> None:
    found = plan(make_subject(train_sokoban={"loop": loop}), checkpoint_bytes=MB, **stored)
    assert found.checkpoints == kept * MB


def test_measured_sizes_and_done_iterations_count(make_subject: Any) -> None:
    subject = make_subject(train_sokoban={"loop": {"eval_interval": 0}})
    whole, half = (plan(subject, iteration_bytes=MB, iterations=done) for done in (0, 70))
    assert whole.trajectories - half.trajectories == 70 * MB
    assert (whole.measured, plan(subject).measured) == (140 * MB, 0)
    computed = plan(subject).checkpoints / plan(subject, checkpoint_bytes=MB).checkpoints
    assert computed * MB > 3 * 4 * MB  # weights and two moments


@pytest.mark.parametrize(
    ("steps", "linked", "stored", "copies"),
    [
        (1000, False, {}, 4),  # the starting one, and the warm start's with two moments
        (1000, True, {}, 3),
        (1000, False, {"base_policy": True}, 3),
        (1000, False, {"base_policy": True, "policy": True}, 0),
        (0, False, {}, 1),
    ],
)
def test_policies_to_be_written(
    make_subject: Any, steps: int, linked: bool, stored: dict[str, Any], copies: int
) -> None:
    found = plan(make_subject(train_sokoban={"warm_start": {"steps": steps}}), linked, **stored)
    assert copies * 4 * MB <= found.policies < copies * 4 * MB + 9 * MB
    assert bool(found.policies) == bool(copies)


def test_a_finished_run_needs_what_its_evaluation_writes(make_subject: Any) -> None:
    stored = {"base_policy": True, "policy": True, "iterations": 140, "checkpoints": 4, "iteration_bytes": MB}
    found = plan(make_subject(), **stored)
    assert (found.checkpoints, found.policies, found.measured, found.certain) == (0, 0, 0, 0)
    assert found.trajectories > 0


@pytest.mark.parametrize(
    ("free", "measured", "state"),
    [
        (16 * MB, MB, "ok"),
        (14 * MB, MB, "failure"),
        (14 * MB, 0, "warning"),  # computed trajectories are an upper bound
        (13 * MB, 0, "failure"),
    ],
)
def test_space(tmp_path: Path, free: int, measured: int, state: str) -> None:
    plan = DiskPlan(checkpoints=10 * MB, policies=4 * MB, trajectories=MB, measured=measured)
    check = check_space(plan, tmp_path, free)
    assert check.state == state
    assert "15.0 MB needed at most" in check.found


def test_what_clearing_frees(tmp_path: Path) -> None:
    models, outputs, elsewhere = (tmp_path / name for name in ("models", "outputs", "elsewhere"))
    for folder in (models, outputs, elsewhere):
        folder.mkdir()
    (models / "own").write_bytes(bytes(100))
    os.link(models / "own", outputs / "shared_within")
    (models / "link").symlink_to(models / "own")
    (elsewhere / "original").write_bytes(bytes(1000))
    os.link(elsewhere / "original", models / "shared_without")
    assert held_bytes([models, outputs, tmp_path / "not_yet"]) == 100


def test_space_of_a_real_small_disk(tmp_path: Path) -> None:
    with small_disk(tmp_path / "small", 4 * MB) as folder:
        check = check_space(DiskPlan(10 * MB, 0, 0), folder / "not" / "yet")
    assert (check.state, "4.0 MB free" in check.found) == ("failure", True)


def test_folders_that_cannot_be_written(tmp_path: Path) -> None:
    assert check_writable([tmp_path / "a" / "b"])[0].state == "ok"
    assert not list(tmp_path.iterdir())
    with closable_folder(tmp_path / "closed", MB) as folder:
        set_read_only(folder, True)
        (check,) = check_writable([folder / "06_models" / "run"])
    assert check.state == "failure"
    assert f"no file can be created in {tmp_path / 'closed'} (" in check.found
    assert nearest_folder(tmp_path / "closed" / "x" / "y") == tmp_path / "closed"


def test_paths(tmp_path: Path) -> None:
    assert check_paths(tmp_path / "run").state == "ok"
    long = tmp_path.joinpath(*["x" * 200] * 20)
    assert check_paths(long).state == "failure"
    assert check_paths(tmp_path / ("x" * 256)).state == "failure"


@pytest.mark.parametrize(("count", "text"), [(0, "0 B"), (999, "999 B"), (1500, "1.5 kB"), (2.5e9, "2.5 GB")])
def test_size(count: float, text: str) -> None:
    assert size(count) == text


@pytest.mark.parametrize(
    ("part", "changes", "factor"),
    [
        ("key-value cache", {"rollout": {"max_conversations": 128}}, 0.5),
        ("key-value cache", {"grpo": {"groups": 64}}, 2.0),
        ("image features", {"grpo": {"group_size": 16}}, 2.0),
        ("vision activations", {"grpo": {"groups_per_step": 10}}, 2.0),
        ("weights", {"grpo": {"groups": 64}}, 1.0),
        ("activations of a micro-batch", {"warm_start": {"max_tokens": 16384}}, 2.0),
        ("activations of a micro-batch", {"warm_start": {"max_tokens": 16384, "steps": 0}}, 1.0),
        # Two processes: their own, and the sum.
        ("gradients", {"processes": 2, "threads": 1}, 2.0),
        ("gradients", {"processes": 4, "threads": 1, "sharding": "full"}, 0.25),
        ("optimizer moments", {"processes": 4, "threads": 1, "sharding": "hybrid", "replicas": 2}, 0.5),
        # An engine's, and the shard.
        ("weights", {"processes": 4, "threads": 1, "sharding": "full"}, 1.25),
    ],
)
def test_parts_of_the_memory_grow_with_what_makes_them(
    make_subject: Any, model: ModelShape, part: str, changes: dict[str, Any], factor: float
) -> None:
    before = plan_memory(make_subject(train_sokoban={"optimizer": {"logit_chunk": 1}}).options, model, SHAPE, 328)
    changes = {"optimizer": {"logit_chunk": 1}, **changes}
    after = plan_memory(make_subject(train_sokoban=changes).options, model, SHAPE, 328)
    assert after[part] / before[part] == pytest.approx(factor, rel=1e-3)


@pytest.mark.parametrize(
    ("validation", "evaluation", "rows"), [(0, 0, 256), (160, 640, 512), (300, 0, 300), (160, 200, 400)]
)
def test_rows_of_the_largest_batch(
    make_subject: Any, model: ModelShape, validation: int, evaluation: int, rows: int
) -> None:
    options = make_subject(train_sokoban={"evaluation": {"samples": 2}}).options
    plan = plan_memory(options, model, SHAPE, 328, validation=validation, evaluation=evaluation)
    assert plan["key-value cache"] == rows * 328 * 2 * 2 * 2 * 32 * 4


def test_exact_parts(make_subject: Any, model: ModelShape) -> None:
    plan = plan_memory(make_subject(train_sokoban={"grpo": {"kl_coefficient": 0.1}}).options, model, SHAPE, 328)
    weights = 4 * 482_432
    assert (plan["weights"], plan["gradients"], plan["optimizer moments"]) == (weights, weights, 2 * weights)
    assert plan["reference policy"] == weights
    assert "further processes" not in plan
    # 256 conversations, 2 layers, keys and values, 2 heads of 32 numbers.
    assert plan["key-value cache"] == 256 * 328 * 2 * 2 * 2 * 32 * 4


def test_what_is_frozen_needs_weights_alone(make_subject: Any, model: ModelShape) -> None:
    options = make_subject(train_sokoban={"policy": {"freeze": ["visual"]}}).options
    policy = options.policy.model_copy(update={"source": "tiny", "tiny": TinyPolicyOptions.model_validate(TINY)})
    (_, frozen), whole = inspect_model(policy), model.parameters
    assert frozen is not None and 0 < frozen.trained < frozen.parameters == whole == model.trained
    plan = plan_memory(options, frozen, SHAPE, 328)
    assert (plan["weights"], plan["gradients"]) == (4 * whole, 4 * frozen.trained)
    assert (plan["optimizer moments"], plan["vision activations"]) == (8 * frozen.trained, 0)
    with pytest.raises(ValueError, match="policy.freeze=tower: "):
        inspect_model(policy.model_copy(update={"freeze": ("tower",)}))


def test_products_in_bfloat16_take_a_copy_and_halve_the_reference(make_subject: Any, model: ModelShape) -> None:
    changes = {"policy": {"compute": "bfloat16"}, "grpo": {"kl_coefficient": 0.1}}
    plan = plan_memory(make_subject(train_sokoban=changes).options, model, SHAPE, 328)
    text = model.config.text_config
    assert plan["weights in the type of products"] == 2 * model.parameters
    assert plan["reference policy"] == 2 * model.parameters + 2 * text.vocab_size * text.hidden_size
    assert plan["weights"] == 4 * model.parameters


def test_offloaded_state_is_not_on_the_gpu(make_subject: Any, model: ModelShape) -> None:
    options = make_subject(train_sokoban={"optimizer": {"offload": True}, "processes": 1}).options
    plan = plan_memory(options, model, SHAPE, 328, on_gpu=True)
    assert (plan["weights"], plan["gradients"], plan["optimizer moments"]) == (4 * model.parameters, 0, 0)
    tables = model.config.text_config.vocab_size * model.config.text_config.hidden_size
    assert plan["largest unit"] == 4 * 2 * tables * (1 if model.config.tie_word_embeddings else 2)
    on_cpu = plan_memory(options, model, SHAPE, 328)
    assert on_cpu["optimizer moments"] == 8 * model.parameters and "largest unit" not in on_cpu


def test_servers_hold_the_cache_of_keys_and_values(make_subject: Any, model: ModelShape) -> None:
    changes = {"rollout": {"engine": "sglang"}, "processes": 1}
    plan = plan_memory(make_subject(train_sokoban=changes).options, model, SHAPE, 328)
    own = plan_memory(make_subject(train_sokoban={"processes": 1}).options, model, SHAPE, 328)
    assert plan["key-value cache"] == 0 < own["key-value cache"]
    assert 0 < plan["image features"] < own["image features"]


# Weights are needed for sure, the rest is an upper bound.
@pytest.mark.parametrize(("free", "state"), [(1000, "ok"), (100, "warning"), (31, "warning"), (29, "failure")])
def test_memory_that_is_there(free: int, state: str) -> None:
    *parts, whole = check_memory({"weights": 30, "key-value cache": 70}, free, 0.9, "memory")
    assert [check.name for check in parts] == ["weights", "key-value cache"]
    assert whole.state == state
    ways_out = {"ok": "", "warning": "rollout.max_conversations", "failure": "a smaller model"}
    assert ways_out[state] in whole.way_out and bool(whole.way_out) == (state != "ok")


def test_free_memory_is_that_of_this_machine() -> None:
    free, where = free_memory()
    assert free > 1 << 20
    assert where in ("memory of the machine", "control group")


@pytest.mark.parametrize(
    ("most", "statistics", "free"),
    [("1000", "anon 500\ninactive_file 300", 500), ("1000", "anon 800", 200), ("max", "anon 1", None)],
)
def test_pages_of_files_are_free_for_whoever_needs_them(
    tmp_path: Path, most: str, statistics: str, free: int | None
) -> None:
    for name, text in (("memory.max", most), ("memory.current", "800"), ("memory.stat", statistics)):
        (tmp_path / name).write_text(f"{text}\n")
    assert group_limit(tmp_path) == free
    assert group_limit(tmp_path / "no_group") is None
