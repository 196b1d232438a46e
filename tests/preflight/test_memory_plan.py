"""The plan of a rank's memory against the bytes that live in a real update, at the real widths of Qwen3-VL.

Nothing is computed but sizes: tensors are fake, and the group of ranks answers no collective. All that FSDP2 gathers,
keeps and shares out is there, as are autograd's saved tensors, under the trainer's own pass.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from PIL import Image
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers.vision_utils import get_vision_interpolation_indices_and_weights, get_vision_position_ids

from geo_sokoban_pipeline.config.grpo import GrpoOptions, OptimizerOptions
from geo_sokoban_pipeline.distributed.fsdp import gathered_type, shard_modules, synchronise_next
from geo_sokoban_pipeline.distributed.slices import own_part
from geo_sokoban_pipeline.grpo.loss import GrpoObjective, StepSize
from geo_sokoban_pipeline.policies import qwen3_vl
from geo_sokoban_pipeline.policies.lora import Adapter
from geo_sokoban_pipeline.policies.patches import EncodedImage, build_image_processor
from geo_sokoban_pipeline.policies.policy import Policy, attach_adapter, freeze_parameters
from geo_sokoban_pipeline.policies.tiny import build_config, build_tokenizer
from geo_sokoban_pipeline.preflight.memory import (
    RankPlan,
    StepLoad,
    gathered_bytes,
    held_bytes,
    language_bytes,
    logit_bytes,
    plan_rank,
    vision_bytes,
)
from geo_sokoban_pipeline.preflight.model import ModelShape, PartSize
from geo_sokoban_pipeline.preflight.own_code import EpisodeShape
from geo_sokoban_pipeline.preflight.published_sizes import published_config
from geo_sokoban_pipeline.training.backends.torch import GradientPass, PassSetting
from geo_sokoban_pipeline.training.batch import TrainSample
from task_options import PolicyOptions, TinyPolicyOptions, TrainOptions
from training.live_bytes import LiveBytes

LAYERS = 3
TOKENS, TRAINED = 4096, 3000


class LivingBytes(TorchDispatchMode):
    """Bytes of all storages that operations have seen and that are still there, whatever size they have by now.

    FSDP2 frees and fills storages in place, so sizes are read again with each operation.
    """

    def __init__(self) -> None:
        super().__init__()
        self._known: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self.peak = 0

    def add(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        number = storage._cdata
        if number not in self._known:
            self._known[number] = weakref.ref(storage, lambda _: self._known.pop(number, None))

    @property
    def live(self) -> int:
        there = (known() for known in list(self._known.values()))
        return sum(storage.nbytes() for storage in there if storage is not None)

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        for leaf in tree_leaves((args, kwargs, result)):
            if isinstance(leaf, Tensor) and not isinstance(leaf, DTensor):  # its rows are a tensor of their own
                self.add(leaf)
        self.peak = max(self.peak, self.live)
        return result


@contextmanager
def fake_ranks(layout: Mapping[str, Any]) -> Iterator[DeviceMesh | None]:
    """The mesh of rank 0 among ranks that are not there; None for one process."""
    count, copies = layout.get("processes", 1), layout.get("replicas", 1)
    if count == 1 and not layout.get("offload"):
        yield None
        return
    if dist.is_initialized():  # by an earlier test that offloads
        dist.destroy_process_group()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=count)
    try:
        if copies == 1:
            yield init_device_mesh("cpu", (count,))
        else:
            yield init_device_mesh("cpu", (copies, count // copies), mesh_dim_names=("copy", "shard"))
    finally:
        dist.destroy_process_group()


class SummedLogProbs:
    """An objective whose metrics are not read, because fake tensors have no values."""

    entropy = "none"

    def __call__(self, members: Any, values: Tensor, entropies: Tensor, mask: Tensor, step: Any) -> Any:
        return SimpleNamespace(loss=(values * mask).sum(), metrics={})


def text_sample(tokens: int = TOKENS, trained: int = TRAINED) -> TrainSample:
    ids, places = np.arange(tokens) % 200 + 10, np.tile(np.arange(tokens), (3, 1))
    targets = np.arange(tokens - trained, tokens)
    values = {name: np.full(trained, -1, np.float32) for name in ("old_log_probs", "rollout_log_probs", "advantages")}
    return TrainSample(ids, places, targets, ids[targets], [], **values)


def image(grid: tuple[int, int, int], number: int) -> EncodedImage:
    patches = np.random.default_rng(number).integers(0, 256, (math.prod(grid), 3 * 16 * 16), np.uint8)
    return EncodedImage(str(number), b"", patches, grid)


@contextmanager
def fake_pass(config: Any, options: TrainOptions, layout: Mapping[str, Any]) -> Iterator[GradientPass]:
    """A rank's pass over fake weights."""
    from transformers import AutoModelForImageTextToText

    chosen = options.policy
    with torch.device("meta"):
        model = AutoModelForImageTextToText.from_config(config, dtype=getattr(torch, chosen.dtype))
    with fake_ranks(layout) as mesh, FakeTensorMode(allow_non_fake_inputs=True):
        model.to_empty(device="cpu").eval()
        model.tie_weights()  # which `to_empty` unties
        policy = Policy(model, build_tokenizer(), build_image_processor(1024, 1 << 24), compute=chosen.compute)
        if (adapter := Adapter.fresh(chosen.adapter, Path(), seed=0)) is not None:
            attach_adapter(policy, adapter)
        network = policy.network
        if mesh is not None:
            shard_modules(
                network.language,
                network.vision,
                mesh,
                offload=options.optimizer.offload,
                products=gathered_type(policy),
                reduce_dtype=options.optimizer.reduce_dtype,
            )
        yield GradientPass(policy, PassSetting.of(options.optimizer, 0.8))


