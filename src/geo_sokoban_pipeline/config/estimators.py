"""The registered estimators: advantages, losses and importance rules by name, with the options that each alone reads.

A name in `grpo.advantage`, `grpo.loss` or `grpo.importance` is looked up here, and the options beside it are checked by
its model. A new estimator is one file and one line of `ESTIMATORS`; options of its own are one model. This module
imports none of the functions, so that options are checked before torch is loaded.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError, model_validator

from geo_sokoban_pipeline.config.base import ArgumentsError, Count, StrictModel, nearest
from geo_sokoban_pipeline.formats import leaves

Kind = Literal["advantage", "loss", "importance"]
Per = Literal["episode", "turn"]
Levels = Literal["token", "sequence", "geometric"]
Gamma = Annotated[float, Field(gt=0, le=1, description="Discount per turn.")]
Sequences = Annotated[
    Per, Field(description="Sequences of the ratio: all sampled tokens of an episode, or those of each turn.")
]
Level = Annotated[
    Levels,
    Field(
        description="Weight of a token: its own ratio, the product of its sequence's ratios, or their geometric mean."
    ),
]


class NoArguments(StrictModel):
    """An estimator without options."""


class TurnReturnArguments(StrictModel):
    """Return of each turn less a baseline."""

    gamma: Gamma = 0.95
    baseline: Literal["turn", "state", "state_turn"] = Field(
        "turn",
        description="Turns of the group whose mean return is subtracted: those with the same index, in the same "
        "state, or both.",
    )
    leave_one_out: bool = Field(False, description="Leave an episode's own turns out of its baseline.")
    scale: Literal["std", "none"] = Field(
        "none", description="Divide by the standard deviation of the advantages of the group's turns, or not."
    )


class GigpoArguments(StrictModel):
    """Group-in-group advantages."""

    gamma: Gamma = 0.95
    omega: float = Field(1.0, ge=0, le=1000, description="Weight of the advantage within a state.")
    scale: Literal["std", "none"] = Field("std", description="Divide both parts by their standard deviations, or not.")


class DistillationArguments(StrictModel):
    """The policy that is imitated on one's own samples."""

    teacher: str = Field(
        min_length=1, description="Policy folder, or hub id, of the teacher; its tokens are those of the policy."
    )


class VineArguments(StrictModel):
    """Continuations by which the values of states are measured."""

    continuations: Count = Field(
        512, description="Continuations an iteration at most, over all its groups with a signal."
    )
    each: Count = Field(8, description="Continuations of each measured state.")


class PpoArguments(StrictModel):
    """Clipped ratios of tokens."""

    clip_low: float = Field(
        0.2, ge=0, le=1, description="Ratios of new to old probability below 1 minus this are clipped."
    )
    clip_high: float = Field(
        0.28, ge=0, le=1e6, description="Ratios of new to old probability above 1 plus this are clipped."
    )
    dual_clip: float | None = Field(
        None,
        gt=1,
        le=1e6,
        description="Largest ratio that counts where the advantage is negative (dual-clip PPO). None: off.",
    )


class GspoArguments(StrictModel):
    """Clipped ratios of sequences."""

    clip_low: float = Field(3e-4, ge=0, le=1, description="Ratios below 1 minus this are clipped.")
    clip_high: float = Field(4e-4, ge=0, le=1e6, description="Ratios above 1 plus this are clipped.")
    per: Sequences = "episode"


class CispoArguments(StrictModel):
    """Bounds of the detached ratio, which weighs the log-probs."""

    low: float = Field(0.0, ge=0, le=1, description="Smallest weight of a token.")
    high: float = Field(5.0, ge=1, le=1e6, description="Largest weight of a token.")


class SapoArguments(StrictModel):
    """Temperatures of the soft gate."""

    positive: float = Field(1.0, gt=0, le=1000, description="Temperature where the advantage is positive.")
    negative: float = Field(1.05, gt=0, le=1000, description="Temperature where it is not.")


class GmpoArguments(StrictModel):
    """Clipped log-ratios, of which a sequence takes the geometric mean."""

    clip: float = Field(0.4, gt=0, le=20, description="Largest change of a token's log-prob that counts, in nats.")
    per: Sequences = "episode"


