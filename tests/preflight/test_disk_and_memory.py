"""Disk and memory of a run: plans grow with what they should, and what does not fit is said."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from geo_sokoban_pipeline.formats import size
from geo_sokoban_pipeline.preflight.memory import (
    ASLEEP_BYTES,
    Gpu,
    MemoryPlace,
    RankPlan,
    StepLoad,
    check_memory,
    free_memory,
    group_limit,
    least_server_bytes,
    place_on_cpu,
    place_on_gpus,
    plan_caches,
    plan_rank,
    plan_worker,
)
from geo_sokoban_pipeline.preflight.model import ModelShape, inspect_model
from geo_sokoban_pipeline.preflight.own_code import EpisodeShape
from geo_sokoban_pipeline.preflight.resources import (
    DiskPlan,
    check_paths,
    check_space,
    check_writable,
    plan_disk,
)
from geo_sokoban_pipeline.preflight.stored import Stored
from geo_sokoban_pipeline.runs.storage import held_bytes, nearest_folder
from mounts import closable_folder, set_read_only, small_disk
from preflight.conftest import TINY, says
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
    # A finished run needs what its evaluation writes.
    stored = {"base_policy": True, "policy": True, "iterations": 140, "checkpoints": 4, "iteration_bytes": MB}
    found = plan(make_subject(), **stored)
    assert (found.checkpoints, found.policies, found.measured, found.certain) == (0, 0, 0, 0)
    assert found.trajectories > 0


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
    subject = make_subject(train_sokoban={"warm_start": {"steps": steps}})
    found = plan(subject, linked, **stored)
    assert plan(subject, linked, checkpoint_bytes=MB, **stored).first == found.policies + MB
    assert copies * 4 * MB <= found.policies < copies * 4 * MB + 9 * MB
    assert bool(found.policies) == bool(copies)


@pytest.mark.parametrize(
    ("free", "measured", "replaced", "state"),
    [
        (16 * MB, MB, 0, "ok"),
        (14 * MB, MB, 0, "failure"),
        (14 * MB, 0, 0, "warning"),  # computed trajectories are an upper bound
        (13 * MB, 0, 0, "failure"),
        # Until the first checkpoint, of 6 MB with the policies, both runs are there; all of it takes 15 MB, 14 surely.
        (5 * MB, 0, 90 * MB, "failure"),
        (6 * MB, 0, 7 * MB, "failure"),
        (6 * MB, 0, 8 * MB, "warning"),
        (6 * MB, 0, 9 * MB, "ok"),
    ],
)
def test_space(tmp_path: Path, free: int, measured: int, replaced: int, state: str) -> None:
    plan = DiskPlan(checkpoints=10 * MB, policies=4 * MB, trajectories=MB, measured=measured, first=6 * MB)
    says([check_space(plan, tmp_path, free, replaced)], state, "15.0 MB needed at most")


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
        says([check_space(DiskPlan(10 * MB, 0, 0), folder / "not" / "yet")], "failure", "4.0 MB free")


def test_folders_that_cannot_be_written(tmp_path: Path) -> None:
    says(check_writable([tmp_path / "a" / "b"]), "ok")
    assert not list(tmp_path.iterdir())
    with closable_folder(tmp_path / "closed", MB) as folder:
        set_read_only(folder, True)
        found = check_writable([folder / "06_models" / "run"])
    says(found, "failure", f"no file can be created in {tmp_path / 'closed'} (")
    assert nearest_folder(tmp_path / "closed" / "x" / "y") == tmp_path / "closed"
    says([check_paths(tmp_path / "run")], "ok")
    for long in (tmp_path.joinpath(*["x" * 200] * 20), tmp_path / ("x" * 256)):
        says([check_paths(long)], "failure")


def rank_of(options: Any, model: ModelShape, on_gpu: bool = False, **counts: int) -> RankPlan:
    """The plan of a rank, for episodes of 328 tokens."""
    caches = plan_caches(options, model, SHAPE, 328, **{"validation": 0, "evaluation": 0, **counts})
    return plan_rank(options, model, StepLoad.of(options, SHAPE, 328), caches, on_gpu=on_gpu)


@pytest.mark.parametrize(
    ("part", "changes", "factor"),
    [
        ("key-value cache", {"rollout": {"max_conversations": 128}}, 0.5),
        ("key-value cache", {"grpo": {"groups": 64}}, 2.0),
        ("key-value cache", {"processes": 2, "threads": 1}, 0.5),
        ("image features", {"grpo": {"groups_per_step": 10}}, 2.0),
        # A prompt's image is shared by its group, here of 8.
        ("image features", {"rollout": {"max_turns": 1}}, 5 / (5 + 40 * 10)),
        ("image features", {"grpo": {"group_size": 16}}, (5 + 80 * 10) / (5 + 40 * 10)),
        ("vision activations", {"grpo": {"groups_per_step": 10}}, 2.0),
        ("vision activations", {"processes": 2, "threads": 1}, (5 + 20 * 10) / (5 + 40 * 10)),
        ("weights", {"grpo": {"groups": 64}}, 1.0),
        ("activations of a micro-batch", {"warm_start": {"max_tokens": 16384}}, 2.0),
        ("activations of a micro-batch", {"warm_start": {"max_tokens": 16384, "steps": 0}}, 1.0),
        ("gradients", {"processes": 2, "threads": 1}, 1.0),
        ("gradients", {"processes": 4, "threads": 1, "sharding": "full"}, 0.25),
        ("optimizer moments", {"processes": 4, "threads": 1, "sharding": "hybrid", "replicas": 2}, 0.5),
        ("weights", {"processes": 4, "threads": 1, "sharding": "full"}, 0.25),
    ],
)
def test_parts_of_the_memory_grow_with_what_makes_them(
    make_subject: Any, model: ModelShape, part: str, changes: dict[str, Any], factor: float
) -> None:
    before = rank_of(make_subject(train_sokoban={"optimizer": {"logit_chunk": 1}}).options, model)
    changes = {"optimizer": {"logit_chunk": 1}, **changes}
    after = rank_of(make_subject(train_sokoban=changes).options, model)
    assert after.parts[part] / before.parts[part] == pytest.approx(factor, rel=1e-3)


@pytest.mark.parametrize(
    ("validation", "evaluation", "rows"), [(0, 0, 256), (160, 640, 512), (300, 0, 300), (160, 200, 400)]
)
def test_rows_of_the_largest_batch(
    make_subject: Any, model: ModelShape, validation: int, evaluation: int, rows: int
) -> None:
    options = make_subject(train_sokoban={"evaluation": {"samples": 2}}).options
    plan = rank_of(options, model, validation=validation, evaluation=evaluation)
    assert plan.parts["key-value cache"] == rows * 328 * 2 * 2 * 2 * 32 * 4


def test_exact_parts(make_subject: Any, model: ModelShape) -> None:
    plan = rank_of(make_subject(train_sokoban={"grpo": {"kl_coefficient": 0.1}}).options, model)
    weights = 4 * 482_432
    assert (plan.held["weights"], plan.held["gradients"]) == (weights, weights)
    assert (plan.held["optimizer moments"], plan.certain) == (2 * weights, 4 * weights)
    assert plan.phases["reference policy"]["reference policy"] == weights
    assert "weights of the engine" not in plan.parts
    assert (model.parameters, model.trained) == (482_432, 482_432)
    assert model.layers.parameters == 2 * model.layer.parameters
    # 256 conversations, 2 layers, keys and values, 2 heads of 32 numbers.
    assert plan.phases["rollout"]["key-value cache"] == 256 * 328 * 2 * 2 * 2 * 32 * 4
    # Servers hold the cache of keys and values, and images of their own.
    served = rank_of(make_subject(train_sokoban={"rollout": {"engine": "sglang"}, "processes": 1}).options, model)
    assert {"key-value cache", "image features of the engine"} <= set(plan.parts) - set(served.parts)
    assert served.parts["image features"] == plan.parts["image features"] > 0


def test_what_is_frozen_needs_weights_alone(make_subject: Any, model: ModelShape) -> None:
    options = make_subject(train_sokoban={"policy": {"freeze": ["visual"]}}).options
    policy = options.policy.model_copy(update={"source": "tiny", "tiny": TinyPolicyOptions.model_validate(TINY)})
    (_, frozen), whole = inspect_model(policy), model.parameters
    assert frozen is not None and 0 < frozen.trained < frozen.parameters == whole == model.trained
    plan = rank_of(options, frozen)
    assert (plan.held["weights"], plan.held["gradients"]) == (4 * whole, 4 * frozen.trained)
    assert plan.held["optimizer moments"] == 8 * frozen.trained and "vision tower" not in plan.phases
    with pytest.raises(ValueError, match="policy.freeze=tower: "):
        inspect_model(policy.model_copy(update={"freeze": ("tower",)}))


def test_products_in_bfloat16_take_copies_and_halve_the_reference(make_subject: Any, model: ModelShape) -> None:
    changes = {"policy": {"compute": "bfloat16"}, "grpo": {"kl_coefficient": 0.1}}
    kept, again = (
        rank_of(make_subject(train_sokoban={**changes, "optimizer": {"gradient_checkpointing": ck}}).options, model)
        for ck in (False, True)
    )
    text = model.config.text_config
    copies = "weights in the type of products"
    assert kept.phases["decoder layers"][copies] == 2 * (model.layers.parameters + model.vision.parameters)
    block = model.vision.parameters // model.config.vision_config.depth
    assert again.phases["decoder layers"][copies] == 2 * (model.layer.parameters + block)
    embedded = text.vocab_size * text.hidden_size
    assert kept.parts["reference policy"] == 2 * model.parameters + 2 * embedded
    assert kept.parts["weights"] == 4 * model.parameters


def test_ranks_that_share_weights_gather_them_and_their_engines_hold_copies(
    make_subject: Any, model: ModelShape
) -> None:
    changes = {"processes": 4, "threads": 1, "sharding": "full", "policy": {"compute": "bfloat16"}}
    plan = rank_of(make_subject(train_sokoban=changes).options, model)
    embedded = model.config.text_config.vocab_size * model.config.text_config.hidden_size
    assert plan.held["weights of the engine"] == 2 * model.parameters + 2 * embedded
    layers = plan.phases["decoder layers"]
    # Matrices of layers are gathered in the type of products, and so are their gradients made, then added in float32.
    assert layers["gathered weights"] == 4 * model.root.parameters + 2 * 2 * model.layer.parameters
    # Several micro-batches: the gradients of whole weights wait for the last one.
    several = {**changes, "optimizer": {"max_tokens": 400}, "warm_start": {"max_tokens": 400}}
    waiting = rank_of(make_subject(train_sokoban=several).options, model).phases["decoder layers"]
    language = model.layers.trained + model.root.trained
    assert waiting["gradients of whole weights"] == 4 * language + (2 + 4) * model.layer.trained
    assert layers["gradients of whole weights"] == 4 * embedded + (2 + 4) * model.layer.trained


def test_offloaded_weights_are_in_the_memory_of_the_cpu(make_subject: Any, model: ModelShape) -> None:
    options = make_subject(train_sokoban={"optimizer": {"offload": True}}).options
    plan = rank_of(options, model, on_gpu=True)
    assert not {"weights", "gradients", "optimizer moments"} & set(plan.held) and plan.certain == 0
    # Pinned blocks are rounded up.
    assert 4 * 482_432 < plan.host["weights"] == plan.host["gradients"] < 8 * 482_432
    assert plan.host["optimizer moments"] == 8 * 482_432
    assert plan.phases["decoder layers"]["gathered weights"] > 0
    on_cpu = rank_of(options, model)
    assert "gathered weights" not in on_cpu.phases["decoder layers"] and on_cpu.held["weights"] == 4 * 482_432


# Places: which ranks and servers lie in which memory.


RANK = RankPlan(
    {"weights": 30, "key-value cache": 40}, {"output head": {"logits of a micro-batch": 30}}, {"process": 5}
)


@pytest.mark.parametrize(
    ("changes", "users"),
    [
        ({}, [{"rank 0": 100, "server 0": 600}, {}, {}]),
        ({"first_gpu": 1, "count": 2}, [{"rank 0": 100}, {"server 0": 600}, {"server 1": 600}]),
        ({"first_gpu": 1, "tensor_parallel": 2}, [{"rank 0": 100}, {"server 0": 600}, {"server 0": 600}]),
        ({"device": "cpu"}, [{"rank 0": 100}, {}, {}]),
        ({"mode": "attach", "urls": ["http://a:1"]}, [{"rank 0": 100}, {}, {}]),
        (None, [{"rank 0": 100}, {"rank 1": 100}, {}]),
    ],
)
def test_servers_and_ranks_lie_where_they_are_launched(
    make_subject: Any, changes: dict[str, Any] | None, users: list[dict[str, int]]
) -> None:
    server = {"engine": "sglang", "server": {"memory_fraction": 0.6, **(changes or {})}}
    ranks = {"processes": 2, "threads": 1, "sharding": "full"}
    given = ranks if changes is None else {"rollout": server, "processes": 1}
    found = place_on_gpus(make_subject(train_sokoban=given).options, RANK, [Gpu(free=900, total=1000)] * 3)
    assert [place.users for place in found] == users
    assert [place.certain for place in found] == [30, 30 if changes is None else 0, 0]


def test_ranks_of_the_cpu_share_its_memory(make_subject: Any, model: ModelShape) -> None:
    options = make_subject(train_sokoban={"processes": 3, "threads": 1}).options
    on_cpu = RankPlan(RANK.held, RANK.phases)
    place = place_on_cpu(options, model, on_cpu, 1000, "memory")
    assert place.users == {"3 ranks": 300, "further processes": 1_200_000_000} and place.certain == 90
    # Beside GPUs the ranks have what is not on them.
    assert place_on_cpu(options, model, RANK, 1000, "memory").users == {"3 ranks": 15}
    servers = {"device": "cpu", "count": 2, "max_total_tokens": 100}
    options = make_subject(train_sokoban={"rollout": {"engine": "sglang", "server": servers}, "processes": 1}).options
    users = place_on_cpu(options, model, on_cpu, 1000, "memory").users
    assert users["2 servers"] == 2 * (4 * 482_432 + 100 * 2 * 2 * 2 * 32 * 4 + 600_000_000)


# Weights are needed for sure, the rest is an upper bound.
@pytest.mark.parametrize(("free", "state"), [(1000, "ok"), (100, "warning"), (31, "warning"), (29, "failure")])
def test_memory_that_is_there(free: int, state: str) -> None:
    *parts, rank, place = check_memory(RANK, [MemoryPlace("GPU 0", free, {"rank 0": 100}, 30)], 0.9)
    assert [check.name for check in parts] == ["weights", "key-value cache", "logits of a micro-batch"]
    assert rank.found == "at most 100 B, in the phase `output head`; 5 B in the CPU's memory"
    assert (place.name, place.state) == ("GPU 0", state)
    assert place.found == f"rank 0 100 B: at most 100 B of {size(free)} free"
    ways_out = {"ok": "", "warning": "rollout.max_conversations", "failure": "optimizer.offload=true"}
    assert ways_out[state] in place.way_out and bool(place.way_out) == (state != "ok")
    # A server on the trainer's GPU is the first to go.
    shared = MemoryPlace("GPU 0", 150, {"rank 0": 100, "server 0": 60}, 30)
    assert "rollout.server.first_gpu" in check_memory(RANK, [shared], 0.9)[-1].way_out


@pytest.mark.parametrize(
    ("of_rank", "of_server", "way_out"),
    [(100, ASLEEP_BYTES, "lower rollout.server.memory_fraction"), (ASLEEP_BYTES, 100, "lower optimizer.logit_chunk")],
)
def test_of_users_in_turns_the_larger_one_has_to_shrink(of_rank: int, of_server: int, way_out: str) -> None:
    rank = RankPlan({}, {"output head": {"logits of a micro-batch": of_rank}})
    place = MemoryPlace("GPU 0", ASLEEP_BYTES, {"rank 0": of_rank, "server 0": of_server}, 0, is_shared=True)
    assert check_memory(rank, [place], 0.9)[-1].way_out == way_out


def test_a_server_and_a_rank_that_take_turns_need_the_larger_part(make_subject: Any, model: ModelShape) -> None:
    server = {"memory_fraction": 0.6, "colocated": True}
    changes = {"rollout": {"engine": "sglang", "server": server}, "processes": 1, "policy": {"device": "cuda"}}
    options = make_subject(train_sokoban=changes).options
    place, *_ = place_on_gpus(options, RANK, [Gpu(free=900, total=1000)])
    # The one that waits keeps its context, a server its graphs too.
    assert (place.users, place.total) == ({"rank 0": 100, "server 0": 600}, 600 + ASLEEP_BYTES)
    assert check_memory(RANK, [place], 0.9)[-1].found.startswith("rank 0 100 B or server 0 600 B: at most 4.0 GB of")
    assert place_on_gpus(options, RANK, [Gpu(free=900, total=1000)] * 2)[1].total == 0
    # So does a rank of several its communicators.
    several = replace(RANK, held={**RANK.held, "communicators": 7})
    place, *_ = place_on_gpus(options, several, [Gpu(free=900, total=1000)])
    assert place.users == {"rank 0": 107, "server 0": 607}
    # A share that does not hold the server's weights is not enough.
    place, *_ = place_on_gpus(options, RANK, [Gpu(free=900, total=1000)], least=700)
    assert place.users["server 0"] == 700
    assert least_server_bytes(options, model, 100) == 4 * 482_432 + 100 * 2 * 2 * 2 * 32 * 4
    # Weights and moments wait in the memory of the CPU, and gradients are gone by then.
    hosts = []
    for colocated in (False, True):
        changes["rollout"]["server"] = {**server, "colocated": colocated}
        chosen = make_subject(train_sokoban=changes).options
        hosts.append(plan_rank(chosen, model, StepLoad(100, 1), on_gpu=True).host)
    assert hosts[1] == {**hosts[0], "weights": 4 * model.parameters, "optimizer moments": 8 * model.trained}


@pytest.mark.parametrize("engine", ["transformers", "sglang"])
def test_rollout_workers_have_the_engines_and_gpus_of_their_own(
    make_subject: Any, model: ModelShape, engine: str
) -> None:
    changes = {
        "rollout": {"engine": engine, "workers": 2},
        "processes": 1,
        "threads": 1,
        "optimizer": {"offload": True},
    }
    options = make_subject(train_sokoban=changes).options
    caches = plan_caches(options, model, SHAPE, 328, validation=0, evaluation=0)
    for on_gpu in (False, True):
        worker = plan_worker(options, model, caches, on_gpu=on_gpu)
        assert worker is not None
        found = worker.held | worker.host
        assert found.pop("process") == 600_000_000 and found.pop("image cache") == caches["image cache"]
        in_worker = {"key-value cache", "image features of the engine", "weights of the engine"}
        assert set(found) == (in_worker if engine == "transformers" else set())
        assert set(worker.held) == (set(found) if on_gpu else {*found, "process", "image cache"})
        on_cpu = place_on_cpu(options, model, RANK, 1000, "memory", worker if on_gpu else None)
        assert on_cpu.users.get("2 rollout workers") == (2 * sum(worker.host.values()) if on_gpu else None)
        if engine == "transformers":
            users = [place.users for place in place_on_gpus(options, RANK, [Gpu(900, 1000)] * 4, worker)]
            others = [{f"rollout worker {number}": worker.total} for number in range(2)]
            assert users == [{"rank 0": RANK.total}, *others, {}]
    assert "weights of the engine" not in plan_rank(options, model, StepLoad(100, 1), on_gpu=True).held
    assert plan_worker(make_subject().options, model, caches, on_gpu=False) is None


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
    free_here, where = free_memory()
    assert free_here > 1 << 20 and where in ("memory of the machine", "control group")


@pytest.mark.parametrize(
    ("retention", "share"),
    [
        ({}, 1.0),
        ({"episodes": 4}, (2 + 98 / 4) / 100),
        ({"episodes": 4, "newest": 50}, (51 + 49 / 4) / 100),
        ({"tokens": False}, None),
        ({"images": "run"}, 1.0),  # how often images repeat is not known before
    ],
)
def test_retention_lowers_the_plan(make_subject: Any, retention: dict[str, Any], share: float | None) -> None:
    def trajectories(**kept: Any) -> int:
        loop = {"iterations": 100, "eval_interval": 0, "keep_best": False, "retention": kept}
        subject = make_subject(train_sokoban={"loop": loop, "evaluation": {"greedy": False, "samples": 1}})
        return plan_disk(subject.options, MB, SHAPE, validation=0, evaluation=0, stored=Stored()).trajectories

    less = trajectories(**retention) / trajectories()
    assert 0.1 < less < 0.95 if share is None else less == pytest.approx(share, rel=0.001)