def living_bytes(part: torch.nn.Module, work: Callable[[], Any]) -> int:
    """Most bytes alive during some work: weights of a part of the network, and all that operations make."""
    with LivingBytes() as count:
        for parameter in part.parameters():
            count.add(own_part(parameter))
        work()
    return count.peak


ONE: dict[str, Any] = {}
FULL = {"processes": 8, "threads": 1, "sharding": "full"}
HYBRID = {"processes": 8, "threads": 1, "sharding": "hybrid", "replicas": 4}
MIXED, WHOLE = {"compute": "bfloat16"}, {}
LORA = {**MIXED, "adapter": {"rank": 16}}
KEEP = {"gradient_checkpointing": False}
CASES = [
    # width, layout, micro-batches, policy, optimizer
    ("2B", ONE, 2, MIXED, {}),
    ("8B", FULL, 2, MIXED, {}),
    ("8B", FULL, 1, MIXED, {}),
    ("2B", HYBRID, 2, MIXED, {}),
    ("2B", FULL, 2, WHOLE, {}),
    ("2B", FULL, 2, MIXED, {}),
    ("2B", ONE, 2, MIXED, KEEP),
    ("8B", FULL, 1, MIXED, KEEP),
    ("8B", ONE, 2, MIXED, {"logit_chunk": 256}),
    # Each micro-batch shares its gradients out.
    ("2B", FULL, 3, MIXED, {"gradient_sync": "micro_batch"}),
    ("8B", FULL, 2, MIXED, {"gradient_sync": "micro_batch"}),
    ("8B", FULL, 2, MIXED, {"reduce_dtype": "bfloat16", "gradient_sync": "micro_batch"}),
    # Frozen weights are in the compute type.
    *(("2B", layout, 2, LORA, optimizer) for layout, optimizer in ((ONE, {}), (FULL, {}), (ONE, KEEP))),
    *(("8B", layout, 1, LORA, {}) for layout in (ONE, FULL)),
    # The gradient of the embeddings is the most.
    *(("2B", layout, passes, MIXED, {"logit_chunk": 256}) for layout, passes in ((ONE, 2), (FULL, 1))),
    *(("8B", FULL, passes, MIXED, {"logit_chunk": 256}) for passes in (1, 2)),
]


@pytest.mark.parametrize(("name", "layout", "passes", "policy", "optimizer"), CASES)
def test_the_plan_is_what_lives(
    name: str, layout: dict[str, Any], passes: int, policy: dict[str, Any], optimizer: dict[str, Any]
) -> None:
    config = published_config(name, layers=LAYERS, blocks=1)
    sizes = {"max_tokens": TOKENS, "logit_chunk": 2048, "gradient_checkpointing": True, **optimizer}
    given = {"policy": policy, "optimizer": sizes, "warm_start": {"steps": 0}, **layout}
    options = TrainOptions.model_validate(given if layout else {**given, "rollout": {"engine": "sglang"}})
    model = ModelShape.of(options.policy, config)
    rank = plan_rank(options, model, StepLoad(TOKENS, passes), on_gpu=False)
    samples = [text_sample() for _ in range(passes)]
    with fake_pass(config, options, layout) as gradients:
        found = living_bytes(
            gradients.policy.network.language,
            lambda: gradients.accumulate(samples, SummedLogProbs(), StepSize.of(samples)),
        )
    assert found == pytest.approx(
        rank.total - apart(rank, held_bytes(options, model, model.vision), model.vision, options), rel=0.1
    )


