"""The torch backend: micro-batches, gradients and the optimizer step on the policy's own model.

A step accumulates its gradients in the parameters; with several ranks the group then adds those of all. The optimizer
moves the weights once. A step whose gradient norm is not finite changes neither weights nor moments, on any rank.

Micro-batches hold samples of similar lengths, and logits are computed at trained positions only. Right padding needs no
mask, because causal attention never sees later tokens. Features of images accumulate the gradients of all micro-batches
before they pass on to the vision tower. Selections use `index_select`, whose backward pass is deterministic on several
threads, unlike that of `x[index]`.

Weights and moments leave a rank under Hugging Face's names and in its shapes, whatever the layout. Where several ranks
share the weights, that is a collective: ranks write what they hold, one tensor at a time, and send it in buckets.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from geo_sokoban_pipeline.config.grpo import OptimizerOptions
from geo_sokoban_pipeline.distributed.fsdp import (
    clip_gradients,
    device_of_mesh,
    gather,
    shard_policy,
    synchronise_next,
)
from geo_sokoban_pipeline.distributed.group import Group, Part
from geo_sokoban_pipeline.distributed.host_memory import HostMemory, copy_to
from geo_sokoban_pipeline.distributed.slices import (
    Slice,
    StoredTensors,
    copies_of,
    copy_weights,
    own_part,
    own_rows,
    read_weights,
    split_rows,
    with_part,
    write_parts,
    write_slices,
)
from geo_sokoban_pipeline.grpo.batching import plan_micro_batches
from geo_sokoban_pipeline.grpo.loss import (
    EntropyUse,
    Objective,
    StepSize,
    score_states,
    token_log_probs,
    token_log_probs_and_entropy,
)
from geo_sokoban_pipeline.grpo.loss import entropy as token_entropy
from geo_sokoban_pipeline.policies.lora import (
    AdaptedLinear,
    adapted_layers,
    matrices_of,
    merge,
    read_adapter,
    switched_off,
    write_adapter,
)
from geo_sokoban_pipeline.policies.patches import EncodedImage
from geo_sokoban_pipeline.policies.policy import (
    Policy,
    allocate_weights,
    save_encoding,
    save_policy,
)
from geo_sokoban_pipeline.policies.qwen3_vl import ImageFeatures, cut_images
from geo_sokoban_pipeline.policies.weights import (
    SHARD_BYTES,
    SharedBytes,
    TensorSpec,
    WeightSource,
    cut,
    empty_bucket,
    order_tensors,
    published_spec,
    published_specs,
    transpose_experts,
    write_tensors,
)
from geo_sokoban_pipeline.progress import note_progress
from geo_sokoban_pipeline.runs.storage import Files, read_json, write_json
from geo_sokoban_pipeline.training.backends.base import MOST_SKIPPED, Batch, DivergedError
from geo_sokoban_pipeline.training.backends.optim import Optimizers
from geo_sokoban_pipeline.training.batch import TrainSample
from geo_sokoban_pipeline.training.demonstrations import Demonstrations
from geo_sokoban_pipeline.training.runtime import STEP_THRESHOLD, limit_heap

OPTIMIZER = "optimizer"  # beginning of the names of its files
STATE_FILE = "trainer_state.json"


class RankState:
    """The part of `TrainBackend` that hands out and takes over weights and moments.

    Attributes:
        policy: of the engine in this process.
        options: optimizer and micro-batches.
        trained_policy: whose weights are trained; the same one, unless several ranks share them.
        optimizers: what moves the weights.
        device: on which this rank computes.
    """

    policy: Policy
    options: OptimizerOptions
    trained_policy: Policy
    optimizers: Optimizers
    _group: Group | None
    device: torch.device
    _is_sharded: bool
    _parameters: dict[str, Tensor]
    _skipped: int
    _changes: int
    _host: HostMemory
    _is_away: bool

    def iter_weights(self) -> Iterator[tuple[str, Any]]:
        return self.weight_source().read()

    def weight_source(self) -> WeightSource:
        """See `TrainBackend`; where several ranks share the weights, see `collect`."""
        if self._is_sharded:
            # Alone it has them in memory of the CPU with `optimizer.offload`, and servers take them from the GPU.
            is_alone = self._group is not None and self._group.size == 1
            collect = partial(self.collect, device=self.device) if is_alone else self.collect
            return WeightSource(self._specs(), collect, lambda: self._changes)
        # Not the model's own state: a step of fused AdamW leaves the versions of torch's tensors as they are.
        return replace(WeightSource.of_model(self.policy.model, self.device), state=lambda: self._changes)

    @torch.no_grad()
    def collect(
        self,
        specs: Mapping[str, TensorSpec],
        memory: SharedBytes | None,
        owners: Sequence[int] = (0,),
        device: torch.device | None = None,
    ) -> Tensor | None:
        """A bucket of whole weights in the published layout, on its owners; None on other ranks, which all call this.

        Args:
            memory: into which all ranks write what they hold; None: one collective brings it to the owners.
            device: on which the ranks exchange what they hold, and owners have the bucket. None: that of the weights,
                which is the CPU while the state is there.
        """
        assert self._group is not None
        rank, size = self._group.rank, self._group.size
        is_written = memory is not None or size == 1 or not self._is_sharded
        device = own_part(next(iter(self._parameters.values()))).device if device is None else device
        matrices, found = self._whole_matrices(list(specs)), None
        wanted: dict[int, list[tuple[Part, Tensor]]] = {}
        parts: dict[str, list[Part]] = {name: [] for name in specs}
        for owner in owners:
            if is_written and memory is None and rank != owner:
                continue
            flat = empty_bucket(specs, memory, device if is_written or rank == owner else "meta")
            pairs = wanted[owner] = []
            for name, whole in cut(flat, specs):
                note_progress()
                part = next((part for part in parts[name] if owner in part.ranks), None)
                if part is None:
                    part = self.part_of(name, owner, matrices)
                    if rank in part.ranks and not is_written:  # moved before it is rounded, which a CPU does slowly
                        part = replace(part, own=part.own.to(device).to(whole.dtype))
                    parts[name].append(part)
                if not is_written:
                    pairs.append((part, whole))
                elif rank in part.ranks:
                    part.of(whole, rank).copy_(part.own.to(whole.device))
            if rank == owner:
                found = flat
        if not is_written:
            self._group.collect_bucket(wanted, device)
        return found

    @torch.no_grad()
    def renew(self) -> None:
        """See `TrainBackend`; a collective where the weights are sharded."""
        if not self._is_sharded:
            return
        if self.policy.is_empty:
            allocate_weights(self.policy, self.device)
        for name, weight in self.policy.model.named_parameters():
            weight.copy_(self._gather(name, weight.dtype))

    def offload(self) -> None:
        """See `TrainBackend`; with `optimizer.offload` the state is in the memory of the CPU already."""
        if self._moves and not self._is_away:
            self._replace_state(self._host.hold)
            self._is_away = True
        if torch.cuda.is_available():
            torch.cuda.empty_cache()  # memory that torch keeps for later is of no use to others

    def onload(self) -> None:
        if self._is_away:
            self._replace_state(partial(copy_to, device=self.device))
            self._is_away = False

    @property
    def _moves(self) -> bool:
        """Whether the state leaves its device."""
        return self.device.type != "cpu" and not self.options.offload

    def _replace_state(self, copies: Callable[[Sequence[Tensor]], Sequence[Tensor]]) -> None:
        """Use copies of weights, buffers and moments in their place."""
        model = self.trained_policy.model
        weights = [*model.parameters(), *model.buffers()]
        moved = copies([*weights, *self.optimizers.moments()])
        found = dict(zip(map(id, weights), moved, strict=False))
        network = self.trained_policy.network
        roots = (network.language, network.vision) if self._is_sharded else (model,)
        for root in roots:
            root._apply(lambda tensor: found.pop(id(tensor), tensor))  # shared weights come twice
        self.optimizers.replace_moments(moved[len(weights) :])

    def _described(self) -> Policy:
        """A policy with the configuration of the trained one, in Hugging Face's class."""
        return self.trained_policy

    def _specs(self) -> dict[str, TensorSpec]:
        """Types and shapes of the whole weights as published, in the order of the model."""
        return published_specs(self.trained_policy.model)

    @cached_property
    def _adapted(self) -> dict[str, AdaptedLinear]:
        """Layers with an adapter, by the names of their weights."""
        return adapted_layers(self.trained_policy.model)

    def part_of(self, name: str, owner: int, matrices: Mapping[str, Tensor]) -> Part:
        """This rank's part of a weight in the published layout; each rank adds the adapter to its own rows.

        Args:
            owner: the rank that gets the whole weight; of copies its own are sent.
            matrices: see `_whole_matrices`.
        """
        parameter = self._parameters[name]
        held, shape = own_part(parameter), published_spec(name, parameter).shape
        if (layer := self._adapted.get(name)) is not None:
            held = merge(held, matrices[name], own_part(layer.lora_B.weight), layer.scale)
        ranks = next((ranks for ranks in copies_of(parameter) if owner in ranks), [owner])
        rows = dict(zip(ranks, split_rows(shape[0], len(ranks)), strict=True))
        return Part(
            transpose_experts(name, held), shape, ranks, lambda whole, rank: whole[rows[rank].start : rows[rank].stop]
        )

    def _whole_matrices(self, names: Sequence[str]) -> dict[str, Tensor]:
        """The whole A of those weights that have an adapter, on every rank; one collective."""
        assert self._group is not None
        found = {name: self._adapted[name].lora_A.weight for name in names if name in self._adapted}
        if not self._is_sharded:
            return {name: matrix.detach() for name, matrix in found.items()}
        held: list[Tensor] = []
        for matrix in found.values():
            rows, part = own_rows(matrix), own_part(matrix)
            held.append(part.new_zeros(matrix.shape))
            if self._group.rank in copies_of(matrix)[0]:
                held[-1][rows.start : rows.stop] = part
        return dict(zip(found, self._group.combine(held, held), strict=True))

    def _gather(self, name: str, dtype: torch.dtype) -> Tensor:
        """A whole weight in a type, on every rank; a collective."""
        # Rounded before it is sent.
        return gather(self._parameters[name].detach().to(dtype))

    def _digested(self) -> Iterable[Tensor]:
        """This rank's part of the weights, and all buffers."""
        return (*map(own_part, self._parameters.values()), *self.trained_policy.model.buffers())

    def digest(self) -> str:
        """Hash of what is equal on all ranks that hold the same weights."""
        digest = hashlib.blake2b(digest_size=16)
        for tensor in self._digested():
            digest.update(tensor.cpu().contiguous().view(-1).view(torch.uint8).numpy())
        return digest.hexdigest()

    def export(self, folder: Path, largest: int = SHARD_BYTES) -> Files:
        """See `TrainBackend`; where the weights are sharded, every rank writes its part into a folder of all.

        Args:
            largest: bytes of a file of weights.
        """
        if self._group is None or not self._is_sharded:
            return save_policy(self.trained_policy, folder, largest=largest)
        if self._group.rank == 0:
            save_encoding(self._described(), folder)
        specs = self._specs()
        read = partial(self.part_of, matrices=self._whole_matrices(list(specs)))
        return write_parts(folder, specs, read, self._group, largest)

    def export_trained(self, folder: Path) -> Files:
        """See `TrainBackend`; rank 0 writes an adapter, and where the weights are sharded all ranks call this."""
        if (adapter := self.trained_policy.adapter) is None:
            return self.export(folder)
        matrices = matrices_of(self._parameters)
        specs = {name: TensorSpec.of(matrix) for name, matrix in matrices.items()}

        def read(name: str) -> Tensor:
            return gather(matrices[name].detach())

        if self._group is not None and self._group.rank:
            for name in order_tensors(specs):
                read(name)
            return {}
        save_encoding(self._described(), folder)
        return write_adapter(adapter, specs, read, folder)

    def save_state(self, folder: Path) -> Files:
        """See `TrainBackend`; where moments are sharded, every rank writes a part, and returns its own files."""
        tensors, steps = self.optimizers.state()
        if self._group is None or self._group.rank == 0:
            write_json(folder / STATE_FILE, {"optimizer_steps": steps, "skipped_in_a_row": self._skipped})
        if self._is_sharded:
            return self._write_moments(folder, tensors)
        specs = {name: TensorSpec.of(tensor) for name, tensor in tensors.items()}
        return write_tensors(folder / f"{OPTIMIZER}.safetensors", specs, tensors.__getitem__)

    @torch.no_grad()
    def load_state(self, folder: Path) -> None:
        """See `TrainBackend`; every rank reads what it holds, one tensor at a time."""
        self._read_weights(folder)
        self._changes += 1
        moments = self._read_moments(StoredTensors(folder, OPTIMIZER))
        numbers = read_json(folder / STATE_FILE)
        self._skipped = int(numbers["skipped_in_a_row"])
        self.optimizers.load_state(moments, int(numbers["optimizer_steps"]))

    def _write_moments(self, folder: Path, moments: Mapping[str, Tensor]) -> Files:
        """Write this rank's part of the moments."""
        assert self._group is not None
        return write_slices(folder, OPTIMIZER, moments, self._group)

    def _read_weights(self, folder: Path) -> None:
        if self.trained_policy.adapter is None:
            read_weights(self._parameters, folder)
        else:  # all others stay as they are
            copy_weights(matrices_of(self._parameters), read_adapter(folder, self._parameters))

    def _read_moments(self, stored: StoredTensors) -> dict[str, Tensor]:
        """This rank's part of the moments."""
        moments = {}
        for key in stored.names:
            parameter = self._parameters[key.split(".", 1)[1]]
            rows, part = own_rows(parameter), own_part(parameter)
            own = stored.read(key, Slice(rows)).to(part.device) if rows else torch.empty_like(part)
            moments[key] = with_part(own, parameter)
        return moments


