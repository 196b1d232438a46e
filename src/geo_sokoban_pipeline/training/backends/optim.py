"""Optimizers: AdamW on every parameter, or Muon on the matrices inside the layers and AdamW on the rest.

Both choices have one learning rate and one state by parameter name, so checkpoints have the same layout. The size of
Muon's update depends on the learning rate alone, not on the gradient; it is scaled to the size of AdamW's update, so
that one rate suits both.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from geo_sokoban_pipeline.config.grpo import OptimizerOptions
from geo_sokoban_pipeline.distributed.fsdp import map_matrices
from geo_sokoban_pipeline.distributed.group import Group

_MATRICES = re.compile(r"\.(layers|blocks|merger|deepstack_merger_list)\.")
_COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # of the quintic iteration (Jordan et al., Muon, 2024)
_ITERATIONS = 5
_MOMENTUM = 0.95
_MATRIX_RATE = 2.0  # Muon's learning rate, in multiples of AdamW's
_ADAMW_SIZE = 0.2  # root mean square of AdamW's update in practice (arXiv 2502.16982)


class Muon(torch.optim.Optimizer):
    """Orthogonalised momentum as the update of a matrix (Jordan et al. 2024; scale and decay of arXiv 2502.16982).

    torch's Muon computes in bfloat16, which CPUs emulate: for the tiny policy its step takes three times as long.

    Args:
        parameters: matrices.
        lr: learning rate, in AdamW's units.
        weight_decay: decoupled, as AdamW's.
        group: ranks with copies of the parameters; each computes the updates of a part of them. None: all here, or,
            where parameters are sharded, dealt to the ranks that share them.
    """

    def __init__(self, parameters: list[Tensor], lr: float, weight_decay: float, group: Group | None = None) -> None:
        super().__init__(parameters, {"lr": lr, "weight_decay": weight_decay})
        self._group = group

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:
        """Move every parameter that has a gradient."""
        for settings in self.param_groups:
            parameters = [parameter for parameter in settings["params"] if parameter.grad is not None]
            directions = [self._direction(parameter) for parameter in parameters]
            for part, update, shape in self._updates(parameters, directions):
                size = _ADAMW_SIZE * math.sqrt(max(shape))
                part.mul_(1 - settings["lr"] * settings["weight_decay"]).sub_(update, alpha=settings["lr"] * size)

    def _direction(self, parameter: Tensor) -> Tensor:
        """Nesterov's momentum of a parameter's gradients."""
        if not (state := self.state[parameter]):
            state["momentum"] = torch.zeros_like(parameter)
        return torch.lerp(parameter.grad, state["momentum"].lerp_(parameter.grad, 1 - _MOMENTUM), _MOMENTUM)

    def _updates(
        self, parameters: Sequence[Tensor], directions: Sequence[Tensor]
    ) -> Iterator[tuple[Tensor, Tensor, Sequence[int]]]:
        """The part that is held of each matrix, its update, and the shape of the whole."""
        for index, update in self._orthogonalise(directions):
            yield parameters[index], update, parameters[index].shape

    def _orthogonalise(self, directions: Sequence[Tensor]) -> Iterable[tuple[int, Tensor]]:
        """Index of each matrix, and its update."""
        if shards := [direction for direction in directions if isinstance(direction, DTensor)]:
            return map_matrices(orthogonalise, shards)
        if self._group is None:
            return enumerate(map(orthogonalise, directions))
        owners = deal([math.prod(matrix.shape) * min(matrix.shape) for matrix in directions], self._group.size)
        own = [
            orthogonalise(direction) if owner == self._group.rank else None
            for direction, owner in zip(directions, owners, strict=True)
        ]
        return enumerate(self._group.combine(own, directions))


def deal(costs: Sequence[int], parts: int) -> list[int]:
    """Part of each piece of work: the most expensive ones first, each to the part that has least so far."""
    loads, owners = [0] * parts, [0] * len(costs)
    for index in sorted(range(len(costs)), key=lambda index: (-costs[index], index)):
        owners[index] = loads.index(min(loads))
        loads[owners[index]] += costs[index]
    return owners


def orthogonalise(matrix: Tensor, iterations: int = _ITERATIONS) -> Tensor:
    """The matrix with all singular values brought near 1 (0.7 to 1.2), by Newton–Schulz iterations in float32.

    Args:
        matrix: (m, n), any scale; a zero matrix stays zero.
    """
    linear, cubic, quintic = _COEFFICIENTS
    wide = matrix.float() if matrix.shape[0] <= matrix.shape[1] else matrix.float().T
    wide = wide / wide.norm().clamp(min=1e-7)
    for _ in range(iterations):
        gram = wide @ wide.T
        wide = torch.addmm(wide, torch.addmm(gram, gram, gram, beta=cubic, alpha=quintic), wide, beta=linear)
    return (wide if matrix.shape[0] <= matrix.shape[1] else wide.T).to(matrix.dtype)


class Optimizers:
    """The optimizers of a model, stepped together.

    Args:
        parameters: by name.
        options: of AdamW; `matrices` chooses the optimizer of the matrices inside the layers.
        group: ranks with copies of the parameters, which share Muon's work. None: this process alone.
        build_muon: of the matrices inside the layers, in place of `Muon`.
    """

    def __init__(
        self,
        parameters: Mapping[str, Tensor],
        options: OptimizerOptions,
        group: Group | None = None,
        build_muon: Callable[[Mapping[str, Tensor], float, float], Muon] | None = None,
    ) -> None:
        self._parameters = parameters
        self._options = options
        inner = {n: p for n, p in parameters.items() if options.matrices == "muon" and is_inner_matrix(n, p)}
        rest = {name: parameter for name, parameter in parameters.items() if name not in inner}
        rate, decay = options.learning_rate, options.weight_decay
        self._parts: list[tuple[torch.optim.Optimizer, float]] = []
        self._owners: dict[str, torch.optim.Optimizer] = {}  # by name of the parameter
        if rest:
            adamw = torch.optim.AdamW(list(rest.values()), rate, options.betas, options.eps, decay, fused=True)
            self._parts.append((adamw, 1.0))
            self._owners |= dict.fromkeys(rest, adamw)
        if inner:
            if build_muon is None:
                muon = Muon(list(inner.values()), rate, decay, group)
            else:
                muon = build_muon(inner, rate, decay)
            self._parts.append((muon, _MATRIX_RATE))
            self._owners |= dict.fromkeys(inner, muon)

    @property
    def in_force(self) -> list[torch.optim.Optimizer]:
        """The optimizers that have parameters."""
        return [optimizer for optimizer, _ in self._parts]

    def step(self, learning_rate: float) -> None:
        """Move all parameters along their gradients."""
        for optimizer, factor in self._parts:
            for group in optimizer.param_groups:
                group["lr"] = learning_rate * factor
            optimizer.step()

    def clear_gradients(self) -> None:
        """Drop all gradients."""
        for optimizer, _ in self._parts:
            optimizer.zero_grad(set_to_none=True)

    def state(self) -> tuple[dict[str, Tensor], int]:
        """Moments as `<moment>.<parameter>`, and AdamW's steps so far."""
        tensors: dict[str, Tensor] = {}
        steps = 0
        for name, held in self._states():
            for moment, value in held.items():
                if moment == "step":
                    steps = int(value)
                else:
                    tensors[f"{moment}.{name}"] = value.contiguous()
        return tensors, steps

    def load_state(self, tensors: Mapping[str, Tensor], steps: int) -> None:
        """Load the result of `state`.

        Raises:
            KeyError: a moment belongs to no parameter.
        """
        self.clear_state()
        for key, value in tensors.items():
            moment, name = key.split(".", 1)
            parameter = self._parameters[name]
            optimizer = self._owners[name]
            held = optimizer.state[parameter]
            if isinstance(optimizer, torch.optim.AdamW) and "step" not in held:
                held["step"] = torch.tensor(float(steps), device=parameter.device)
            held[moment] = value.to(parameter.device)

    def moments(self) -> list[Tensor]:
        """All tensors of the state, in an order that stays."""
        return [value for _, held in self._states() for value in held.values()]

    def replace_moments(self, tensors: Iterable[Tensor]) -> None:
        """Use other tensors in place of those of `moments`, in its order."""
        given = iter(tensors)
        for _, held in self._states():
            held |= {moment: next(given) for moment in held}

    def clear_state(self) -> None:
        """Drop all moments."""
        for optimizer, _ in self._parts:
            optimizer.state.clear()

    def _states(self) -> list[tuple[str, dict[str, Any]]]:
        states = [(name, self._owners[name].state.get(parameter)) for name, parameter in self._parameters.items()]
        return [(name, state) for name, state in states if state]


def is_inner_matrix(name: str, parameter: Tensor) -> bool:
    """Whether a parameter is a matrix inside the layers: no embedding, no output head, no norm, no bias."""
    return parameter.ndim == 2 and _MATRICES.search(f".{name}") is not None
