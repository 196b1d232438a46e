"""Estimators by name: loads what `grpo.advantage`, `grpo.loss` and `grpo.importance` name, calls it, checks its result.

Registered estimators and code of the user's own are called alike: with plain data, then with the options beside the
name. An error in own code, or a result that does not fit, becomes one line with the option, the file and the line.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from geo_sokoban_pipeline.config.estimators import Kind, VineArguments, registered
from geo_sokoban_pipeline.config.grpo import GrpoOptions
from geo_sokoban_pipeline.envs.plugins import load_object
from geo_sokoban_pipeline.formats import type_name
from geo_sokoban_pipeline.grpo.groups import Episodes, Floats
from geo_sokoban_pipeline.runs.own_code import explain, where_defined

if TYPE_CHECKING:
    from torch import Tensor

    from geo_sokoban_pipeline.grpo.sequences import TokenBatch

# Metrics of the update that no loss may name.
TAKEN = frozenset({"loss", "pg_loss", "ppo_kl", "ppo_kl_signed", "entropy_loss", "kl_loss", "reverse_kl"})
TAKEN |= {"train_rollout_logprob_abs_diff", "tis", "tis_abs", "tis_clipfrac", "grad_norm", "skipped", "steps"}
TAKEN |= {"global_batch_size", "lr-pg_0"}


class EstimatorError(ValueError):
    """An estimator raised, or its result does not fit; the text names the option, the file and the line."""


@dataclass(frozen=True)
class Estimator:
    """A loaded estimator.

    Attributes:
        option: the option that names it, with its value.
        function: takes the data, then `args`.
        args: a model of ours, or the mapping that was given to own code.
        is_own: whether it is code of the user's.
    """

    option: str
    function: Callable[..., Any]
    args: Any
    is_own: bool

    @property
    def zero_on_equal_groups(self) -> bool:
        """Whether equal rewards of a group give advantages of exactly 0; of own code, where it says so."""
        return bool(getattr(self.function, "zero_on_equal_groups", False))

    @property
    def needs_turn_rewards(self) -> bool:
        """Whether it needs the parts of the reward that each response has earned."""
        return bool(getattr(self.function, "turn_rewards", False))

    @property
    def reads_tokens(self) -> bool:
        """Whether it reads numbers of tokens; of own code, unless it says that it does not."""
        return bool(getattr(self.function, "reads_tokens", True))

    @property
    def forks(self) -> VineArguments | None:
        """The continuations that it needs; None: it needs none."""
        if not getattr(self.function, "forks", False):
            return None
        given = self.args if self.is_own else self.args.model_dump()
        return VineArguments.model_validate({name: given[name] for name in VineArguments.model_fields if name in given})

    @property
    def per_token(self) -> bool:
        """Whether the update gives each token an advantage of its own."""
        return bool(getattr(self.function, "per_token", False))

    def call(self, data: Any) -> Any:
        """The function's result, unchecked.

        Raises:
            EstimatorError: it raised.
        """
        try:
            return self.function(data, self.args)
        except Exception as error:  # own code may raise anything
            raise EstimatorError(f"{self.option}: {explain(error)}") from error

    def refuse(self, problem: str) -> EstimatorError:
        """The error about a result, with the place of the function."""
        return EstimatorError(f"{self.option}: {problem}{where_defined(self.function)}")


def load_estimator(kind: Kind, options: GrpoOptions) -> Estimator:
    """The estimator that the options name, with its arguments.

    Raises:
        PluginError: own code that does not exist.
        EstimatorError: it is no function.
    """
    spec: str = getattr(options, kind)
    given: Mapping[str, Any] = getattr(options, f"{kind}_args")
    option = f"grpo.{kind}={spec}"
    if (found := registered(kind, spec)) is not None:
        function = load_object(f"geo_sokoban_pipeline.grpo.{found.function}")
        return Estimator(option, function, found.arguments.model_validate(dict(given)), is_own=False)
    function = load_object(spec, default_name=kind)
    if not callable(function):
        raise EstimatorError(f"{option}: is {type_name(function)}, not a function")
    return Estimator(option, function, dict(given), is_own=True)


def keeps_zeros(options: GrpoOptions) -> bool:
    """Whether episodes of a group with equal rewards have advantages of exactly 0 under these options."""
    return options.overlong is None and load_estimator("advantage", options).zero_on_equal_groups


@dataclass(frozen=True)
class Advantages:
    """The result of an advantage.

    Attributes:
        values: one array per episode: (n_e,) of its turns, or (1,) of the episode.
        per_turn: which of the two.
    """

    values: list[Floats]
    per_turn: bool


def estimate_advantages(estimator: Estimator, episodes: Episodes) -> Advantages:
    """Advantages of an iteration's episodes or of their turns, finite float64.

    Raises:
        EstimatorError: the estimator raised; it returned neither one number per episode nor one per turn; or one of
            them is not finite.
    """
    found = estimator.call(episodes)
    count = len(episodes.reward)
    if not isinstance(found, Sequence | np.ndarray) or isinstance(found, str) or len(found) != count:
        shown = type_name(found) + (f" of {len(found)}" if hasattr(found, "__len__") else "")
        raise estimator.refuse(
            f"must return one number, or one array of turns, for each of {count} episodes, not {shown}"
        )
    per_turn = count > 0 and np.ndim(found[0]) == 1
    try:
        values = [np.array(value, np.float64) if per_turn else np.array([value], np.float64) for value in found]
    except (TypeError, ValueError):
        raise estimator.refuse(f"must return numbers; the first is {type_name(found[0])}") from None
    for index, (value, lengths) in enumerate(zip(values, episodes.lengths, strict=True)):
        wanted = (len(lengths),) if per_turn else (1,)
        if value.shape != wanted:
            raise estimator.refuse(f"episode {index} has {len(lengths)} turns and advantages of shape {value.shape}")
        if not np.isfinite(value).all():
            raise estimator.refuse(
                f"episode {index} has the advantage {value[~np.isfinite(value)][0]}; it must be finite"
            )
    return Advantages(values, per_turn)


def estimate_loss(estimator: Estimator, batch: TokenBatch) -> tuple[Tensor, dict[str, Tensor]]:
    """(B, T) terms of the policy loss and further (B, T) numbers by name, all 0 where the mask is.

    Raises:
        EstimatorError: the estimator raised, or its result is not that.
    """
    found = estimator.call(batch)
    if not isinstance(found, tuple) or len(found) != 2 or not isinstance(found[1], dict):
        raise estimator.refuse(f"must return ((B, T) terms, metrics by name), not {type_name(found)}")
    terms, metrics = found
    if clash := sorted(map(str, metrics.keys() & TAKEN)):
        raise estimator.refuse(f"the metric {clash[0]!r} is the trainer's; give it another name")
    if estimator.is_own and batch.log_probs.requires_grad and not getattr(terms, "requires_grad", True):
        raise estimator.refuse("terms have no gradient; they must depend on batch.log_probs")
    checked = {name: _checked(estimator, f"metric {name!r}", value, batch).detach() for name, value in metrics.items()}
    return _checked(estimator, "terms", terms, batch), checked


def estimate_weights(estimator: Estimator, batch: TokenBatch) -> Tensor:
    """(B, T) weights of the token losses without gradient, 0 for dropped tokens and where the mask is 0.

    Raises:
        EstimatorError: the estimator raised, or its result is not that.
    """
    return _checked(estimator, "weights", estimator.call(batch), batch).detach()


def _checked(estimator: Estimator, name: str, value: Any, batch: TokenBatch) -> Tensor:
    """A tensor of the batch's shape, 0 where the mask is; of own code, finite."""
    shape = tuple(batch.mask.shape)
    if not hasattr(value, "masked_fill") or tuple(value.shape) != shape:
        shown = f"shape {tuple(value.shape)}" if hasattr(value, "shape") else type_name(value)
        raise estimator.refuse(f"{name} must be a tensor of shape {shape}, not {shown}")
    masked: Tensor = value.masked_fill(~batch.mask, 0.0)
    # A policy whose log-probs overflow is the trainer's matter: it skips the step.
    if estimator.is_own and bool(batch.log_probs.isfinite().all()) and not bool(masked.isfinite().all()):
        raise estimator.refuse(f"{name} must be finite where the mask is 1")
    return masked