class Gathered(TorchDispatchMode):
    """Counts bytes of what gathers of a group give a rank, and those gathers that are in bfloat16."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = self.rounded = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if function is torch.ops.c10d._allgather_base_.default:
            self.bytes += args[0].nbytes
            self.rounded += args[0].dtype == torch.bfloat16
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize(("name", "share"), [("2B", 0.6), ("8B", 0.5005)])
def test_types_of_products_halve_what_is_gathered(name: str, share: float, checkpointing: bool) -> None:
    """Of a micro-batch at 8B; at 2B the embeddings are the head, too, and are gathered in float32."""
    config, planned = published_config(name, layers=LAYERS, blocks=1), []
    whole = ModelShape.of(PolicyOptions(), published_config(name))
    for policy in (WHOLE, MIXED):
        sizes = {"max_tokens": TOKENS, "gradient_checkpointing": checkpointing}
        options = TrainOptions.model_validate({"policy": policy, "optimizer": sizes, **FULL})
        samples = [text_sample(), text_sample()]
        with fake_pass(config, options, FULL) as gradients, Gathered() as gathered:
            gradients.accumulate(samples, SummedLogProbs(), StepSize.of(samples))
        wanted = gathered_bytes(options, ModelShape.of(options.policy, config))
        assert gathered.bytes == pytest.approx(len(samples) * sum(wanted), rel=1e-4)
        planned.append(sum(gathered_bytes(options, whole)))
    assert planned[1] <= share * planned[0]


def test_a_backward_pass_gathers_the_next_layer_before_it_runs_one() -> None:
    """So the plan has two in flight; a forward pass leaves that to the host, which is ahead of a GPU."""
    sizes = {"max_tokens": TOKENS, "gradient_checkpointing": True}
    options = TrainOptions.model_validate({"policy": MIXED, "optimizer": sizes, **FULL})
    samples, seen, gathered = [text_sample()], [], Gathered()
    with fake_pass(published_config("2B", layers=LAYERS, blocks=1), options, FULL) as gradients, gathered:
        for layer in gradients.policy.network.language.layers:
            layer.register_forward_pre_hook(lambda *_: seen.append(gathered.rounded))
        gradients.accumulate(samples, SummedLogProbs(), StepSize.of(samples))
    assert seen == [1, 2, 3, 5, 6, 6]  # forward, then backward, where each layer runs again


@pytest.mark.parametrize("sync", ["step", "micro_batch"])
def test_the_plan_of_offloaded_weights_is_what_lives(sync: Any) -> None:
    """Beside weights and gradients in the memory of the CPU, which here is that of the device, too."""
    config = published_config("8B", layers=LAYERS, blocks=1)
    sizes = {"max_tokens": TOKENS, "logit_chunk": 2048, "gradient_checkpointing": True, "offload": True}
    given = {"policy": MIXED, "optimizer": {**sizes, "gradient_sync": sync}, "rollout": {"engine": "sglang"}}
    options = TrainOptions.model_validate({**given, "warm_start": {"steps": 0}})
    model = ModelShape.of(options.policy, config)
    rank = plan_rank(options, model, StepLoad(TOKENS, 3), on_gpu=True)
    samples = [text_sample() for _ in range(3)]
    with fake_pass(config, options, {"offload": True}) as gradients:
        found = living_bytes(
            gradients.policy.network.language,
            lambda: gradients.accumulate(samples, SummedLogProbs(), StepSize.of(samples)),
        )
    # Those of an accumulated step come into being behind its peak.
    language = model.parameters - model.vision.parameters
    host = 4 * language * (1 if sync == "step" else 2)
    assert found - host == pytest.approx(rank.total, rel=0.1)


@pytest.mark.parametrize(
    ("name", "policy", "processes"), [("8B", MIXED, 1), ("8B", {**MIXED, "freeze": ["visual"]}, 6), ("2B", WHOLE, 8)]
)
def test_offloaded_weights_and_gradients_are_pinned_one_by_one(
    name: str, policy: dict[str, Any], processes: int
) -> None:
    """torch rounds each pinned block up to a power of two; moments are ordinary tensors."""
    config, sizes = published_config(name, layers=1, blocks=1), {"offload": True}
    layout = {"processes": processes, "threads": 1, "sharding": "full"} if processes > 1 else ONE
    given = {"policy": policy, "optimizer": sizes, "warm_start": {"steps": 0}, "rollout": {"engine": "sglang"}}
    options = TrainOptions.model_validate({**given, **layout})
    model = ModelShape.of(options.policy, config)
    host = plan_rank(options, model, StepLoad(TOKENS, 1), on_gpu=True).host
    with fake_pass(config, options, {**layout, "offload": True}) as gradients:
        freeze_parameters(gradients.policy.model, options.policy.freeze)
        weights = list(gradients.policy.model.parameters())
        blocks = [1 << (own_part(weight).untyped_storage().nbytes() - 1).bit_length() for weight in weights]
        trained = [weight.requires_grad for weight in weights]
    assert host["weights"] == sum(blocks)
    assert host["gradients"] == sum(block for block, trains in zip(blocks, trained, strict=True) if trains)
    assert host["optimizer moments"] == 8 * (model.trained // processes) < 2 * host["gradients"]


def apart(rank: RankPlan, weights: int, part: PartSize, options: TrainOptions) -> int:
    """Bytes of a plan that a pass over the rest of the network does not touch."""
    shards = {"none": 1, "full": 8, "hybrid": 2}[options.sharding]
    held = rank.held["optimizer moments"] + rank.held.get("weights of the engine", 0) + rank.held["image features"]
    return held + (weights + 4 * part.trained) // shards


GRID = (1, 32, 32)


@pytest.fixture
def known_positions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Positions of one grid: the library's functions read the values of its shape, which a fake tensor has not."""
    shape = torch.tensor([GRID])
    grid = {"num_grid_per_side": 48, "mode": "bilinear", "align_corners": True, "spatial_merge_size": 2}
    found = {
        "get_vision_position_ids": get_vision_position_ids(shape, 2),
        "get_vision_interpolation_indices_and_weights": get_vision_interpolation_indices_and_weights(shape, **grid),
    }
    for name, value in found.items():
        monkeypatch.setattr(qwen3_vl, name, lambda *_, value=value, **__: value)


