"""Seconds of a run by count: tables by hand, measured updates, earlier predictions, and what may never be cheaper."""

from __future__ import annotations

import typing
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import settings as bounded
from hypothesis import strategies as st

from geo_sokoban_pipeline.config.study import EstimatePipelineOptions
from geo_sokoban_pipeline.preflight.estimate import (
    DECODE_SHARE,
    GPUS,
    PRODUCTS_SHARE,
    Estimate,
    EstimateError,
    GpuKind,
    Load,
    decode_step,
    describe_run,
    forward_flops,
    layer_weights,
    rows_of,
)
from geo_sokoban_pipeline.preflight.memory import cache_bytes
from geo_sokoban_pipeline.preflight.model import ModelShape
from geo_sokoban_pipeline.preflight.published_sizes import PUBLISHED, published_config, published_name
from option_fields import with_another_value, with_value
from task_options import TrainOptions

TEXT = SimpleNamespace(
    hidden_size=8, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, head_dim=4, intermediate_size=16,
    vocab_size=100,
)  # fmt: skip
VISION = SimpleNamespace(
    hidden_size=4, depth=1, intermediate_size=8, spatial_merge_size=2, deepstack_visual_indexes=[0]
)
SMALL = SimpleNamespace(text_config=TEXT, vision_config=VISION)
MIXTURE = SimpleNamespace(
    text_config=SimpleNamespace(**vars(TEXT), num_experts=8, num_experts_per_tok=2, moe_intermediate_size=4),
    vision_config=VISION,
)


@pytest.mark.parametrize(
    ("config", "load", "expected"),
    [
        # A layer has 2·8·4·(2 + 1) + 3·8·16 = 576 weights: 2·576·2 a token. Attention: 4·(10·5)·(2·4·2).
        (SMALL, Load([(10, 0)]), 23_040 + 3_200),
        (SMALL, Load([(10, 0)], scored=5), 23_040 + 3_200 + 2 * 5 * 100 * 8),
        (SMALL, Load([(1, 9)]), 2_304 + 4 * 9.5 * 16),
        # A patch: a block of 4·4·4 + 2·4·8 = 128 weights, and a quarter of two mergers of 16·(16 + 8).
        (SMALL, Load(patches=16, images=3), 3 * 16 * (2 * (128 + 2 * 384 / 4) + 4 * 16 * 4)),
        # Two of eight experts: 192 + 8·8 + 2·3·8·4 = 448 weights.
        (MIXTURE, Load([(10, 0)]), 2 * 448 * 2 * 10 + 3_200),
    ],
)
def test_operations_by_hand(config: Any, load: Load, expected: float) -> None:
    assert forward_flops(config, load) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("products", "gpus", "expected"),
    [
        # Memory: (1,152 + 800) weights of 2 B, and 4 rows of 50 tokens of 2·2·4·2 = 32 B.
        (1e9, 1, (1_952 * 2 + 4 * 50 * 32) / (1e6 * DECODE_SHARE)),
        (1e9, 2, (1_952 * 2 + 4 * 50 * 32) / (1e6 * DECODE_SHARE) / 2),
        # Products: 4 tokens of 2·1,152, attention 4·50.5·16, head 2·800.
        (1e6, 1, 4 * (2_304 + 3_232 + 1_600) / (1e6 * PRODUCTS_SHARE)),
    ],
)
def test_a_decoded_token_takes_the_longer_of_reading_and_multiplying(
    products: float, gpus: int, expected: float
) -> None:
    gpu = GpuKind(memory=1, products=products, float32=1, bandwidth=1e6, link=1)
    assert decode_step(SMALL, 4, 50, gpu, gpus) == pytest.approx(expected)


def test_tokens_of_a_batch_read_the_experts_that_one_of_them_chooses() -> None:
    gpu = GpuKind(memory=1, products=1e15, float32=1, bandwidth=1e6, link=1)
    # One token reads 2 of 8 experts, two tokens 8·(1 − (6/8)²) = 3.5 on average.
    for rows, experts in ((1, 2.0), (2, 3.5)):
        weights = 2 * (192 + 64 + experts * 96) + 800
        expected = (2 * weights + rows * 10 * 32) / (1e6 * DECODE_SHARE)
        assert decode_step(MIXTURE, rows, 10, gpu, 1) == pytest.approx(expected)
    assert layer_weights(MIXTURE.text_config, 8) == 192 + 64 + 8 * 96