class TruncatedArguments(StrictModel):
    """Weights up to a cap."""

    level: Level = "token"
    per: Sequences = "episode"
    cap: float = Field(2.0, gt=0, le=1e6, description="Largest weight.")


class MaskedArguments(StrictModel):
    """Weights within bounds; tokens with others are not trained, and count in the denominators."""

    level: Level = "token"
    per: Sequences = "episode"
    low: float = Field(0.5, ge=0, le=1, description="Smallest weight that is kept.")
    high: float = Field(2.0, ge=1, le=1e6, description="Largest weight that is kept.")


@dataclass(frozen=True)
class Registered:
    """An estimator of this project.

    Attributes:
        function: its dotted path below `geo_sokoban_pipeline.grpo`.
        arguments: model of its options.
    """

    function: str
    arguments: type[StrictModel] = NoArguments


ESTIMATORS: Mapping[Kind, Mapping[str, Registered]] = {
    "advantage": {
        "grpo": Registered("advantages.grpo.grpo"),
        "dr_grpo": Registered("advantages.grpo.dr_grpo"),
        "rloo": Registered("advantages.rloo.rloo"),
        "reinforce_pp": Registered("advantages.reinforce_pp.reinforce_pp"),
        "reinforce_pp_baseline": Registered("advantages.reinforce_pp.reinforce_pp_baseline"),
        "turn_return": Registered("advantages.turn_return.turn_return", TurnReturnArguments),
        "gigpo": Registered("advantages.gigpo.gigpo", GigpoArguments),
        "vine": Registered("advantages.vine.vine", VineArguments),
        "distillation": Registered("advantages.distillation.distillation", DistillationArguments),
    },
    "loss": {
        "ppo": Registered("losses.ppo.ppo", PpoArguments),
        "gspo": Registered("losses.gspo.gspo", GspoArguments),
        "cispo": Registered("losses.cispo.cispo", CispoArguments),
        "sapo": Registered("losses.sapo.sapo", SapoArguments),
        "gmpo": Registered("losses.gmpo.gmpo", GmpoArguments),
    },
    "importance": {
        "none": Registered("importance.none"),
        "truncated": Registered("importance.truncated", TruncatedArguments),
        "masked": Registered("importance.masked", MaskedArguments),
    },
}


class OverlongOptions(StrictModel):
    """DAPO's soft penalty of long episodes (arXiv 2503.14476)."""

    length: Count = Field(description="Sampled tokens of an episode from which the reward is lowered by 1.")
    buffer: Count = Field(description="Tokens before that, over which it is lowered more and more.")

    @model_validator(mode="after")
    def _check(self) -> OverlongOptions:
        if self.buffer > self.length:
            raise ValueError(f"buffer={self.buffer} with length={self.length}: even an empty episode would be too long")
        return self


def registered(kind: Kind, spec: str) -> Registered | None:
    """The registered estimator of a name; None for code of the user's own.

    Raises:
        ValueError: no estimator has that name, and it is neither a dotted path nor a file.
    """
    if (found := ESTIMATORS[kind].get(spec)) is not None or "." in spec:
        return found
    near = nearest(spec, ESTIMATORS[kind])
    known = f"did you mean {near}? " if near else ""
    raise ValueError(f"{known}known are {', '.join(ESTIMATORS[kind])}; or give a dotted path, file.py, or file.py:name")


def complete_arguments(kind: Kind, spec: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """The options beside an estimator's name with its defaults; those of one's own code as they are.

    Raises:
        ArgumentsError: an option is unknown, missing or not allowed.
    """
    if (found := registered(kind, spec)) is None:
        # They are part of the run, whose options are compared and kept by name.
        if strange := [name for name in given if not str(name).isidentifier()]:
            raise ValueError(f"{strange[0]!r}: names of arguments are letters, digits and underscores")
        if not all(math.isfinite(value) for _, value in leaves(given) if isinstance(value, float)):
            raise ValueError("numbers must be finite")
        return dict(given)
    try:
        return found.arguments.model_validate(dict(given)).model_dump(mode="json")
    except ValidationError as error:
        raise ArgumentsError(error, given, found.arguments) from error
