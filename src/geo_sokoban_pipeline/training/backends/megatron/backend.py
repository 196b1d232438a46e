"""The Megatron backend of one rank: steps, state and scores are those of `TorchBackend`, over Megatron's parameters.

The ranks of a tensor-parallel group train on the same samples. Their common parts (vision tower, norms) stay equal bit
for bit, because each step takes its gradients from one of them, or sums them where each has a summand.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from geo_sokoban_pipeline.config.grpo import MegatronOptions, OptimizerOptions
from geo_sokoban_pipeline.distributed.fsdp import device_of_mesh, gather, map_matrices, shard_modules
from geo_sokoban_pipeline.distributed.group import Group, Part
from geo_sokoban_pipeline.distributed.slices import StoredTensors, own_part, with_part, write_places
from geo_sokoban_pipeline.grpo.loss import EntropyUse, StepSize
from geo_sokoban_pipeline.policies.policy import Policy, empty_model, use_types
from geo_sokoban_pipeline.policies.weights import TensorSpec
from geo_sokoban_pipeline.runs.storage import Files
from geo_sokoban_pipeline.training.backends.megatron.language import (
    MegatronLanguage,
    ParallelModel,
    ParallelNetwork,
    VocabularyHead,
)
from geo_sokoban_pipeline.training.backends.megatron.limits import check_limits
from geo_sokoban_pipeline.training.backends.megatron.pieces import MegatronLayout, Weight, WeightTable
from geo_sokoban_pipeline.training.backends.megatron.scores import score_split_states
from geo_sokoban_pipeline.training.backends.optim import Muon, Optimizers, deal, orthogonalise
from geo_sokoban_pipeline.training.backends.torch import OPTIMIZER, GradientPass, PassSetting, TorchBackend
from geo_sokoban_pipeline.training.batch import TrainSample
from geo_sokoban_pipeline.training.runtime import PART_THRESHOLD


@dataclass
class ParallelPolicy(Policy):
    """A policy of which this rank holds a part.

    Attributes:
        table: of its weights.
        whole: the whole model without weights, in Hugging Face's class.
    """

    table: Any = None
    whole: Any = None

    @cached_property
    def network(self) -> Any:
        """The forward pass, over the ranks of this rank's group."""
        return ParallelNetwork(self.model, self.image_processor)


def parallelise_policy(
    policy: Policy, layout: MegatronLayout, group: Group, *, is_trained: bool = True, offload: bool = False
) -> ParallelPolicy:
    """A policy whose matrices and samples the ranks divide; the given one is unchanged.

    Arguments are those of `shard_policy`.

    Raises:
        ValueError: `policy.freeze` names a part of what Megatron holds as one parameter.
    """
    source = policy.model
    config, dtype = source.config, source.dtype
    language = MegatronLanguage(config, layout, dtype)
    whole = empty_model(config, config._attn_implementation, dtype, source.generation_config)
    model = ParallelModel(config, language, whole.model.visual, device_of_mesh(layout.mesh))
    specs = {name: TensorSpec.of(weight) for name, weight in source.named_parameters()}
    trained = {name for name, weight in source.named_parameters() if is_trained and weight.requires_grad}
    table = WeightTable(config, specs, [name for name, _ in model.named_parameters()], layout, group)
    types = None if is_trained else use_types(policy)
    for name, parameter in list(model.named_parameters()):
        held = [weight.name for weight in table.of_parameter[name]]
        chosen = {each in trained for each in held}
        if len(chosen) > 1:
            raise ValueError(
                f"policy.freeze with backend=megatron: {', '.join(held)} are one parameter there; freeze all of them "
                "or none."
            )
        place, _, attribute = name.rpartition(".")
        kind = parameter.dtype if types is None else types[held[0]]
        made = nn.Parameter(parameter.detach().to(kind), requires_grad=chosen == {True})
        setattr(model.get_submodule(place), attribute, made)
    own = {"table": table, "whole": whole, "planned_device": layout.mesh.device_type}
    parallel = ParallelPolicy(model, policy.tokenizer, policy.image_processor, policy.folder, policy.compute, **own)
    roots = parallel.network.language, parallel.network.vision
    shard_modules(*roots, layout.mesh["data"], offload=offload)  # ranks with the same part of each matrix
    device = "cpu" if offload else layout.mesh.device_type
    for root in roots:
        root._apply(lambda tensor: torch.empty_like(tensor, device=device) if tensor.is_meta else tensor)
    table.parameters = dict(model.named_parameters())
    if not policy.is_empty:
        table.copy(dict(source.named_parameters()))
    else:
        assert policy.folder is not None  # an empty policy is that of a folder
        table.load(policy.folder)
    return parallel