def test_a_cache_has_keys_and_values_of_each_layer() -> None:
    assert cache_bytes(published_config("8B").text_config, 2) == 36 * 2 * 8 * 128 * 2


SERVED: dict[str, Any] = {"engine": "sglang", "server": {"device": "cuda", "dtype": "bfloat16"}}
# As conf/qwen3vl has it, with limits that no episode here reaches.
FULL: dict[str, Any] = {
    "policy": {"source": "hub", "path": "Qwen/Qwen3-VL-2B-Instruct", "compute": "bfloat16", "device": "auto"},
    "warm_start": {"steps": 0},
    "rollout": {**SERVED, "max_turns": 100, "max_tokens_per_turn": None, "max_response_tokens": 10**6},
    "grpo": {"groups": 64, "group_size": 8, "groups_per_step": None, "old_log_probs": "recompute"},
    "optimizer": {
        "max_tokens": 8192, "logit_chunk": 2048, "vision_patches": 8192, "gradient_checkpointing": True,
    },
    "loop": {"iterations": 100, "save_interval": 20, "eval_interval": 0},
    "threads": 4,
}  # fmt: skip


def train(**changes: Any) -> Any:
    return with_value(
        TrainOptions.model_validate(FULL), {name.replace("__", "."): one for name, one in changes.items()}
    )


def settings(**values: Any) -> EstimatePipelineOptions:
    return EstimatePipelineOptions.model_validate({"prompt": 600, "turns": 3, "response": 1500, **values})


MODELS: dict[tuple[str, bool], ModelShape] = {}


def estimate(options: Any, chosen: EstimatePipelineOptions, name: str = "8B") -> Estimate:
    """A run of a published model; shapes are made once."""
    key = name, options.policy.adapter is not None
    if key not in MODELS:
        MODELS[key] = ModelShape.of(options.policy, published_config(name))
    return Estimate.of(options, chosen, MODELS[key])


@pytest.mark.parametrize(
    ("changes", "measured", "within"),
    [
        ({}, 1.73, 0.05),
        ({"optimizer__gradient_checkpointing": False}, 1.37, 0.1),
        # Copies of gradients to pageable memory: three of four micro-batches.
        ({"optimizer__offload": True, "optimizer__gradient_sync": "micro_batch"}, 19.9, 0.1),
    ],
)
def test_updates_that_were_measured(changes: dict[str, Any], measured: float, within: float) -> None:
    """docs/gpu.md: 8 sequences of 4,096 tokens with an image each, the second half trained; 2B on an H200."""
    options = train(grpo__groups=8, grpo__group_size=1, **changes)
    chosen = settings(prompt=2048, turns=1, response=2048, gpu="H200")
    assert estimate(options, chosen, "2B").seconds["training step"] == pytest.approx(measured, rel=within)


EIGHT: dict[str, Any] = {"processes": 8, "sharding": "full", "optimizer__gradient_sync": "micro_batch"}
BUCKETS = {"rollout__server__bucket_bytes": 1 << 29}  # as the presets have it
SERVERS = {"rollout__server__count": 8, "rollout__server__colocated": True, "rollout__server__memory_fraction": 0.8}


@pytest.mark.parametrize(
    ("changes", "phases", "low", "high", "factor"),
    [
        (SERVERS, ("rollout: prefill", "rollout: decode"), 55, 70, 1.3),
        # The engine was since measured at 49 ms for a token of 28 layers; 30 ms were taken for 36.
        ({"rollout__engine": "transformers"}, ("rollout: decode",), 135, 135, 2.2),
        (SERVERS, ("scoring: old log-probs", "training step"), 80, 100, 1.3),
        ({**SERVERS, "rollout__server__update": "tensors"}, ("weights to the engines",), 200, 350, 1),
        # By handles of the GPU's memory; in Ray as on one machine.
        ({**SERVERS, **BUCKETS}, ("weights to the engines",), 3, 10, 1),
        ({**SERVERS, **BUCKETS, "placement": "ray"}, ("weights to the engines",), 3, 10, 1),
        # Pinned; one GPU was since measured at 50 GB/s.
        (SERVERS, ("state off and onto the GPU",), 2, 5, 4),
        (SERVERS, ("checkpoint",), 1, 2, 1),  # every 20; by all ranks in place, as peers write it, in 20 to 40 s
    ],
)
def test_predictions_of_an_earlier_review(
    changes: dict[str, Any], phases: tuple[str, ...], low: float, high: float, factor: float
) -> None:
    """Eight H100, 8B, 64 × 8 episodes of three turns of 1,500 tokens: estimated by hand, before this module."""
    found = estimate(train(**EIGHT, **changes), settings(observation=100, patches=0)).seconds
    assert low / factor <= sum(found[phase] for phase in phases) <= high * factor