@pytest.mark.usefixtures("known_positions")
@pytest.mark.parametrize(("name", "optimizer", "layout"), [("2B", KEEP, ONE), ("8B", {}, ONE), ("8B", {}, FULL)])
def test_the_plan_of_the_tower_is_what_lives(name: str, layout: dict[str, Any], optimizer: dict[str, Any]) -> None:
    """Two passes; the second one adds to the gradients of the first."""
    config = published_config(name, layers=1, blocks=4)
    sizes = {"vision_patches": 2048, "gradient_checkpointing": True, **optimizer}
    options = TrainOptions.model_validate(
        {"policy": MIXED, "optimizer": sizes, "warm_start": {"steps": 0}, "rollout": {"max_turns": 1}, **layout}
    )
    model = ModelShape.of(options.policy, config)
    images = [[image(GRID, 2 * part), image(GRID, 2 * part + 1)] for part in range(2)]
    load = StepLoad(64, 1, patches=4 * 1024, largest=1024, image_tokens=0)
    rank = plan_rank(options, model, load, on_gpu=False)
    tower = RankPlan(rank.held, {"vision tower": rank.phases["vision tower"]})

    with fake_pass(config, options, layout) as gradients:
        policy = gradients.policy
        policy.network.train()

        def encode() -> None:
            for part in images:
                synchronise_next(policy.network.vision, is_last=part is images[-1])
                with policy.computing(caching=False):
                    features = policy.network.encode(part, checkpointing=options.optimizer.gradient_checkpointing)
                torch.autograd.backward(features.tables, [torch.empty_like(table) for table in features.tables])

        found = living_bytes(policy.network.vision, encode)
    language = PartSize(model.parameters - model.vision.parameters, model.trained - model.vision.trained)
    assert found == pytest.approx(tower.total - apart(rank, 4 * language.parameters, language, options), rel=0.1)