class TorchBackend(RankState):
    """`TrainBackend` of one rank, which keeps weights and moments in this process; `RankState` has what leaves it.

    Args:
        policy: trained in place.
        options: optimizer and micro-batches.
        temperature: sampling temperature of the rollouts.
        group: the ranks, whose backends take every step together; None: this process alone. Options that offload need a
            group of one rank then.
        mesh: of the ranks; each holds a part of weights, gradients and moments, and `policy` is that of the engine,
            which `renew` gives whole weights. None: nothing is sharded, and engine and backend share the model.

    Attributes:
        optimizers, trained_policy: see `RankState`.
        heap_threshold: bytes of the largest block in the heap from the second step on, where weights are sharded.
    """

    heap_threshold = STEP_THRESHOLD

    def __init__(
        self,
        policy: Policy,
        options: OptimizerOptions,
        temperature: float = 1.0,
        group: Group | None = None,
        mesh: DeviceMesh | None = None,
    ) -> None:
        if options.offload and mesh is None:
            group = Group.alone(policy.device)
            mesh = group.mesh()
        trained = policy
        if mesh is not None:
            trained = shard_policy(policy, mesh, offload=options.offload, reduce_dtype=options.reduce_dtype)
        device = policy.model.device if mesh is None else device_of_mesh(mesh)
        passes = GradientPass(trained, PassSetting.of(options, temperature), None if mesh is None else group, device)
        self._set_up(policy, options, group, passes, device)

    def _set_up(
        self,
        policy: Policy,
        options: OptimizerOptions,
        group: Group | None,
        passes: GradientPass,
        device: torch.device,
    ) -> None:
        self.policy, self.options, self.trained_policy = policy, options, passes.policy
        self._group, self._pass, self.device = group, passes, device
        self._is_sharded = passes.policy is not policy
        self._parameters = dict(passes.policy.model.named_parameters())
        self._trained = {name: parameter for name, parameter in self._parameters.items() if parameter.requires_grad}
        self.optimizers = self._build_optimizers()
        self._skipped = self._changes = 0
        self._host, self._is_away = HostMemory(), False

    def _build_optimizers(self) -> Optimizers:
        # Muon deals sharded matrices to the ranks by itself.
        return Optimizers(self._trained, self.options, None if self._is_sharded else self._group)

    def log_probs(self, samples: Sequence[TrainSample]) -> list[np.ndarray]:
        return self._pass.log_probs(samples)

    def base_log_probs(self, samples: Sequence[TrainSample]) -> list[np.ndarray]:
        with switched_off(self.trained_policy.model):
            return self._pass.log_probs(samples)

    def step(
        self, batch: Batch, objective: Objective, learning_rate: float, size: StepSize | None = None
    ) -> dict[str, float]:
        """See `TrainBackend`.

        Args:
            batch: this rank's part of the step; it may be empty where another rank's is not.
            size: of the whole step; None: the sum over the ranks.

        Returns:
            Metrics of the objective over this rank's part; `grad_norm` and `skipped` of the whole step.
        """
        samples = batch.make() if isinstance(batch, Demonstrations) else batch
        # These leave the gradients of the whole step in the parameters.
        metrics = self._pass.accumulate(samples, objective, self._measure(samples) if size is None else size)
        norm = self._clip()
        if math.isfinite(norm):
            self.optimizers.step(learning_rate)
            self._skipped = 0
        else:
            self._skipped += 1
        self.optimizers.clear_gradients()
        self._changes += 1
        if self._changes == 1 and self._is_sharded:
            limit_heap(self.heap_threshold)
        if self._skipped >= MOST_SKIPPED:
            raise DivergedError(f"{self._skipped} optimizer steps in a row had no finite gradient (norm {norm})")
        return {**metrics, "grad_norm": norm, "skipped": float(self._skipped > 0)}

    def _measure(self, samples: Sequence[TrainSample]) -> StepSize:
        """Size of a step of which this rank has these samples."""
        size = StepSize.of(samples)
        return size if self._group is None else StepSize(*self._group.sum_counts([size.samples, size.tokens]))

    def _clip(self) -> float:
        """Make the gradients those of the whole step, and clip them; returns their norm before."""
        if self._group is not None and not self._is_sharded:
            self._group.sum_gradients(list(self._trained.values()))
        return clip_gradients(list(self._trained.values()), self.options.clip)

    def close(self) -> None:
        self.optimizers.clear_state()