LENGTHS = st.fixed_dictionaries({
    "prompt": st.integers(1, 2000), "observation": st.integers(0, 500), "response": st.integers(1, 2000),
    "turns": st.integers(1, 5), "patches": st.sampled_from([0, 576, 1248]),
})  # fmt: skip
KINDS, LAYOUTS = (
    st.sampled_from(list(GPUS)),
    st.sampled_from([("none", "step"), ("full", "step"), ("full", "micro_batch")]),
)


@cache
def spread(ranks: int, servers: int, layout: tuple[str, str]) -> Any:
    sharding, sync = layout
    layout_of_ranks = {"processes": ranks, "sharding": sharding, "optimizer__gradient_sync": sync}
    return train(**layout_of_ranks, rollout__server__count=servers, rollout__server__first_gpu=ranks)


@bounded(max_examples=60, deadline=None)  # the first example makes shapes
@given(
    lengths=LENGTHS, kind=KINDS, ranks=st.sampled_from([1, 2, 4]), servers=st.sampled_from([1, 2, 4]), layout=LAYOUTS
)
def test_twice_the_gpus_are_never_slower(
    lengths: dict[str, int], kind: str, ranks: int, servers: int, layout: tuple[str, str]
) -> None:
    """Of one node, where each rank has several micro-batches; weights are sent once for each server."""
    chosen = settings(**{**lengths, "response": 512 + lengths["response"]}, gpu=kind)
    few, many = (estimate(spread(times * ranks, times * servers, layout), chosen).seconds for times in (1, 2))
    assert few.keys() == many.keys()
    assert all(many[name] <= few[name] * 1.001 for name in few if name.startswith(("rollout", "scoring")))
    # The sum of gradients over the ranks is not divided among them.
    slack = 2 * 4 * 8.77e9 / GPUS[kind].link
    assert many["training step"] <= few["training step"] + slack


@bounded(max_examples=60, deadline=None)  # the first example makes shapes
@given(
    lengths=LENGTHS, name=st.sampled_from(["prompt", "observation", "response", "turns"]), kind=KINDS,
    engine=st.sampled_from(["sglang", "transformers"]),
)  # fmt: skip
def test_more_tokens_are_never_cheaper(lengths: dict[str, int], name: str, kind: str, engine: str) -> None:
    options = train(rollout__engine=engine)
    few, many = (estimate(options, settings(**{**lengths, name: times * lengths[name]}, gpu=kind)) for times in (1, 2))
    assert few.iteration <= many.iteration and few.hours <= many.hours


@bounded(max_examples=60, deadline=None)  # the first example makes shapes
@given(lengths=LENGTHS, kind=KINDS)
def test_a_larger_model_is_never_cheaper(lengths: dict[str, int], kind: str) -> None:
    options, chosen = train(), settings(**lengths, gpu=kind)
    found = [estimate(options, chosen, name) for name in ("2B", "4B", "8B", "32B")]
    for smaller, larger in zip(found, found[1:], strict=False):
        assert all(smaller.seconds[name] <= larger.seconds[name] for name in smaller.seconds)


def test_an_adapter_trains_faster_and_fits_where_all_weights_do_not() -> None:
    server = {"rollout__server__memory_fraction": 0.35, "rollout__server__count": 1}
    chosen = settings(gpu="RTX 4090", model="2B", images=1)
    server |= {"rollout__max_turns": 3, "rollout__max_response_tokens": 4700}
    whole, adapted = (
        describe_run("train", train(policy__adapter=adapter, **server), chosen) for adapter in (None, {"rank": 16})
    )
    assert adapted["verdict"].startswith("fits: GPU 0 takes")
    lacking = whole["memory"]["GPU 0"]["total"] - 0.9 * 24e9
    assert whole["verdict"].startswith(f"does not fit, by {lacking / 1e9:.1f} GB: GPU 0 takes")
    # No products for gradients of frozen weights, no moments.
    assert adapted["seconds"]["training step"] < 0.9 * whole["seconds"]["training step"]
    assert adapted["seconds"]["checkpoint"] < 0.03 * whole["seconds"]["checkpoint"]