class ParallelPass(GradientPass):
    """`GradientPass` over a policy whose vocabulary ranks split."""

    def __init__(self, policy: ParallelPolicy, setting: PassSetting, ranks: Group, layout: MegatronLayout) -> None:
        super().__init__(policy, setting, ranks, device_of_mesh(layout.mesh))

    def _backward(self, loss: Tensor) -> None:
        # Megatron's products multiply gradients, in the type of products, by weights in their own.
        with self.policy.computing(caching=False):
            loss.backward()

    def _read_out(
        self, states: Tensor, labels: Tensor, head: VocabularyHead, *, use: EntropyUse
    ) -> tuple[Tensor, Tensor]:
        return score_split_states(
            states,
            head.weight,
            labels,
            group=head.group,
            chunk=self.setting.logit_chunk,
            temperature=self.setting.temperature,
            banned_ids=self._banned,
            entropy=use,
        )


class MegatronBackend(TorchBackend):
    """`TrainBackend` of one rank; its parameters are Megatron's, everything that leaves it has Hugging Face's names.

    Args:
        policy: of the engine, which `renew` gives whole weights; a step does not change it.
        options: optimizer and micro-batches.
        temperature: sampling temperature of the rollouts.
        group: all ranks.
        layout: how they divide the policy.

    Raises:
        ValueError: see `check_limits` and `parallelise_policy`.
    """

    heap_threshold = PART_THRESHOLD

    def __init__(
        self,
        policy: Policy,
        options: OptimizerOptions,
        temperature: float,
        group: Group,
        layout: MegatronOptions,
    ) -> None:
        check_limits(policy.model.config.text_config.to_dict(), layout, group.size)
        self._layout = MegatronLayout.of(layout, group)
        trained = parallelise_policy(policy, self._layout, group, offload=options.offload)
        self._table: WeightTable = trained.table
        passes = ParallelPass(trained, PassSetting.of(options, temperature), group, self._layout)
        self._set_up(policy, options, group, passes, device_of_mesh(self._layout.mesh))

    def _build_optimizers(self) -> Optimizers:
        assert self._group is not None
        muon = partial(ParallelMuon, table=self._table, group=self._group, device=self._layout.mesh.device_type)
        return Optimizers(self._trained, self.options, build_muon=muon)

    def _measure(self, samples: Sequence[TrainSample]) -> StepSize:
        size = super()._measure(samples)  # each sample is on all ranks of a tensor-parallel group
        return StepSize(size.samples // self._layout.tensor, size.tokens // self._layout.tensor)

    @torch.no_grad()
    def _clip(self) -> float:
        gradients = {name: weight.grad for name, weight in self._trained.items() if weight.grad is not None}
        self._share_gradients(gradients)
        norm = self._norm(gradients)
        factor = (self.options.clip / (norm + 1e-6)).clamp(max=1.0)  # as `clip_grad_norm_` has it
        for gradient in gradients.values():
            part = own_part(gradient)
            part.mul_(factor.to(part.device))
        return float(norm)

    def _share_gradients(self, gradients: Mapping[str, Tensor]) -> None:
        """Give the ranks of a tensor-parallel group equal gradients of what they all hold."""
        if self._layout.tensor == 1:
            return
        group = self._layout.tensor_group
        alike = [name for name in gradients if not self._table.is_split(name)]
        summed = [own_part(gradients[name]) for name in alike if name in self._table.partial]
        taken = [own_part(gradients[name]) for name in alike if name not in self._table.partial]
        self._replace(summed, lambda flat: dist.all_reduce(flat, group=group))
        self._replace(taken, lambda flat: dist.broadcast(flat, dist.get_global_rank(group, 0), group))

    def _replace(self, parts: Sequence[Tensor], share: Callable[[Tensor], Any]) -> None:
        """Overwrite tensors with what a collective makes of them, one behind the other on the device that computes."""
        if not parts:
            return
        flat = torch.cat([part.flatten() for part in parts]).to(self._layout.mesh.device_type)
        share(flat)
        for part, shared in zip(parts, flat.split([part.numel() for part in parts]), strict=True):
            part.copy_(shared.view_as(part))

    def _norm(self, gradients: Mapping[str, Tensor]) -> Tensor:
        """Norm of the gradients of the whole policy, the same on every rank."""
        device = self._layout.mesh.device_type
        squares = torch.zeros((), device=device)
        for is_split in (True, False):
            chosen = [gradient for name, gradient in gradients.items() if self._table.is_split(name) == is_split]
            if chosen:
                norm = gather(torch.nn.utils.get_total_norm(chosen)).to(device)
                squares += norm.square() if is_split or self._layout.place[1] == 0 else 0.0
        dist.all_reduce(squares, group=self._layout.tensor_group)
        return squares.sqrt()

    def _described(self) -> Policy:
        held: Any = self.trained_policy
        return replace(self.policy, model=held.whole)

    def _specs(self) -> dict[str, TensorSpec]:
        return {name: weight.spec for name, weight in self._table.weights.items()}

    def part_of(self, name: str, owner: int, matrices: Mapping[str, Tensor]) -> Part:
        return self._table.part(name, owner)

    def _gather(self, name: str, dtype: torch.dtype) -> Tensor:
        return self._table.gather(name, dtype)

    def _digested(self) -> Iterator[Tensor]:
        """The parts of weights that all ranks of a tensor-parallel group hold."""
        return (own_part(each) for name, each in self._parameters.items() if not self._table.is_split(name))

    def _write_moments(self, folder: Path, moments: Mapping[str, Tensor]) -> Files:
        assert self._group is not None
        found: dict[str, tuple[Weight, Mapping[str, Tensor]]] = {}
        for kind in dict.fromkeys(key.split(".", 1)[0] for key in moments):
            start = f"{kind}."
            held = {key.removeprefix(start): value for key, value in moments.items() if key.startswith(start)}
            found |= {
                start + name: (weight, held) for name, weight in self._table.weights.items() if weight.parameter in held
            }
        # Tensors that all ranks of a tensor-parallel group hold are dealt to them by size.
        alike = sorted(key for key, (weight, _) in found.items() if weight.split is None)
        owners = dict(zip(alike, deal([found[key][0].spec.bytes for key in alike], self._layout.tensor), strict=True))
        places = {
            key: {
                rank: self._table.piece(weight, rank).place for rank in self._table.holders(weight, owners.get(key, 0))
            }
            for key, (weight, _) in sorted(found.items())
        }
        return write_places(
            folder, OPTIMIZER, places, lambda key: self._table.read(*found[key]).contiguous(), self._group
        )

    def _read_weights(self, folder: Path) -> None:
        self._table.load(folder)

    def _read_moments(self, stored: StoredTensors) -> dict[str, Tensor]:
        moments: dict[str, Tensor] = {}
        for key in stored.names:
            kind, name = key.split(".", 1)
            weight = self._table.weights[name]
            parameter, own = self._parameters[weight.parameter], f"{kind}.{weight.parameter}"
            if own not in moments:
                moments[own] = with_part(torch.zeros_like(own_part(parameter)), parameter)
            piece = self._table.own(weight)
            if piece.own:
                piece.write(own_part(moments[own]), stored.read(key, piece.place))
        return moments


def build_parallel_pass(
    policy: Policy, options: OptimizerOptions, temperature: float, group: Group, layout: MegatronOptions
) -> ParallelPass:
    """Passes over a policy that is not trained, whose weights are in the types in which they are used.

    Arguments are those of `MegatronBackend`.
    """
    check_limits(policy.model.config.text_config.to_dict(), layout, group.size)
    made = MegatronLayout.of(layout, group)
    held = parallelise_policy(policy, made, group, is_trained=False)
    return ParallelPass(held, PassSetting.of(options, temperature), group, made)


class ParallelMuon(Muon):
    """Muon of Hugging Face's matrices: each is gathered on one rank, and its update goes back in pieces.

    Args:
        parameters: by name.
        lr, weight_decay: as `Muon`.
        table: of the weights.
        group: all ranks.
        device: type of the device that computes.
    """

    def __init__(
        self,
        parameters: Mapping[str, Tensor],
        lr: float,
        weight_decay: float,
        *,
        table: WeightTable,
        group: Group,
        device: str,
    ) -> None:
        super().__init__(list(parameters.values()), lr, weight_decay)
        self._names = {parameter: name for name, parameter in parameters.items()}
        self._table, self._ranks, self._device = table, group, device

    def _updates(
        self, parameters: Sequence[Tensor], directions: Sequence[Tensor]
    ) -> Iterator[tuple[Tensor, Tensor, Sequence[int]]]:
        pairs = [
            (self._names[parameter], direction) for parameter, direction in zip(parameters, directions, strict=True)
        ]
        split = {name: direction for name, direction in pairs if self._table.is_split(name)}
        weights = [weight for name in split for weight in self._table.of_parameter[name]]
        weights.sort(key=lambda weight: (-math.prod(weight.spec.shape), weight.name))
        for first in range(0, len(weights), self._ranks.size):
            yield from self._update_round(weights[first : first + self._ranks.size], split)
        alike = [parameter for parameter in parameters if self._names[parameter] not in split]
        shards: Any = [direction for name, direction in pairs if name not in split]
        for number, update in map_matrices(orthogonalise, shards) if shards else ():
            yield alike[number], update, alike[number].shape

    def _update_round(
        self, weights: Sequence[Weight], directions: Mapping[str, Tensor]
    ) -> Iterator[tuple[Tensor, Tensor, Sequence[int]]]:
        """Updates of at most as many matrices as there are ranks, each computed by another one."""
        count, rank = self._ranks.size, self._ranks.rank
        parts = [self._table.read(weight, directions).to(self._device, torch.float32) for weight in weights]
        given = torch.cat([part.flatten() for part in parts])
        sent = [*(part.numel() for part in parts), *[0] * (count - len(parts))]
        received, matrix, places = [0] * count, None, []
        if rank < len(weights):
            matrix = given.new_empty(weights[rank].spec.shape)
            places = [self._table.piece(weights[rank], each).place.of(matrix) for each in range(count)]
            received = [place.numel() for place in places]
        flat = given.new_empty(sum(received))
        dist.all_to_all_single(flat, given, received, sent)
        if matrix is not None:
            for place, part in zip(places, flat.split(received), strict=True):
                place.copy_(part.view(place.shape))
            matrix.copy_(orthogonalise(matrix))
            flat = torch.cat([place.flatten() for place in places])
        dist.all_to_all_single(given, flat, sent, received)
        for weight, part, back in zip(weights, parts, given.split(sent), strict=False):
            shard = own_part(self._table.parameters[weight.parameter])
            for rows, update in self._table.own(weight).split(back.view_as(part)):
                yield shard[rows], update.to(shard.device), weight.spec.shape