@pytest.mark.parametrize(("tensor", "sequence"), [(2, False), (4, True)])
def test_megatron_divides_the_language_model_and_each_rank_has_the_tower(tensor: int, sequence: bool) -> None:
    """Beside the plan of one process; two groups of ranks share what each of them holds."""
    config, sizes = published_config("8B", layers=LAYERS), {"gradient_checkpointing": True, "logit_chunk": 2048}
    alone = {"policy": {**MIXED, "device": "auto"}, "optimizer": sizes, "rollout": {"engine": "sglang"}}
    layout = {"tensor_parallel": tensor, "sequence_parallel": sequence}
    values = {**alone, "processes": 2 * tensor, "threads": 1, "backend": "megatron", "megatron": layout}
    one, other = (TrainOptions.model_validate(given) for given in (alone, values))
    model = ModelShape.of(one.policy, config)
    load = StepLoad(TOKENS, 1, 1024, 1024, 256)
    whole, part = (plan_rank(options, model, load, on_gpu=True) for options in (one, other))
    language = model.parameters - model.vision.parameters
    for name, size in (("weights", 4), ("gradients", 4), ("optimizer moments", 8)):
        assert whole.held[name] == size * model.parameters
        assert part.held[name] == size * ((language // tensor + model.vision.parameters) // 2)
    logits, kept = "logits of a micro-batch", "activations of a micro-batch"
    assert part.phases["output head"][logits] == whole.phases["output head"][logits] // tensor
    divided = part.phases["output head"][kept] / whole.phases["output head"][kept]
    assert divided == pytest.approx(1 / tensor if sequence else 1, rel=0.01)
    shape = EpisodeShape(prompt=28, observation=22, response=6, patches=36, image_tokens=9, image_bytes=400)
    assert StepLoad.of(other, shape, 100).passes == pytest.approx(StepLoad.of(one, shape, 100).passes / 2, abs=1)


# Planned activations against those that autograd keeps, with few layers.

SMALL_GRID = {"vision_grid": 16, "deepstack": (0,)}
SIZES: dict[str, dict[str, int]] = {
    "2B": {"hidden": 2048, "heads": 16, "kv_heads": 8, "head_dim": 128, "mlp": 6144}
    | {"vision_hidden": 1024, "vision_heads": 16, "vision_mlp": 4096},
    # A quarter of these widths.
    "small": {"hidden": 512, "heads": 4, "kv_heads": 2, "head_dim": 128, "mlp": 1536}
    | {"vision_hidden": 256, "vision_heads": 4, "vision_mlp": 1024},
}
MIXTURE = {"hidden": 512, "heads": 8, "kv_heads": 2, "head_dim": 64, "vision_hidden": 64}
EXPERTS = {"num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 192}
TYPES = {"float32": ("float32", None), "mixed": ("float32", "bfloat16"), "bfloat16": ("bfloat16", None)}
SHORT = 40


def build_policy(sizes: dict[str, Any], options: PolicyOptions, experts: dict[str, int] | None = None) -> Policy:
    """Policy without drawn weights: nothing is computed but sizes."""
    from transformers import AutoModelForImageTextToText, Qwen3VLMoeConfig

    tokenizer = build_tokenizer()
    config = build_config(TinyPolicyOptions.model_validate({**SMALL_GRID, **sizes}), tokenizer)
    if experts is not None:
        text, vision = config.text_config.to_dict(), config.vision_config.to_dict()
        parts = {"text_config": {**text, **experts, "mlp_only_layers": []}, "vision_config": vision}
        for part in parts.values():
            part.pop("model_type")
        config = Qwen3VLMoeConfig(**parts, image_token_id=config.image_token_id)
    with torch.device("meta"):
        model = AutoModelForImageTextToText.from_config(config, dtype=getattr(torch, options.dtype))
    model.to_empty(device="cpu")
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.fill_(0.01)
    return Policy(model, tokenizer, build_image_processor(1024, 1 << 24), compute=options.compute)


def kept_bytes(policy: Policy, run: Any) -> int:
    """Bytes that autograd keeps of a forward pass, weights and their copies in another type left out."""
    kept: dict[int, tuple[int, Tensor]] = {}
    weights = {parameter.untyped_storage().data_ptr() for parameter in policy.model.parameters()}
    matrices = [p for p in policy.model.parameters() if p.ndim > 1]
    shapes = {tuple(shape) for p in matrices for shape in (p.shape, p.shape[::-1], p.mT.shape)}

    def keep(tensor: Tensor) -> Tensor:
        tensor = tensor.detach()  # the graph would hold its own outputs, and with them the policy, for ever
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights and tuple(tensor.shape) not in shapes:
            kept[storage.data_ptr()] = storage.nbytes(), tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor), policy.computing():
        run()
    return sum(size for size, _ in kept.values())


def read_image(policy: Policy) -> EncodedImage:
    pixels = np.random.default_rng(0).integers(0, 256, (96, 192, 3), np.uint8)
    return policy.reader.read(Image.fromarray(pixels))


def run_text(policy: Policy, *, checkpointing: bool) -> None:
    ids = torch.arange(SHORT)[None] + 10
    # More than half of the positions: the last layer runs at all of them.
    policy.network(
        ids,
        torch.arange(SHORT).expand(3, 1, SHORT),
        wanted=torch.arange(SHORT // 2 + 1)[None],
        checkpointing=checkpointing,
    )


ACTIVATIONS = [
    *(("2B" if kind == "mixed" else "small", kind, again) for kind in TYPES for again in (False, True)),
    *(("mixture", kind, False) for kind in TYPES),
]


@pytest.mark.parametrize(("name", "kind", "checkpointing"), ACTIVATIONS)
def test_planned_bytes_are_those_that_autograd_keeps(name: str, kind: str, checkpointing: bool) -> None:
    """Between one layer and two, so that what is no layer does not count; of the vision tower all with its mergers."""
    dtype, compute = TYPES[kind]
    options = PolicyOptions.model_validate({"dtype": dtype, "compute": compute})
    optimizer = OptimizerOptions(gradient_checkpointing=checkpointing)
    text, vision, planned = [], [], []
    for layers in (1, 2):
        sizes = {**SIZES.get(name, MIXTURE), "layers": layers, "vision_layers": layers}
        policy = build_policy(sizes, options, EXPERTS if name == "mixture" else None)
        image = read_image(policy)
        patches = int(np.prod(image.grid))
        text.append(kept_bytes(policy, lambda: run_text(policy, checkpointing=checkpointing)))  # noqa: B023
        vision.append(kept_bytes(policy, lambda: policy.network.encode([image], checkpointing=checkpointing)))  # noqa: B023
        counts = (
            language_bytes(policy.model.config, options, optimizer, SHORT),
            vision_bytes(policy.model.config, options, optimizer, patches, patches),
        )
        planned.append(counts)
    assert text[1] - text[0] == pytest.approx(planned[1][0] - planned[0][0], rel=0.02)
    assert vision[1] - vision[0] == pytest.approx(planned[1][1] - planned[0][1], rel=0.1)
    if (
        name in SIZES and not checkpointing
    ):  # else a block that runs again is in the plan and not among what a forward pass keeps
        assert vision[1] == pytest.approx(planned[1][1], rel=0.15)


def test_vision_passes_and_frozen_towers_are_in_the_plan() -> None:
    config = build_config(TinyPolicyOptions(), build_tokenizer())
    plan = {
        (limit, frozen): vision_bytes(
            config,
            PolicyOptions.model_validate({"freeze": frozen}),
            OptimizerOptions(vision_patches=limit),
            patches=10_000,
            largest=400,
        )
        for limit in (None, 1000, 100, 20_000)
        for frozen in ((), ("visual",))
    }
    whole = plan[None, ()]
    assert [plan[limit, ()] / whole for limit in (1000, 100, 20_000)] == pytest.approx([0.1, 0.04, 1.0])
    assert not any(plan[limit, ("visual",)] for limit in (None, 1000))


@pytest.mark.parametrize(("tokens", "chunk"), [(300, 50), (30, 100)])
def test_planned_logits_are_those_that_live_at_once(tokens: int, chunk: int) -> None:
    """At Qwen3-VL's vocabulary and a width at which nothing else counts."""
    sizes = {"hidden": 16, "heads": 1, "kv_heads": 1, "mlp": 16, "layers": 1, "deepstack": ()}
    policy = build_policy(sizes, PolicyOptions())
    policy.model.resize_token_embeddings(151_936)
    ids, places = np.arange(tokens + 1) + 10, np.tile(np.arange(tokens + 1), (3, 1))
    values = {name: np.full(tokens, -1, np.float32) for name in ("old_log_probs", "rollout_log_probs", "advantages")}
    batch = [TrainSample(ids, places, np.arange(1, tokens + 1), ids[1:], [], **values)]
    with LiveBytes() as count:
        GradientPass(policy, PassSetting(0.8, 8192, chunk)).accumulate(
            batch, GrpoObjective(GrpoOptions()), StepSize.of(batch)
        )
    planned = logit_bytes(policy.model.config, PolicyOptions(), OptimizerOptions(logit_chunk=chunk), tokens)
    assert count.peak == pytest.approx(planned, rel=0.15)