@pytest.mark.parametrize(("ranks", "of_node"), [(1, 1), (8, 8), (16, 8)])
def test_the_verdict_has_the_memory_of_the_cpu(ranks: int, of_node: int) -> None:
    layout = {"processes": ranks, "sharding": "full"} if ranks > 1 else {}
    found = describe_run("train", train(**layout, optimizer__offload=True), settings(model="8B"))
    needed = of_node * sum(found["rank"]["host"].values())
    assert needed > 80e9
    assert found["verdict"].endswith(f"; a node's ranks take {needed / 1e9:.1f} GB of the CPU's memory")


def test_a_server_without_room_for_its_weights_does_not_fit() -> None:
    options = train(rollout__server__first_gpu=1, rollout__server__memory_fraction=0.85)
    for name, fits in (("8B", True), ("235B-A22B", False)):
        found = describe_run("train", options, settings(model=name))["memory"]["GPU 1"]
        assert (found["total"] == 68e9) is fits and (found["total"] > 400e9) is not fits


def test_gpus_with_the_same_load_are_one_row() -> None:
    found = describe_run("train", train(**EIGHT, **SERVERS, rollout__max_response_tokens=5000), settings(model="2B"))
    assert [row[1] for row in rows_of(found) if row[1].startswith("GPU")] == ["GPU 0 to 7"]
    apart = describe_run("train", spread(1, 2, ("none", "step")), settings(model="2B"))
    assert [row[1] for row in rows_of(apart) if row[1].startswith("GPU")] == ["GPU 0", "GPU 1 to 2"]


def test_a_rollout_beside_the_training_costs_the_longer_of_both() -> None:
    changes = {"loop__save_interval": 1, "grpo__old_log_probs": "rollout"}
    apart, beside = (estimate(train(loop__max_staleness=ahead, **changes), settings()) for ahead in (0, 1))
    rollout = apart.seconds["rollout: prefill"] + apart.seconds["rollout: decode"]
    assert beside.iteration == pytest.approx(max(rollout, apart.iteration - rollout))


BASE = settings(model="2B", observation=150)


@pytest.mark.parametrize("name", EstimatePipelineOptions.model_fields)
def test_every_setting_changes_the_estimate(name: str) -> None:
    options = train(rollout__max_turns=10)
    before, after = (describe_run("train", options, chosen) for chosen in (BASE, with_another_value(BASE, name)))
    if name == "gpu_hour_price":
        assert before["price"] is None and after["price"] == pytest.approx(after["hours"] * after["gpus"] * 0.9)
    else:
        assert before["seconds"] != after["seconds"]


def test_lengths_stay_within_the_limits_of_the_run() -> None:
    free = settings(response=None, turns=None, prompt=600, observation=100)
    limited = train(rollout__max_turns=4, rollout__max_response_tokens=2300)
    assert estimate(limited, free).shape.response == (2300 - 3 * 100) // 4
    whole = with_value(limited, {"rollout.max_context_tokens": 2100})
    assert estimate(whole, free).shape.response == (2100 - 600 - 3 * 100) // 4 and estimate(whole, free).length == 2100
    assert estimate(limited, settings(response=9000, turns=9)).shape.response == (2300 - 3 * 200) // 4
    with pytest.raises(EstimateError, match="give estimate_<task>.response"):
        estimate(with_value(limited, {"rollout.max_response_tokens": None}), free)


def test_models_are_known_by_their_names() -> None:
    known = typing.get_args(EstimatePipelineOptions.model_fields["model"].annotation)[0]
    assert set(typing.get_args(known)) == set(PUBLISHED)
    assert set(GPUS) == set(typing.get_args(EstimatePipelineOptions.model_fields["gpu"].annotation))
    assert [
        published_name(f"Qwen/Qwen3-VL-{name}-{kind}") for name in PUBLISHED for kind in ("Instruct", "Thinking")
    ] == [name for name in PUBLISHED for _ in range(2)]
    assert published_name("me/Qwen3-VL-8Bx") is None
    options = train(policy__path="me/own-model")
    with pytest.raises(EstimateError, match="policy.path=me/own-model is none of the published models"):
        describe_run("train", options, settings())
    assert describe_run("train", options, settings(model="2B"))["model"] == "2B"