@dataclass(frozen=True)
class PassSetting:
    """Settings of a forward pass over training samples.

    Attributes:
        temperature: sampling temperature of the rollouts; divides the logits as in sampling.
        max_tokens: padded tokens of a micro-batch.
        logit_chunk: trained positions whose logits are held at once.
        vision_patches: patches that pass the vision tower with one graph. None: all of the samples.
        gradient_checkpointing: keep the inputs of layers alone for the backward pass.
        syncs_each_pass: whether ranks that share weights share out the gradients of each pass, not of the step.
    """

    temperature: float
    max_tokens: int
    logit_chunk: int
    vision_patches: int | None = None
    gradient_checkpointing: bool = False
    syncs_each_pass: bool = False

    @classmethod
    def of(cls, options: OptimizerOptions, temperature: float) -> PassSetting:
        """Settings from optimizer options."""
        return cls(
            temperature,
            options.max_tokens,
            options.logit_chunk,
            options.vision_patches,
            options.gradient_checkpointing,
            options.gradient_sync == "micro_batch",
        )


class GradientPass:
    """Computes log-probs of trained tokens, and accumulates gradients of an objective in the policy's parameters.

    Args:
        ranks: that share the weights of the policy: all make equally many passes, some without samples, because every
            pass gathers weights. None: the weights are whole.
        device: on which passes compute; None: that of the weights.
    """

    def __init__(
        self, policy: Policy, setting: PassSetting, ranks: Group | None = None, device: torch.device | None = None
    ) -> None:
        self.policy, self.setting = policy, setting
        self._ranks = ranks
        if dropout := getattr(policy.model.config.text_config, "attention_dropout", 0.0):
            raise ValueError(
                f"attention_dropout={dropout} in the model's config.json: equal runs would drop other values, and so "
                "would the two passes of gradient checkpointing. Set it to 0.0 there."
            )
        self.device = policy.model.device if device is None else device
        self._banned = torch.from_numpy(policy.banned_ids).to(self.device)
        self._trains_vision = any(parameter.requires_grad for parameter in policy.network.vision.parameters())

    @torch.no_grad()
    def log_probs(self, samples: Sequence[TrainSample]) -> list[np.ndarray]:
        """(M,) float32 log-probs of each sample's trained tokens."""
        plan, parts = self._in_step(self._plan(samples), self._images(samples))
        features = self._encode(parts)
        rows: list[np.ndarray] = [np.empty(0, np.float32)] * len(samples)
        for batch in plan:
            if not batch:
                self._score([self._filler], None, entropy="none")
                continue
            values, _, _ = self._score([samples[index] for index in batch], features, entropy="none")
            for row, index in enumerate(batch):
                rows[index] = values[row, : len(samples[index].targets)].float().cpu().numpy()
        return rows

    def accumulate(self, samples: Sequence[TrainSample], objective: Objective, step: StepSize) -> dict[str, float]:
        """Add the gradients of some samples of a step; returns the objective's metrics, summed over micro-batches."""
        network = self.policy.network
        plan, parts = self._in_step(self._plan(samples), self._images(samples))
        # One pass of the tower keeps its graph until the micro-batches are through. The graphs of several would take
        # too much memory together: each pass is made again, when the gradients of its features are known.
        whole = len(parts) == 1
        with torch.set_grad_enabled(whole):
            features = self._encode(parts)
        shown = features
        if features is not None and self._trains_vision:
            # Detached from the tower, they accumulate the gradients of all micro-batches.
            shown = replace(features, tables=[table.detach().requires_grad_() for table in features.tables])
        totals: dict[str, float] = {}
        for number, batch in enumerate(plan, start=1):
            synchronise_next(network.language, is_last=number == len(plan) or self.setting.syncs_each_pass)
            if not batch:
                values, _, _ = self._score([self._filler], None, entropy="none")
                self._backward(0.0 * values.sum())
                continue
            members = [samples[index] for index in batch]
            part = objective(members, *self._score(members, shown, entropy=objective.entropy), step)
            self._backward(part.loss)
            for name, value in part.metrics.items():
                totals[name] = totals.get(name, 0.0) + value
        if shown is not None and self._trains_vision:
            encoded = [features] if whole else (self._encode([part]) for part in parts)
            gradients = [table.grad for table in shown.tables]
            if self._ranks is not None:  # its backward pass is a collective
                gradients = [
                    torch.zeros_like(table) if gradient is None else gradient
                    for table, gradient in zip(shown.tables, gradients, strict=True)
                ]
            _train_tower(encoded, gradients, network.vision, 1 if self.setting.syncs_each_pass else len(parts))
        return totals

    def _backward(self, loss: Tensor) -> None:
        """Pass a loss back through the language model."""
        loss.backward()

    def _plan(self, samples: Sequence[TrainSample]) -> list[list[int]]:
        return plan_micro_batches([sample.length for sample in samples], self.setting.max_tokens)

    def _in_step(
        self, plan: list[list[int]], parts: list[list[EncodedImage]]
    ) -> tuple[list[list[int]], list[list[EncodedImage]]]:
        """As many micro-batches and parts of images as the rank with most: empty ones, and blank images."""
        if self._ranks is None:
            return plan, parts
        batches, encodings = self._ranks.largest([len(plan), len(parts)])
        blank = [self._blank] if len(parts) < encodings else []
        return [*plan, *[[]] * (batches - len(plan))], [*parts, *[blank] * (encodings - len(parts))]

    @cached_property
    def _filler(self) -> TrainSample:
        """A sample of one token, for a pass without samples."""
        ids = np.setdiff1d(np.arange(len(self.policy.banned_ids) + 1), self.policy.banned_ids)[:1].astype(np.int64)
        return TrainSample(ids, np.zeros((3, 1), np.int64), np.ones(1, np.int64), ids, [])

    @cached_property
    def _blank(self) -> EncodedImage:
        """The smallest image, for a pass without images."""
        size = self.policy.network.vision.merge_size
        width = 3 * self.policy.model.config.vision_config.patch_size**2
        return EncodedImage("blank", b"", np.zeros((size * size, width), np.uint8), (1, size, size))

    def _images(self, samples: Sequence[TrainSample]) -> list[list[EncodedImage]]:
        """The distinct images of samples, in parts that pass the vision tower together; none without images."""
        images = {image.key: image for sample in samples for image in sample.images}
        return cut_images(list(images.values()), self.setting.vision_patches) if images else []

    def _encode(self, parts: Sequence[Sequence[EncodedImage]]) -> ImageFeatures | None:
        """Features of images; None without images."""
        if not parts:
            return None
        checkpointing = self._checkpoints()
        with self.policy.computing(caching=False):
            return ImageFeatures.join([self.policy.network.encode(part, checkpointing=checkpointing) for part in parts])

    def _checkpoints(self) -> bool:
        """Whether layers of the pass that is about to begin are run again in a backward pass."""
        return self.setting.gradient_checkpointing and torch.is_grad_enabled()

    def _score(
        self, samples: Sequence[TrainSample], features: ImageFeatures | None, *, entropy: EntropyUse
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(B, T) log-probs, entropies (zeros if not asked for) and bool mask of trained tokens, packed to the left."""
        values, entropies = self._forward(samples, features, partial(self._read_out, use=entropy))
        counts = [len(sample.targets) for sample in samples]
        target = self._packed(counts)
        empty = values.new_zeros(len(samples) * max(counts))
        mask = torch.zeros_like(empty, dtype=torch.bool).index_fill(0, target, True)
        shape = (len(samples), max(counts))
        values, entropies = (empty.index_copy(0, target, found).view(shape) for found in (values, entropies))
        return values, entropies, mask.view(shape)

    def _forward(
        self,
        samples: Sequence[TrainSample],
        features: ImageFeatures | None,
        read: Callable[[Tensor, Tensor, nn.Module], Any],
    ) -> Any:
        """Result of `read(states, labels, head)`: (M, hidden) states that predict trained tokens, their (M,) ids."""
        note_progress()
        counts = [len(sample.targets) for sample in samples]
        width, count = max(sample.length for sample in samples), max(counts)
        ids = np.zeros((len(samples), width), np.int64)
        positions = np.zeros((3, len(samples), width), np.int64)
        wanted = np.empty((len(samples), count), np.int64)
        for row, sample in enumerate(samples):
            # States that predict the trained tokens; a shorter row is filled with its first one.
            wanted[row] = sample.targets[0] - 1
            wanted[row, : len(sample.targets)] = sample.targets - 1
            ids[row, : sample.length] = sample.input_ids
            positions[:, row, : sample.length] = sample.positions
        target = self._packed(counts)
        labels = torch.from_numpy(np.concatenate([sample.labels for sample in samples])).to(self.device)
        keys = [image.key for sample in samples for image in sample.images]
        shown = {}
        if keys and features is not None:
            shown = {"features": features.tables, "rows": torch.from_numpy(features.rows(keys)).to(self.device)}
        with self.policy.computing(caching=False):
            return self.policy.network(
                torch.from_numpy(ids).to(self.device),
                torch.from_numpy(positions).to(self.device),
                wanted=torch.from_numpy(wanted).to(self.device),
                head=lambda states, head: read(states.flatten(0, 1).index_select(0, target), labels, head),
                checkpointing=self._checkpoints(),
                **shown,
            )

    def _packed(self, counts: Sequence[int]) -> Tensor:
        """Places of the trained tokens in rows of equal width, one after the other."""
        places = [np.arange(own) + row * max(counts) for row, own in enumerate(counts)]
        return torch.from_numpy(np.concatenate(places)).to(self.device)

    def _read_out(self, states: Tensor, labels: Tensor, head: nn.Module, *, use: EntropyUse) -> tuple[Tensor, Tensor]:
        """(M,) log-probs of the labels and entropies after (M, hidden) states."""
        chunk, banned = self.setting.logit_chunk, self._banned
        temperature = self.setting.temperature
        # `score_states` holds two copies of a chunk's logits, the code below six of all logits: it is cheaper in memory
        # where these are at most a third of a chunk.
        if 3 * len(states) > chunk:
            weight: Tensor = head.weight
            return score_states(
                states, weight, labels, chunk=chunk, temperature=temperature, banned_ids=banned, entropy=use
            )
        # Nothing is computed twice here.
        logits = head(states)
        if use == "trained":
            return token_log_probs_and_entropy(logits, labels, temperature=temperature, banned_ids=banned)
        values = token_log_probs(logits, labels, temperature=temperature, banned_ids=banned)
        with torch.no_grad():
            return values, torch.zeros_like(values) if use == "none" else token_entropy(logits, banned_ids=banned)


def _train_tower(
    parts: Iterable[ImageFeatures | None], gradients: Sequence[Tensor | None], tower: nn.Module, synced: int
) -> None:
    """One backward pass through the vision tower per part of the features, given the gradients of all of them.

    Args:
        synced: number of the first part, from 1, with which ranks share out gradients.
    """
    first = 0
    for number, features in enumerate(parts, start=1):
        assert features is not None
        synchronise_next(tower, is_last=number >= synced)
        end = first + len(features.tables[0])
        pairs = [
            (table, gradient[first:end])
            for table, gradient in zip(features.tables, gradients, strict=True)
            if table.requires_grad and gradient is not None
        ]
        if pairs:
            torch.autograd.backward([table for table, _ in pairs], [gradient for _, gradient in pairs])
        first = end
