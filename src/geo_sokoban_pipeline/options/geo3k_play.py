"""Arguments of the geometry environments (`env.args`) and rewards (`reward.args`).

The preset `slime_exact` sets what the original did; a value that is given beside it wins.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal, Self, TypeVar

from pydantic import Field, model_validator

from geo_sokoban_pipeline.options.base import Count, StrictModel, validate_parameters

Options = TypeVar("Options", bound="GradingOptions")
GraderName = Literal["default", "slime_exact", "deepscaler", "geo3k"]


class GradingOptions(StrictModel):
    """How an answer is compared with the reference."""

    EXACT: ClassVar[dict[str, Any]] = {"grader": "slime_exact"}

    preset: Literal["default", "slime_exact"] = Field(
        "default", description="`slime_exact`: the original's value of everything that is not given."
    )
    grader: GraderName = Field("default", description="See `rewards.grade_answer`.")
    tolerance: float = Field(
        0.0,
        ge=0,
        le=1e9,
        description="Largest difference that the graders `geo3k` and, from decimal labels, `default` accept.",
    )

    @property
    def keeps_thoughts(self) -> bool:
        """Whether thoughts are graded like any other text, as the original's graders do; they look for an end tag
        themselves, if at all.
        """
        return self.grader in ("slime_exact", "deepscaler")

    @model_validator(mode="after")
    def _check_tolerance(self) -> Self:
        if self.tolerance and self.grader not in ("default", "geo3k"):
            raise ValueError(
                f"tolerance={self.tolerance:g} with grader={self.grader}, which has none; take the grader geo3k or 0."
            )
        return self

    @model_validator(mode="before")
    @classmethod
    def _fill_in_preset(cls, given: Any) -> Any:
        exact = isinstance(given, Mapping) and given.get("preset") == "slime_exact"
        return {**cls.EXACT, **given} if exact else given


class AnswerEnvOptions(GradingOptions):
    """Arguments of the environment with one response."""


class Geo3kEnvOptions(GradingOptions):
    """Arguments of the environment with the scoring tool."""

    EXACT: ClassVar[dict[str, Any]] = {
        **GradingOptions.EXACT,
        "end_on_correct": False,
        "after_think": False,
        "tolerate_list_arguments": False,
        "quote": "raw",
    }

    max_turns: Count = Field(description="Responses of an episode; as many as rollout.max_turns.")
    end_on_correct: bool = Field(
        True, description="End the episode once the tool says that the answer is correct; off: play on."
    )
    after_think: bool = Field(True, description="Read calls only after the last `</think>` where there is one.")
    tolerate_list_arguments: bool = Field(
        True,
        description="Take arguments that are no JSON object for a missing answer; off: such a call fails the episode.",
    )
    earlier_call_counts: bool = Field(
        False,
        description="Where the last call of a response cannot be read, take the one before it; off: there is none.",
    )
    feedback: Literal["full", "brief"] = Field("full", description="Explain, or use as few tokens as possible.")
    quote: Literal["short", "raw"] = Field(
        "short", description="Feedback repeats an answer cut to 100 characters and without marks, or as it is."
    )


class AnswerRewardOptions(GradingOptions):
    """Arguments of the default reward, 1 for a correct answer and 0 otherwise."""

    EXACT: ClassVar[dict[str, Any]] = {**GradingOptions.EXACT, "grade_scope": "response"}

    grade_scope: Literal["assistant", "response"] = Field(
        "assistant",
        description="Look for the last box in what the policy wrote, or in all text after the prompt, feedback too.",
    )

    @property
    def format_share(self) -> float:
        """Part of the reward that is for the form."""
        return 0.0


class ToleranceRewardOptions(AnswerRewardOptions):
    """Arguments of the reward with a tolerance."""

    grader: GraderName = Field("geo3k", description="See `rewards.grade_answer`.")
    tolerance: float = Field(0.05, ge=0, le=1e9, description="Largest difference from the reference that is accepted.")

    EXACT: ClassVar[dict[str, Any]] = {"grade_scope": "response"}


class FormatRewardOptions(AnswerRewardOptions):
    """Arguments of the mix of correctness and form."""

    format_weight: float = Field(
        0.1, ge=0, le=1, description="Part of the reward that is for a closed think block with a box behind it."
    )

    @property
    def format_share(self) -> float:
        """See `format_weight`."""
        return self.format_weight


def read_options(path: str, given: Mapping[str, Any] | None, model: type[Options]) -> Options:
    """Arguments as options.

    Args:
        path: where they stand in the parameters, such as `env.args`.

    Raises:
        ParameterError: one is unknown, missing or not allowed; the message has its full path.
    """
    return validate_parameters(given or {}, model, prefix=path)
