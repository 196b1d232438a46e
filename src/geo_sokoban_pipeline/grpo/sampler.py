"""Prompt sampler: draws the prompts of an iteration.

A draw depends only on the seed, the iteration and the sampler's state. The state is plain JSON, so a resumed run draws
the same prompts as an uninterrupted one.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from geo_sokoban_pipeline.config.grpo import PromptOptions
from geo_sokoban_pipeline.seeding import content_hash, python_generator

_KINDS = {"shuffle": "shuffle", "solve_rate": "bucket", "prompt_solve_rate": "prompt"}  # orders, as states name them
_SMOOTHING = 0.1  # weight of a new observation in a moving solve rate
_INITIAL_RATE = 0.5  # solve rate of a bucket before its first observation


@dataclass
class PromptSampler:
    """Draws prompt indices and tracks solve rates; `state()` and `from_state` save and restore it.

    Attributes:
        buckets: one difficulty label per prompt, such as its solution length; None is a label too (unknown).
        options: how prompts are chosen: `shuffle` iterates over all of them, reshuffled in each epoch (slime);
            `solve_rate` draws a difficulty bucket by weight p (1 - p) + floor, then takes the next of its shuffled
            order; `prompt_solve_rate` draws prompts by the weight of their own p, without replacement within a draw.
        seed: of the order and the draws.
        positions: prompts taken so far from each stream: one stream for `shuffle`, else one per bucket.
        bucket_rates: moving solve rate of each observed bucket.
        prompt_rates: moving solve rate of each observed prompt; only with `prompt_solve_rate`.
    """

    buckets: Sequence[int | str | None]
    options: PromptOptions
    seed: int
    positions: dict[str, int] = field(default_factory=dict)
    bucket_rates: dict[str, float] = field(default_factory=dict)
    prompt_rates: dict[int, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.buckets:
            raise ValueError("buckets is empty: there are no prompts to draw from.")
        self._labels = [str(bucket) for bucket in self.buckets]
        self._members: dict[str, list[int]] = {}
        for index, label in enumerate(self._labels):
            self._members.setdefault("all" if self.options.order == "shuffle" else label, []).append(index)
        self._orders: dict[str, tuple[int, list[int]]] = {}

    def draw(self, iteration: int, count: int, attempt: int = 0) -> list[int]:
        """The next `count` prompt indices, in rollout order.

        Every call advances the streams, so a prompt returns only after all others of its stream; `prompt_solve_rate`
        repeats a prompt within a call only if `count` exceeds the number of prompts.

        Args:
            iteration: of the loop, from 0.
            count: number of prompts, 0 or more.
            attempt: 0 for the first draw of the iteration, then 1, 2, … for refills.
        """
        if count < 0:
            raise ValueError(f"count={count}: it must be 0 or more.")
        generator = python_generator(self.seed, "prompts", iteration, attempt)
        if self.options.order == "shuffle":
            return [self._next("all") for _ in range(count)]
        if self.options.order == "prompt_solve_rate":
            return self._weighted_prompts(generator, count)
        labels = sorted(self._members)
        weights = [self._weight(self._bucket_rate(label)) for label in labels]
        return [self._next(label) for label in generator.choices(labels, weights, k=count)]

    def update(self, indices: Sequence[int], solve_rates: Sequence[float]) -> None:
        """Move the solve rates towards observed ones; k observations of a bucket count as k steps to their mean.

        Args:
            indices: prompts that were rolled out; a prompt may occur more than once.
            solve_rates: solved fraction of the group's episodes, in [0, 1], one per index.
        """
        observed_buckets: dict[str, list[float]] = {}
        observed_prompts: dict[int, list[float]] = {}
        for index, rate in zip(indices, solve_rates, strict=True):
            if not 0.0 <= rate <= 1.0:
                raise ValueError(f"solve rate {rate} of prompt {index}: it must be in [0, 1].")
            observed_buckets.setdefault(self._labels[index], []).append(float(rate))
            observed_prompts.setdefault(int(index), []).append(float(rate))
        if self.options.order == "prompt_solve_rate":
            # Before the buckets move: a prompt seen for the first time starts from its bucket's rate.
            for index, rates in observed_prompts.items():
                self.prompt_rates[index] = self._moved(self._prompt_rate(index), rates)
        for label, rates in observed_buckets.items():
            self.bucket_rates[label] = self._moved(self._bucket_rate(label), rates)

    def state(self) -> dict[str, Any]:
        """Complete state as JSON values; a hash of the buckets stands for the prompts."""
        return {
            "seed": self.seed,
            "kind": _KINDS[self.options.order],
            "size": len(self.buckets),
            "buckets_hash": content_hash(*self._labels),
            "positions": dict(sorted(self.positions.items())),
            "bucket_rates": dict(sorted(self.bucket_rates.items())),
            "prompt_rates": {str(index): self.prompt_rates[index] for index in sorted(self.prompt_rates)},
        }

    @classmethod
    def from_state(
        cls, state: Mapping[str, Any], buckets: Sequence[int | str | None], options: PromptOptions, seed: int
    ) -> PromptSampler:
        """Restore a sampler from its `state()`, over the same prompts and options.

        Raises:
            ValueError: the state belongs to other prompts, another seed or another order; the message names the field.
        """
        sampler = cls(
            buckets,
            options,
            seed,
            dict(state["positions"]),
            dict(state["bucket_rates"]),
            {int(index): rate for index, rate in state["prompt_rates"].items()},
        )
        own = sampler.state()
        for name in ("seed", "kind", "size", "buckets_hash"):
            if own[name] != state[name]:
                raise ValueError(
                    f"sampler state has {name}={state[name]!r}, this run has {own[name]!r}: "
                    "resume with the same prompts and options, or start over."
                )
        return sampler

    def _next(self, label: str) -> int:
        """Take the next prompt of a stream, which concatenates the shuffled orders of its epochs."""
        members = self._members[label]
        position = self.positions.get(label, 0)
        self.positions[label] = position + 1
        epoch, offset = divmod(position, len(members))
        if self._orders.get(label, (-1, []))[0] != epoch:
            self._orders[label] = (epoch, self._shuffled(label, epoch))
        return self._orders[label][1][offset]

    def _shuffled(self, label: str, epoch: int) -> list[int]:
        order = list(self._members[label])
        if self.options.order == "shuffle":
            # slime's order: the standard library's shuffle, seeded with seed + epoch.
            random.Random(self.seed + epoch).shuffle(order)
        else:
            python_generator(self.seed, "bucket", label, epoch).shuffle(order)
        return order

    def _weighted_prompts(self, generator: random.Random, count: int) -> list[int]:
        """Weighted draw without replacement: the largest log(u) / weight (Efraimidis and Spirakis, 2006)."""
        size = len(self.buckets)
        chosen: list[int] = []
        while len(chosen) < count:
            # 1 - random() is in (0, 1], so the logarithm is finite.
            keys = [
                (math.log(1.0 - generator.random()) / self._weight(self._prompt_rate(index)), index)
                for index in range(size)
            ]
            chosen += [index for _, index in sorted(keys, reverse=True)[: count - len(chosen)]]
        return chosen

    def _moved(self, rate: float, observed: Sequence[float]) -> float:
        keep = (1.0 - _SMOOTHING) ** len(observed)
        return keep * rate + (1.0 - keep) * math.fsum(observed) / len(observed)

    def _weight(self, rate: float) -> float:
        return rate * (1.0 - rate) + self.options.floor

    def _bucket_rate(self, label: str) -> float:
        return self.bucket_rates.get(label, _INITIAL_RATE)

    def _prompt_rate(self, index: int) -> float:
        return self.prompt_rates.get(index, self._bucket_rate(self._labels[index]))
